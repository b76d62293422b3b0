"""Checks that a checkpoint holds the model that its config describes, from file headers alone.

Owns the list of tensors that a model needs, and the errors for tensors that are missing, have the
wrong shape, do not belong to the model or have an unsupported dtype. Must not know how a tensor is
stored or loaded.
"""

from __future__ import annotations

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.quantization import holds_int8, int8_shapes
from magicdec.model.checkpoint.weight_files import WeightSource
from magicdec.model.checkpoint.weight_map import SCALE, weight_map
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family

PROBLEMS_SHOWN = 3


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor in a checkpoint of this model, by its Hugging Face name."""
    table = weight_map(config, Shard(), range(config.num_layers))
    return {piece.name: piece.full_shape for pieces in table.values() for piece in pieces}


def stored_shapes(config: ModelConfig, source: WeightSource) -> dict[str, tuple[int, ...]]:
    """`expected_shapes`, or `int8_shapes` if `source` is an int8 checkpoint."""
    return int8_shapes(config) if holds_int8(source) else expected_shapes(config)


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Compare names and shapes of the stored tensors with the config.

    Raises ValueError naming the file and the first tensors that are missing, have the wrong shape
    or are not part of the model.
    """
    found = source.shapes()
    if config.num_layers > len(found):  # a broken config may ask for a huge number of layers
        raise ValueError(
            f"{source.where('') or config.name}: the weights do not fit the config: "
            f"{len(found)} tensors cannot make {config.num_layers} layers"
        )
    problems = _problems(config, source)
    if problems:
        file = source.where(problems[0][0]) or config.name
        shown = "; ".join(text for _, text in problems[:PROBLEMS_SHOWN])
        more = len(problems) - PROBLEMS_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ValueError(f"{file}: the weights do not fit the config: {shown}{rest}")


def check_dtypes(config: ModelConfig, source: WeightSource) -> None:
    """Raises ValueError naming the first tensor of the model that is not floating-point, or that is
    neither int8 nor float32 as int8 weights and their scales must be. Integer weights without
    scales are refused, because their values are unknown."""
    dtypes, expected = source.dtypes(), stored_shapes(config, source)
    for name in expected:
        if name + SCALE in expected or name.endswith(SCALE):
            kind = "float32" if name.endswith(SCALE) else "int8"
            if dtypes[name] != kind:
                raise ValueError(
                    f"{source.where(name)}: tensor {name} is stored as {dtypes[name]}; "
                    f"in a checkpoint of int8 weights it must be {kind}"
                )
        elif not dtypes[name].startswith(("float", "bfloat")):
            raise ValueError(
                f"{source.where(name)}: tensor {name} is stored as {dtypes[name]}; "
                "choose a checkpoint of floating-point weights"
            )


def _problems(config: ModelConfig, source: WeightSource) -> list[tuple[str, str]]:
    """(tensor, description of the problem) for every faulty tensor, missing ones first."""
    found = source.shapes()
    expected = stored_shapes(config, source)
    missing = [
        (name, f"{name} is missing, expected shape {shape}")
        for name, shape in expected.items()
        if name not in found
    ]
    misshapen = [
        (name, f"{name} has shape {found[name]}, expected {shape}")
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    unexpected = [
        (name, f"{name} of shape {shape} is not part of the model")
        for name, shape in found.items()
        if name not in expected and not _is_redundant(name, config)
    ]
    return missing + misshapen + unexpected


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether the tensor may be ignored: rotary frequencies and masks that old checkpoints store,
    and a stored copy of a tied head."""
    is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return is_tied_head or name.endswith(find_family(config.architecture).buffers)
