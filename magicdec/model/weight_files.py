"""Weights from files: safetensors (one file or an indexed set) and `.pth` dicts of tensors.

Owns reading headers and slices, and the errors of broken files. It must not know of configs, ranks
or devices. It runs no code from a file: pickles are read by torch's restricted loader.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.model.weight_map import Piece

SINGLE_FILE, INDEX_FILE, PTH_FILE = "model.safetensors", "model.safetensors.index.json", "model.pth"
GPT_FAST_NAME = re.compile(r"layers\.\d+\.attention\.wqkv\.weight|tok_embeddings\.weight")


class SafetensorsWeights:
    """Tensors of one `.safetensors` file, or of the files a `model.safetensors.index.json` names.

    Files are opened for each read, so a rank keeps no pages of slices it has copied, and the object
    can be sent to other processes. Raises ValueError naming the file when one is missing, truncated
    or not what the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".json":
            self._files = _read_index(path)
        else:
            with _open(path) as handle:
                self._files = dict.fromkeys(handle.keys(), path)
        self._shapes = self._read_shapes()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor."""
        return self._shapes

    def where(self, name: str) -> Path:
        """The file that holds `name`, or the file that should have named it."""
        return self._files.get(name, self.path)

    def read(self, piece: Piece) -> Tensor:
        """The slice `piece` in the stored dtype: a view of the mapped file, read when copied."""
        with _open(self._files[piece.name]) as handle:
            return _cut(handle.get_slice(piece.name), piece)

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        names_of: dict[Path, list[str]] = defaultdict(list)
        for name, file in self._files.items():
            names_of[file].append(name)
        shapes: dict[str, tuple[int, ...]] = {}
        for file, names in names_of.items():
            with _open(file) as handle:
                held = set(handle.keys())
                for name in names:
                    if name not in held:
                        raise ValueError(
                            f"{file}: tensor {name} is missing, "
                            f"though {self.path.name} places it there"
                        )
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        return shapes


class PthWeights:
    """Tensors of a `.pth` file: a dict from Hugging Face names to tensors, memory-mapped.

    Pages that were read count as resident, but are file cache that the system may drop. Raises
    ValueError naming the file when it is unreadable, holds anything but tensors, or has the
    gpt-fast layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _load_tensors(path)

    def __reduce__(self) -> tuple[type[PthWeights], tuple[Path]]:
        # Another process maps the file itself; pickling the tensors would copy all of them.
        return PthWeights, (self.path,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def where(self, name: str) -> Path:
        """The file that holds, or should hold, `name`."""
        return self.path

    def read(self, piece: Piece) -> Tensor:
        """The slice `piece` in the stored dtype: a view of the mapped file, read when copied."""
        return _cut(self._tensors[piece.name], piece)


def open_weights(path: Path) -> SafetensorsWeights | PthWeights:
    """Weights of a `.safetensors` or `.pth` file, or of a directory with files of the usual names.

    Raises ValueError naming the path when a directory holds none of them.
    """
    if path.is_dir():
        found = [
            path / name for name in (SINGLE_FILE, INDEX_FILE, PTH_FILE) if (path / name).exists()
        ]
        if not found:
            raise ValueError(
                f"{path} holds no weights; expected {SINGLE_FILE}, {INDEX_FILE} or {PTH_FILE}"
            )
        path = found[0]
    return PthWeights(path) if path.suffix == ".pth" else SafetensorsWeights(path)


def _cut(tensor: Any, piece: Piece) -> Tensor:
    """Works on tensors and on safetensors' lazy slices alike."""
    cut: Tensor = tensor[piece.stored]
    return cut.T if piece.transposed else cut


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({_one_line(error)})") from None


def _read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, of an index whose every file is there."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): path.parent / file for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a safetensors index ({_one_line(error)})") from None
    for name, file in files.items():
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist, though {path.name} places tensor {name} there"
            )
    return files


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        value = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path}: holds pickled objects other than tensors, which are not read; "
            "save a plain dict of tensors"
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path}: not a complete torch.save archive ({_one_line(error)})"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a dict of tensors, found {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path}: expected a dict of tensors, but {name!r} is a {type(tensor).__name__}"
            )
        if GPT_FAST_NAME.fullmatch(str(name)):
            raise ValueError(
                f"{path}: tensor {name} is of the gpt-fast layout; "
                "the file must be converted to Hugging Face names first"
            )
    return value


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
