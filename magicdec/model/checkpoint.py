"""From a model's name on the command line to its loaded shard: finding, checking, placing weights.

Owns the names a user may give and the check of a checkpoint against its config. It must not know of
process groups, caches or how a tensor is stored (`weight_files`, `random_weights`). What is wrong
with a checkpoint shows in `find_model`, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.family import find_family
from magicdec.model.hf_config import load_model_config
from magicdec.model.named import DEMO_DIRECTORIES, RANDOM_PREFIX, WEIGHT_SUFFIXES, demo_directory
from magicdec.model.presets import PRESETS
from magicdec.model.random_weights import TILE_ROWS, RandomWeights
from magicdec.model.transformer import Transformer
from magicdec.model.weight_files import open_weights
from magicdec.model.weight_map import Piece, weight_map

CHOICES = (
    "demo, demo-draft, random:<preset>, a Hugging Face directory, "
    "or a .safetensors/.pth/.bin file beside its config.json"
)
# Elements read at once: what is held besides the final tensors while loading.
READ_ELEMENTS = 1 << 24
PROBLEMS_SHOWN = 3


class WeightSource(Protocol):
    """Anything that holds a model's tensors under their Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor, from headers alone."""
        ...

    def dtypes(self) -> dict[str, str]:
        """torch's name of every tensor's stored type, as "bfloat16", from headers alone."""
        ...

    def read(self, piece: Piece) -> Tensor:
        """That slice of one tensor, on the CPU, in the stored dtype."""
        ...

    def where(self, name: str) -> Path | None:
        """The file that holds or should hold `name`, for messages; None where there is no file."""
        ...


@dataclass(frozen=True)
class BodyWeights:
    """A checkpoint of a model without its head: its names lack what the whole model's have in
    front."""

    source: WeightSource
    body: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.body + name: shape for name, shape in self.source.shapes().items()}

    def dtypes(self) -> dict[str, str]:
        return {self.body + name: dtype for name, dtype in self.source.dtypes().items()}

    def read(self, piece: Piece) -> Tensor:
        return self.source.read(replace(piece, name=piece.name.removeprefix(self.body)))

    def where(self, name: str) -> Path | None:
        return self.source.where(name.removeprefix(self.body))


@dataclass(frozen=True)
class ModelSource:
    """A model found and checked but not loaded; random weights have no `tokenizer_directory`."""

    name: str
    config: ModelConfig
    weights: WeightSource
    tokenizer_directory: Path | None
    is_random: bool


def find_model(flag: str, name: str) -> ModelSource:
    """The model a user named with `flag` ("--model").

    `demo` and `demo-draft` win over directories of that name. Raises ValueError when the name is
    unknown or the checkpoint is incomplete, broken or does not fit its config.
    """
    path = Path(name).expanduser()
    if name.startswith(RANDOM_PREFIX):
        source = _random_model(flag, name)
    elif name in DEMO_DIRECTORIES:
        source = _packaged_model(flag, name)
    elif path.is_dir():
        source = _stored_model(path, path)
    elif path.suffix in WEIGHT_SUFFIXES:
        if not path.is_file():
            raise ValueError(f"{flag} {name!r} does not exist; choose from {CHOICES}")
        source = _stored_model(path.parent, path)
    else:
        raise ValueError(f"{flag} {name!r} is not known; choose from {CHOICES}")
    check_weights(source.config, source.weights)
    check_dtypes(source.config, source.weights)
    return source


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model holds, by its Hugging Face name."""
    table = weight_map(config, Shard(), range(config.num_layers))
    return {piece.name: piece.full_shape for pieces in table.values() for piece in pieces}


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Compare names and shapes, from headers alone.

    Raises ValueError naming the file and the first tensors that are missing, misshapen or not part
    of the model.
    """
    found = source.shapes()
    if config.num_layers > len(found):  # before a table of as many layers as a broken file says
        raise ValueError(
            f"{source.where('') or config.name}: the weights do not fit the config: "
            f"{len(found)} tensors cannot make {config.num_layers} layers"
        )
    problems = _problems(config, found)
    if problems:
        file = source.where(problems[0][0]) or config.name
        shown = "; ".join(text for _, text in problems[:PROBLEMS_SHOWN])
        more = len(problems) - PROBLEMS_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ValueError(f"{file}: the weights do not fit the config: {shown}{rest}")


