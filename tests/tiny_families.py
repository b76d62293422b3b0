"""Small random models of every family, saved as their checkpoints are; holds no tests itself.

A new family is one row in MODELS. Weights are random with non-trivial biases and norms, so that
every term matters.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from conftest import load
from safetensors.torch import save_file
from tiny_mimo import call_it_mimo
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.model.transformer import Transformer

# An odd vocabulary cuts into uneven shards.
ROWS = 2
LENGTH = 100
# Those whose layers keep states, which stages and forks do not take (`oracle/test_hybrid.py`).
HYBRIDS = {
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
}
VOCAB = 131
HEADS = 8
SIZE = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
GPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HEADS * SIZE,
    "n_inner": 100,
    "n_layer": 3,
    "n_head": HEADS,
    "n_positions": 256,
}
FALCON_SIZES = {k: SIZES[k] for k in SIZES if k not in ("intermediate_size", "num_key_value_heads")}
BLOOM_SIZES = {"vocab_size": VOCAB, "hidden_size": HEADS * SIZE, "n_layer": 3, "n_head": HEADS}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
GPT_OSS_ROPE = YARN_ROPE | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": LINEAR_ROPE | {"rope_theta": 1e6},
}
SLIDING = "sliding_attention"
FULL = "full_attention"
BIAS = {"bias": True, "ffn_hidden_size": 100}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", SIZES | {"num_key_value_heads": 8}),
    "llama-3.1": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "qwen2.5": ("Qwen2", SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mimo": ("MiMo", SIZES | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 24}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 56, "head_dim": 16}),
    "ministral": (
        "Ministral",
        SIZES | {"sliding_window": 24, "head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen2-windows": (
        "Qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "gemma3": (
        "Gemma3",
        SIZES
        | {"head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": False}
        | {"sliding_window": 24, "layer_types": [SLIDING, FULL, SLIDING]}
        | {"query_pre_attn_scalar": 24, "rope_parameters": GEMMA_ROPES},
    ),
    "mixtral": ("Mixtral", SIZES | {"head_dim": 16, "sliding_window": 56}),
    "qwen3-moe": (
        "Qwen3Moe",
        SIZES
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 52}
        | {"mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe-sums": (
        "Qwen3Moe",
        SIZES
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
        | {"decoder_sparse_step": 2},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        SIZES
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 52}
        | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [2], "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 40},
    ),
    "gpt-oss": (
        "GptOss",
        SIZES
        | {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 24}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.5}
        | {"layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": GPT_OSS_ROPE},
    ),
    "tinyllama": ("Llama", SIZES | {"num_key_value_heads": 1}),
    "linear-rope": ("Llama", SIZES | {"rope_parameters": LINEAR_ROPE}),
    "dynamic-rope": ("Llama", SIZES | {"rope_parameters": DYNAMIC_ROPE}),
    "yarn-rope": ("Qwen2", SIZES | {"rope_parameters": YARN_ROPE, "head_dim": 16}),
    "biases": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "gpt2": ("GPT2", GPT_SIZES),
    "gptj": ("GPTJ", GPT_SIZES | {"rotary_dim": 4}),
    "starcoder": ("GPTBigCode", GPT_SIZES),
    "bigcode-mha": ("GPTBigCode", GPT_SIZES | {"multi_query": False}),
    "falcon-7b": ("Falcon", FALCON_SIZES),
    "falcon-40b": ("Falcon", FALCON_SIZES | NEW),
    "falcon-11b": ("Falcon", FALCON_SIZES | NEW | BIAS | {"num_ln_in_parallel_attn": 1}),
    "falcon-sequential": (
        "Falcon",
        FALCON_SIZES | BIAS | {"multi_query": False, "parallel_attn": False},
    ),
    "bloom": ("Bloom", BLOOM_SIZES),
    "bloom-6-heads": ("Bloom", BLOOM_SIZES | {"n_head": 6, "hidden_size": 48}),
    "baichuan-7b": ("BaiChuan", SIZES | {"num_key_value_heads": HEADS}),
    "baichuan-13b": ("Baichuan", SIZES | {"num_key_value_heads": HEADS}),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3": "Gemma3ForCausalLM"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
MLP_UNITS = ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_hidden_size")
Logits = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> logits [B, T, VOCAB], by other code than ours."""


