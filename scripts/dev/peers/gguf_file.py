"""Converts a Llama checkpoint saved by transformers (safetensors) to GGUF, llama.cpp's file format:
the same values, with llama.cpp's names and order of rows. As a command it writes the vocabulary
too, as llama.cpp's server needs it:

    python scripts/dev/peers/gguf_file.py magicdec/demo/target demo.gguf

Must not import torch, because it runs in llama.cpp's environment. Needs numpy, and for writing the
`gguf` package, for a vocabulary `sentencepiece`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def read_bfloat16(path: Path) -> dict[str, Array]:
    """The bfloat16 tensors of a safetensors file as uint16 bits, because numpy has no bfloat16.

    Raises ValueError for a tensor of another dtype.
    """
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}; it must be BF16")
        first, last = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[first:last], np.uint16).reshape(entry["shape"])
    return tensors


def widen(bits: Array) -> Array:
    """The bfloat16 values `bits` as float32."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def interleave_rotary(weight: Array, num_heads: int) -> Array:
    """A query or key projection [heads * D, width] with the rows of each head reordered:
    transformers rotates dimensions i and i + D/2 as a pair, llama.cpp dimensions 2i and 2i + 1."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])  # [heads, 2, D/2, width]
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors under llama.cpp's names, with its order of rotary dimensions in q and k."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    renamed = {}
    for name, tensor in tensors.items():
        if name in OTHER_NAMES:
            renamed[OTHER_NAMES[name]] = tensor
            continue
        _, _, layer, inner = name.split(".", 3)  # model.layers.<layer>.<inner>
        short = LAYER_NAMES[inner.removesuffix(".weight")]
        if short in heads:
            tensor = interleave_rotary(tensor, heads[short])
        renamed[f"blk.{layer}.{short}.weight"] = tensor
    return renamed


def write_gguf(model: Path, path: Path, dtype: str, has_vocabulary: bool = False) -> None:
    """Write the Llama model in directory `model` to `path`. Matrices have `dtype` (float32 or
    bfloat16); norms are float32, as llama.cpp requires. Without the vocabulary of the model's
    `tokenizer.model`, llama.cpp takes token ids alone."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, config)
    if has_vocabulary:
        add_vocabulary(writer, model / "tokenizer.model")
    else:
        writer.add_tokenizer_model("no_vocab")
    tensors = read_bfloat16(model / "model.safetensors")
    for name, bits in gguf_tensors(config, tensors).items():
        if dtype == "float32" or bits.ndim == 1:
            writer.add_tensor(name, widen(bits))
        else:
            writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """Write the architecture's sizes. Only RoPE without scaling is supported."""
    rotary = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    assert rotary.get("rope_type", "default") == "default", rotary
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_vocabulary(writer: Any, path: Path) -> None:
    """Write the pieces of a SentencePiece model, with their scores and kinds."""
    from gguf import TokenType
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(path))
    ids = range(pieces.vocab_size())

    def kind(token: int) -> int:
        kinds = {
            TokenType.UNKNOWN: pieces.is_unknown(token),
            TokenType.CONTROL: pieces.is_control(token),
            TokenType.BYTE: pieces.is_byte(token),
        }
        return int(next((name for name, is_one in kinds.items() if is_one), TokenType.NORMAL))

    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(token) for token in ids])
    writer.add_token_scores([pieces.get_score(token) for token in ids])
    writer.add_token_types([kind(token) for token in ids])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_add_space_prefix(pieces.encode("a", out_type=str)[0] != "a")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a bfloat16 Llama checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asked = parser.parse_args()
    write_gguf(asked.model, asked.out, asked.dtype, has_vocabulary=True)


if __name__ == "__main__":
    main()
