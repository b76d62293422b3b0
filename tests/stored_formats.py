"""Small models in the formats that checkpoints store numbers in, and some whose layers differ, with
a tokenizer; holds no tests itself. A new format is one row in FORMATS."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf.constants import GGMLQuantizationType as Type
from test_gguf import MIXED, reference_model, save, trained_bpe, vocabulary_of
from test_gguf_families import MODELS as GGUF_FAMILIES
from test_quantised import FORMATS as QUANTISED
from tiny_families import MODELS, make_model
from tiny_quantized import save_mxfp4, save_quantized

VOCAB = 420  # of the tokenizer
PRE = "gpt-2"
MIXTURE = GGUF_FAMILIES["qwen3moe"]
Write = Callable[[Path], Path]
"""Writes a checkpoint into a directory. Returns what `--model` names."""


@dataclass(frozen=True)
class Format:
    """`low_bit`: the copies of it that draft, which are narrower. `has_groups`: its matrices are
    numbers in groups, else they are plain weights when they are read. `takes_heads`: EAGLE-3
    heads draft for such a model. `is_plain`: nothing is dequantised."""

    write: Write
    low_bit: tuple[str, ...] = ()
    has_groups: bool = True
    takes_heads: bool = True
    is_plain: bool = False


def gguf_of(*types: Type) -> Write:
    def write(directory: Path) -> Path:
        path = directory / "model.gguf"
        strings = vocabulary_of(trained_bpe(PRE), PRE)
        save(path, "llama", reference_model("Llama", vocab_size=VOCAB), types, strings=strings)
        return path

    return write


def gguf_mixture(*types: Type) -> Write:
    """Stacked experts, of which each is a matrix in groups."""

    def write(directory: Path) -> Path:
        path = directory / "model.gguf"
        MIXTURE.saved(path, types, vocabulary_of(trained_bpe(PRE), PRE), VOCAB)
        return path

    return write


def quantised(name: str) -> Write:
    """A row of tests/oracle/test_quantised.py."""

    def write(directory: Path) -> Path:
        table, made, _ = QUANTISED[name]
        save_quantized(directory, reference_model("Llama", vocab_size=VOCAB), table, made)
        trained_bpe(PRE).save(str(directory / "tokenizer.json"))
        return directory

    return write


def plain(name: str) -> Write:
    """A row of tests/tiny_families.py, whose layers differ."""

    def write(directory: Path) -> Path:
        family, sizes = MODELS[name]
        sizes = sizes | {"vocab_size": VOCAB, "intermediate_size": 96}
        sizes |= {"moe_intermediate_size": 64} if "num_experts" in sizes else {}
        make_model(family, sizes).save_pretrained(directory)
        trained_bpe(PRE).save(str(directory / "tokenizer.json"))
        return directory

    return write


def mxfp4(directory: Path) -> Path:
    """gpt-oss as it is published: experts in MXFP4 with biases, sink logits, windows by turns."""
    family, sizes = MODELS["gpt-oss"]
    save_mxfp4(
        directory, make_model(family, sizes | {"vocab_size": VOCAB, "intermediate_size": 96})
    )
    trained_bpe(PRE).save(str(directory / "tokenizer.json"))
    return directory


# Every form of groups that kernels know: 4 and 8 bits, groups of 16, 32 and more, with a minimum
# and without one, scales of two and four bytes.
FORMATS = {
    "Q4_0": Format(gguf_of(Type.Q4_0)),
    "Q4_K": Format(gguf_of(Type.Q4_K)),
    "Q2_K": Format(gguf_of(Type.Q2_K)),
    "Q8_0": Format(gguf_of(Type.Q8_0), ("int4",)),
    "Q6_K": Format(gguf_of(Type.Q6_K), ("int4",)),
    "Q5_1": Format(gguf_of(Type.Q5_1), ("int4",)),
    "mixed types": Format(gguf_of(*MIXED)),
    "mixture, mixed types": Format(gguf_mixture(Type.Q4_K, Type.Q8_0, Type.Q6_K)),
    "gptq": Format(quantised("gptq, zero points")),
    "gptq, 8 bits": Format(quantised("gptq, 8 bits, one group"), ("int4",)),
    "gptq, act-order": Format(quantised("gptq, act-order")),
    "awq": Format(quantised("awq")),
    "compressed-tensors, group": Format(quantised("packed, group")),
    "compressed-tensors, channel": Format(quantised("integers, channel"), ("int4",)),
    "fp8": Format(quantised("fp8, blocks"), ("int4", "int8"), has_groups=False),
    "windows of some layers": Format(plain("ministral"), ("int4", "int8"), False, is_plain=True),
    "mixture": Format(plain("qwen3-moe"), ("int4", "int8"), False, is_plain=True),
    "gpt-oss": Format(mxfp4, ("int4",)),
    "gemma3": Format(plain("gemma3"), ("int4", "int8"), False, takes_heads=False, is_plain=True),
}
DIRECTORY = TemporaryDirectory()  # removed when the process ends


@cache
def stored(name: str) -> Path:
    """What `--model` names of that row, made once in a process."""
    directory = Path(DIRECTORY.name, name.replace(", ", "-").replace(" ", "-"))
    directory.mkdir()
    with torch.random.fork_rng():
        return FORMATS[name].write(directory)