@dataclass(frozen=True)
class Reference:
    logits: Logits

    def greedy(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """By the whole text's forward for each token: no cache."""
        ids = list(prompt)
        for _ in range(num_new):
            ids.append(int(self.logits(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(prompt) :]


@dataclass(frozen=True)
class TransformersReference(Reference):
    model: Any

    def greedy(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """By `generate`, with its cache."""
        out = self.model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=num_new, do_sample=False, eos_token_id=None
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@dataclass(frozen=True)
class Stored:
    """A checkpoint, and what computes the same by other code."""

    directory: Path
    reference: Reference

    @property
    def source(self) -> ModelSource:
        return find_model("--model", str(self.directory))

    def load(
        self, shard: Shard = Shard(), layers: range | None = None, has_ends: bool | None = None
    ) -> Transformer:
        return load(self.directory, shard, layers, has_ends)


DIRECTORY = TemporaryDirectory()  # removed when the process ends


@cache
def stored(name: str) -> Stored:
    """The checkpoint of that row, made once in a process."""
    directory = Path(DIRECTORY.name, name)
    with torch.random.fork_rng():
        return Stored(directory, make_checkpoint(directory, name))


def make_checkpoint(
    directory: Path, name: str, max_shard_size: str = "1GB", mlp_units: int = 100
) -> Reference:
    """Save a random model of that row."""
    family, sizes = MODELS[name]
    sizes = {key: mlp_units if key in MLP_UNITS else value for key, value in sizes.items()}
    if family.lower() == "baichuan":
        return make_baichuan(directory, family, sizes)
    model = make_model("Qwen2" if family == "MiMo" else family, sizes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if family == "MiMo":
        call_it_mimo(directory)
    return TransformersReference(no_grad(lambda ids: model(ids).logits), model)


def make_model(family: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config)
    model = model.float().eval()
    # A tied head says each token again, unless the layers add much more than the embedding.
    spread = 0.4 if config.tie_word_embeddings else 0.15
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):  # of a norm
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            matrix = 0.15 if "emb" in name or "wte" in name or "wpe" in name else spread
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else matrix)
    return model


def no_grad(logits: Logits) -> Logits:
    def call(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return logits(ids)

    return call


def tokens() -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def make_baichuan(directory: Path, family: str, sizes: dict[str, Any]) -> Reference:
    """Llama's tensors under Baichuan's names; for the 13B with ALiBi in place of rotary."""
    model = make_model("Llama", sizes)
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    raw = sizes | {"architectures": [f"{family}ForCausalLM"], "rms_norm_eps": 1e-6}
    del raw["num_key_value_heads"]
    if family == "Baichuan":
        raw["model_max_length"] = raw.pop("max_position_embeddings")
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}W_pack.weight"] = torch.cat(parts)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    if family == "BaiChuan":
        return TransformersReference(no_grad(lambda ids: model(ids).logits), model)
    return Reference(no_grad(lambda ids: baichuan_13b(tensors, ids)))


def baichuan_13b(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Written out after `modeling_baichuan.py` of the 13B, for 8 heads, whose slopes are powers of
    2."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[name], 1e-6)

    rows, length = ids.shape
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)])
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # key - query
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(SIZES["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        packed = (
            norm(x, name + "input_layernorm.weight") @ tensors[name + "self_attn.W_pack.weight"].T
        )
        q, k, v = (t.view(rows, length, HEADS, SIZE).transpose(1, 2) for t in packed.chunk(3, -1))
        weights = torch.softmax(q @ k.mT / SIZE**0.5 + bias, dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(rows, length, -1)
        x = x + mixed @ tensors[name + "self_attn.o_proj.weight"].T
        normed = norm(x, name + "post_attention_layernorm.weight")
        gate, up = (normed @ tensors[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ tensors[name + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T
