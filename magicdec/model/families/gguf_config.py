"""The ModelConfig of a GGUF file: its metadata become the fields of a Hugging Face config, which
are read and checked as those of any checkpoint. Imports no torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.model.config import ModelConfig
from magicdec.model.families.fields import MOST_LAYERS
from magicdec.model.families.gguf_architectures import architecture_of
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.gguf.file import GgufFile, read_gguf
from magicdec.model.gguf.named import OTHERWISE
from magicdec.model.gguf.vocabulary import end_ids, named_id
from magicdec.output.files import AGAIN

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"
# By key after the architecture's name: the field of a config.json.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Keys that are read below, or that say what the tensors say too.
READ = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
# Values of other keys that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "use_parallel_residual": (False,),
}
# Of Llama 3.1 to 3.3, whose files have only the divisors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


# The name of a file that could be any model, or any in this format.
ANY_MODEL = re.compile(r"(ggml-)?model([-._](b?f\d+|i?q\d\w*))?", re.IGNORECASE)


def load_gguf_config(path: Path) -> ModelConfig:
    """Raises ValueError, one line with the file, for a model that is not certainly computed."""
    file = read_gguf(path)
    try:
        config = parse_hf_config(hf_fields(file), name=called(path))
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; {AGAIN}") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; {OTHERWISE}") from None
    return config


def called(path: Path) -> str:
    """The name of a model in a file: the file's own, or its folder's where that says nothing."""
    name, part, _ = path.stem.partition("-00001-of-")
    name = name if part else path.stem
    return path.resolve().parent.name if ANY_MODEL.fullmatch(name) else name


def hf_fields(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as fields of a config.json. Raises ValueError for a key that changes what
    is computed and is not read."""
    architecture = architecture_of(file)
    prefix = f"{file.architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    known = {*FIELDS, *READ, *architecture.keys}
    neutral = {**NEUTRAL, **architecture.neutral}
    for key, value in own.items():
        if key not in known and value not in neutral.get(key, ()):
            raise ValueError(f"{prefix}{key} {str(value)[:60]} is not read")
    raw = {field: own[key] for key, field in FIELDS.items() if key in own}
    if raw["num_hidden_layers"] > MOST_LAYERS:  # for each of which tables have an entry
        raise ValueError(f"block_count {raw['num_hidden_layers']} is over {MOST_LAYERS}")
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in architecture.keys and own.get(key, head_dim) != head_dim:
            raise ValueError(f"{prefix}{key} {own[key]} is not the size {head_dim} of a head")
    raw["rope_theta"] = rounded(raw.get("rope_theta", 10000.0))
    raw["rms_norm_eps"] = rounded(raw["rms_norm_eps"])
    fields = {
        **raw,
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "head_dim": head_dim,
        "vocab_size": vocabulary(file, own),
        "tie_word_embeddings": HEAD not in file.tensors,
        "rope_scaling": rope_scaling(file, own, head_dim, raw["rope_theta"]),
        "bos_token_id": named_id(file, "bos"),
        "eos_token_id": end_ids(file),
    }
    return fields | architecture.fields(file, own, fields)


def rounded(value: float) -> float:
    """The shortest decimal with the bits of a float32: files hold 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))


def vocabulary(file: GgufFile, own: dict[str, Any]) -> int:
    if EMBEDDING not in file.tensors:
        raise KeyError(EMBEDDING)
    size = file.tensors[EMBEDDING].shape[0]
    if own.get("vocab_size", size) != size:
        raise ValueError(f"vocab_size {own['vocab_size']} is not the {size} rows of {EMBEDDING}")
    return size


def rope_scaling(
    file: GgufFile, own: dict[str, Any], head_dim: int, theta: float
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "linear" if "rope.scaling.factor" in own else "none")
    if ROPE_DIVISORS in file.tensors:
        if kind != "none":
            raise ValueError(f"it has both {ROPE_DIVISORS} and rope.scaling.type {kind}")
        return llama3_scaling(file, head_dim, theta)
    if kind == "none":
        return None
    factor = own["rope.scaling.factor"]
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type {kind} is not read; none, linear and yarn are")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": own["rope.scaling.original_context_length"],
        "beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        if own.get(key, 1.0) != 1.0:  # 1 is the temperature that follows from the factor
            raise ValueError(f"{key} {own[key]} is not read; 1 is")
    return scaling


def llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The scaling whose divisors of the rotation's frequencies the file has. Raises ValueError if
    they are not Llama 3's."""
    tensor = file.tensors[ROPE_DIVISORS]
    if tensor.shape != (head_dim // 2,) or tensor.type_id != 0:
        raise ValueError(f"{ROPE_DIVISORS} is no vector of {head_dim // 2} float32 numbers")
    divisors = np.fromfile(tensor.file, "<f4", head_dim // 2, offset=tensor.offset)
    factor = rounded(float(divisors.max()))
    low, high, trained = LLAMA3.values()
    for found, i in zip(divisors, range(0, head_dim, 2), strict=True):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (trained / wavelength - low) / (high - low)
        share = min(max(smooth, 0.0), 1.0)
        expected = 1 / ((1 - share) / factor + share)
        if not math.isclose(found, expected, rel_tol=1e-5):
            raise ValueError(
                f"{ROPE_DIVISORS} are not those of Llama 3's scaling by {factor} of {trained} "
                f"positions: {found:g} in place of {expected:g} at dimension {i}"
            )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
