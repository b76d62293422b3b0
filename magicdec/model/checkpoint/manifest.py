"""The checksums beside a converted checkpoint: FILE.manifest.json.

Owns the manifest's fields and the comparison of a file with its manifest. The manifest holds the
sha256 of the whole file, and for each tensor the shape, the dtype and the sha256 of its values
(little-endian, row by row), so that damage can be located.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from magicdec.files import hash_file
from magicdec.model.checkpoint.weight_files import open_weights
from magicdec.model.checkpoint.weight_map import Piece

VERSION = 1
READ_ELEMENTS = 1 << 22  # elements of a tensor in memory at a time


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str  # torch's name of it
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of the file named `file`, of `size` bytes. `quantized` is "int8" if its matrices
    are, else None."""

    file: str
    size: int
    sha256: str
    tensors: dict[str, TensorEntry]
    quantized: str | None = None

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


def manifest_path(file: Path) -> Path:
    return file.with_name(file.name + ".manifest.json")


def read_manifest(file: Path) -> Manifest:
    """The manifest beside `file`. Raises ValueError naming the manifest when it is missing,
    unreadable or of another version."""
    path = manifest_path(file)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']}, expected {VERSION}")
        tensors = {
            name: TensorEntry(tuple(entry["shape"]), entry["dtype"], entry["sha256"])
            for name, entry in raw["tensors"].items()
        }
        return Manifest(raw["file"], raw["size"], raw["sha256"], tensors, raw.get("quantized"))
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; without it {file.name} cannot be verified"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a manifest ({error})") from None


def row_parts(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Pieces of a tensor in stored order, each with a bounded number of elements."""
    width = 1
    for size in shape[1:]:
        width *= size
    step = max(READ_ELEMENTS // max(width, 1), 1)
    for first in range(0, shape[0], step):
        yield Piece(name, (first, min(first + step, shape[0])), None, shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values of a CPU tensor, row by row; copied only if they are not contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def find_damage(file: Path) -> str | None:
    """One line that says how `file` differs from its manifest; None if it does not. Raises
    ValueError when there is no manifest."""
    manifest = read_manifest(file)
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"{file}: {error.strerror}"
    if size != manifest.size:
        return f"{file} has {size} bytes, its manifest says {manifest.size}"
    if hash_file(file) == manifest.sha256:
        return None
    try:
        weights = open_weights(file)
    except ValueError as error:
        return f"{error}; its sha256 differs from the manifest's"
    shapes, dtypes = weights.shapes(), weights.dtypes()
    for name, entry in manifest.tensors.items():
        if name not in shapes or (shapes[name], dtypes[name]) != (entry.shape, entry.dtype):
            description = f"{entry.dtype} tensor of shape {entry.shape}"
            return f"{file}: {name} is not the {description} that the manifest lists"
        digest = hashlib.sha256()
        for piece in row_parts(name, shapes[name]):
            digest.update(raw_bytes(weights.read(piece)))
        if digest.hexdigest() != entry.sha256:
            return f"{file}: the values of tensor {name} differ from those in the manifest"
    return f"{file}: no tensor differs from the manifest, but other bytes of the file do"