def check_dtypes(config: ModelConfig, source: WeightSource) -> None:
    """Raises ValueError naming the first tensor of the model that is not stored as floating-point
    numbers: quantised weights mean nothing without their scales."""
    dtypes = source.dtypes()
    for name in expected_shapes(config):
        if not dtypes[name].startswith(("float", "bfloat")):
            raise ValueError(
                f"{source.where(name)}: tensor {name} is stored as {dtypes[name]}; "
                "choose a checkpoint of floating-point weights"
            )


def _problems(config: ModelConfig, found: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """(tensor, what is wrong with it), the missing ones first."""
    expected = expected_shapes(config)
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


def load_transformer(
    config: ModelConfig,
    source: WeightSource,
    shard: Shard,
    layers: range | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Transformer:
    """Layers `layers` (None: all) of rank `shard`, frozen, in eval mode, without a rotary table.

    Reads only this rank's slices, into tensors of their final `dtype` on `device`. Raises
    ValueError for files that became unreadable since they were found.
    """
    layers = range(config.num_layers) if layers is None else layers
    with torch.device("meta"):
        model = Transformer(config, shard, layers)
    for parameter, pieces in weight_map(config, shard, layers).items():
        module_name, _, leaf = parameter.rpartition(".")
        module = model.get_submodule(module_name)
        tensor = torch.empty(module.get_parameter(leaf).shape, dtype=dtype, device=device)
        _fill(tensor, pieces, source)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    assert not any(parameter.is_meta for parameter in model.parameters()), "a weight was not loaded"
    return model.eval()


def _fill(tensor: Tensor, pieces: list[Piece], source: WeightSource) -> None:
    """Stack the pieces by rows into `tensor`, a bounded number of elements at a time."""
    filled = 0
    for piece in (part for whole in pieces for part in _parts(whole)):
        values = source.read(piece)
        assert values.is_floating_point(), "checked when the model was found"
        tensor[filled : filled + len(values)].copy_(values)
        filled += len(values)
    assert filled == len(tensor), "the pieces make the parameter"


def _parts(piece: Piece) -> Iterator[Piece]:
    """Cut at multiples of the random weights' tile height, so that no tile is made twice."""
    step = max(READ_ELEMENTS // piece.width // TILE_ROWS, 1) * TILE_ROWS
    first, end = piece.rows
    while first < end:
        last = min((first // step + 1) * step, end)
        yield replace(piece, rows=(first, last))
        first = last


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store rotary frequencies or masks, and some repeat a tied head."""
    is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return is_tied_head or name.endswith(find_family(config.architecture).buffers)


def _random_model(flag: str, name: str) -> ModelSource:
    preset = PRESETS.get(name.removeprefix(RANDOM_PREFIX))
    if preset is None:
        raise ValueError(
            f"{flag} {name!r} names no preset; choose from "
            + ", ".join(RANDOM_PREFIX + key for key in PRESETS)
        )
    weights = RandomWeights(expected_shapes(preset.config))
    return ModelSource(name, preset.config, weights, tokenizer_directory=None, is_random=True)


def _packaged_model(flag: str, name: str) -> ModelSource:
    directory = demo_directory(name)
    if not directory.is_dir():
        raise ValueError(
            f"{flag} {name!r}: this installation lacks the packaged model {directory}; "
            "install the package again or run scripts/train_demo.py"
        )
    found = _stored_model(directory, directory)
    return replace(found, name=name, config=replace(found.config, name=name))


def _stored_model(directory: Path, weights: Path) -> ModelSource:
    try:
        config = load_model_config(directory)
    except (ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory / 'config.json'}: not a model's config ({error})") from None
    body, stored = find_family(config.architecture).body, open_weights(weights)
    is_bare = body and not any(name.startswith(body) for name in stored.shapes())
    source = BodyWeights(stored, body) if is_bare else stored
    return ModelSource(config.name, config, source, directory, is_random=False)
