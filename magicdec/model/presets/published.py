"""Published models of further families, as the fields of their `config.json` that describe the
architecture. `presets` makes them available as `random:<preset>`. Imports no torch.

Owns these fields, the repository on the hub and the published parameter count (a tied head is
counted once). `checked` has the same meaning as in `presets`. The files of unchecked models were
not read; their numbers agree with the published sizes and parameter counts.
"""

from __future__ import annotations

from typing import Any

Raw = dict[str, Any]


def _gpt2(n_embd: int, n_layer: int, n_head: int) -> Raw:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 50257,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


GPT_J_6B: Raw = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "activation_function": "gelu_new",
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "rotary_dim": 64,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 50400,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
STARCODER: Raw = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "activation_function": "gelu_pytorch_tanh",
    "n_embd": 6144,
    "n_inner": 24576,
    "n_layer": 40,
    "n_head": 48,
    "n_positions": 8192,
    "multi_query": True,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 49152,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON: Raw = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
    "parallel_attn": True,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 65024,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "torch_dtype": "bfloat16",
}
FALCON_7B = FALCON | {
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
}
FALCON_40B = FALCON | {
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
BLOOM_7B1: Raw = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 4096,
    "n_layer": 30,
    "n_head": 32,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "vocab_size": 250880,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
QWEN3_8B: Raw = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
LLAMA_7B: Raw = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
CODELLAMA_7B = LLAMA_7B | {
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "vocab_size": 32016,
    "torch_dtype": "bfloat16",
}
BAICHUAN_7B = LLAMA_7B | {
    "architectures": ["BaiChuanForCausalLM"],
    "model_type": "baichuan",
    "max_position_embeddings": 4096,
    "vocab_size": 64000,
}
BAICHUAN_13B: Raw = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "model_max_length": 4096,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

# fmt: off
PUBLISHED: tuple[tuple[str, str, int, bool, Raw], ...] = (
    ("gpt2", "openai-community/gpt2", 124_439_808, False, _gpt2(768, 12, 12)),
    ("gpt2-medium", "openai-community/gpt2-medium", 354_823_168, False, _gpt2(1024, 24, 16)),
    ("gpt2-large", "openai-community/gpt2-large", 774_030_080, False, _gpt2(1280, 36, 20)),
    ("gpt2-xl", "openai-community/gpt2-xl", 1_557_611_200, False, _gpt2(1600, 48, 25)),
    ("gpt-j-6b", "EleutherAI/gpt-j-6b", 6_050_882_784, True, GPT_J_6B),
    ("starcoder", "bigcode/starcoder", 15_517_456_384, False, STARCODER),
    ("falcon-7b", "tiiuae/falcon-7b", 6_921_720_704, False, FALCON_7B),
    ("falcon-40b", "tiiuae/falcon-40b", 41_303_293_952, False, FALCON_40B),
    ("bloom-7b1", "bigscience/bloom-7b1", 7_069_016_064, False, BLOOM_7B1),
    ("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, False, QWEN3_8B),
    ("llama-7b", "huggyllama/llama-7b", 6_738_415_616, False, LLAMA_7B),
    ("codellama-7b", "codellama/CodeLlama-7b-hf", 6_738_546_688, False, CODELLAMA_7B),
    ("baichuan-7b", "baichuan-inc/Baichuan-7B", 7_000_559_616, False, BAICHUAN_7B),
    ("baichuan-13b", "baichuan-inc/Baichuan-13B-Base", 13_264_901_120, False, BAICHUAN_13B),
)
# fmt: on
