"""Weights from files: safetensors, and dicts of tensors by torch.save (`.bin`, `.pth`), in one file
or in several with an index.

Owns reading headers and slices, and the errors for broken files. Runs no code from a file: pickles
are read by torch's restricted loader.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.model.checkpoint.weight_map import Piece

# In the order in which a directory is searched: published formats before the converted one.
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "model.pth"),
)
GPT_FAST_NAME = re.compile(r"layers\.\d+\.attention\.wqkv\.weight|tok_embeddings\.weight")
# safetensors' names of the dtypes that torch has. Others are shown under safetensors' names.
TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}


class StoredTensor(NamedTuple):
    """What a header says of a tensor: its full shape, and torch's name of its type, as "bfloat16".
    `file` is None where no file holds it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path | None = None


class WeightSource:
    """A source of a model's tensors, which `tensors` has by their Hugging Face names. `path` is the
    file or the index that was named; None where there is no file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}

    def where(self, name: str) -> Path | None:
        """The file that holds `name`, or the one that should have it, for messages."""
        return self.tensors[name].file if name in self.tensors else self.path

    def read(self, piece: Piece) -> Tensor:
        """A slice of one tensor, on the CPU, in the stored dtype. From a file, it is a view of the
        mapped file, which is read when it is copied."""
        raise NotImplementedError


class SafetensorsWeights(WeightSource):
    """Tensors of one `.safetensors` file, or of the files a `model.safetensors.index.json` names.

    Files are opened for each read. A rank therefore keeps no mapped pages of slices that it has
    copied, and the object can be pickled. Raises ValueError naming the file when one is missing or
    truncated or lacks a tensor that the index places in it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for file, names in _names_by_file(path).items():
            with _open(file) as handle:
                for name in _check_placed(names, dict.fromkeys(handle.keys()), file, path):
                    header = handle.get_slice(name)
                    dtype = TORCH_NAMES.get(header.get_dtype(), header.get_dtype())
                    self.tensors[name] = StoredTensor(tuple(header.get_shape()), dtype, file)

    def read(self, piece: Piece) -> Tensor:
        with _open(self.tensors[piece.name].file) as handle:
            return _cut(handle.get_slice(piece.name), piece)


class PthWeights(WeightSource):
    """Tensors of a `.pth` or `.bin` file, a dict from Hugging Face names to tensors, or of the
    files that a `pytorch_model.bin.index.json` names; memory-mapped.

    Pages that were read count as resident memory, but they are file cache that the system may drop.
    Raises ValueError naming the file when one is missing or unreadable, holds anything but tensors,
    or lacks a tensor that the index places in it. A file in the gpt-fast layout is refused unless
    `gpt_fast` is set; then the tensors have gpt-fast's names.
    """

    def __init__(self, path: Path, gpt_fast: bool = False) -> None:
        super().__init__(path)
        self.gpt_fast = gpt_fast
        self._mapped: dict[str, Tensor] = {}
        for file, names in _names_by_file(path).items():
            mapped = _load_tensors(file, gpt_fast)
            for name in _check_placed(names, mapped, file, path):
                self._mapped[name] = mapped[name]
                dtype = str(mapped[name].dtype).removeprefix("torch.")
                self.tensors[name] = StoredTensor(tuple(mapped[name].shape), dtype, file)

    def __reduce__(self) -> tuple[type[PthWeights], tuple[Path | None, bool]]:
        # The other process maps the file itself; pickling the tensors would copy them.
        return PthWeights, (self.path, self.gpt_fast)

    def read(self, piece: Piece) -> Tensor:
        return _cut(self._mapped[piece.name], piece)


class BodyWeights(WeightSource):
    """A checkpoint that was saved from the model without its head. Its names lack the prefix
    `body`, as in "transformer.", and are returned with it."""

    def __init__(self, source: WeightSource, body: str) -> None:
        super().__init__(source.path)
        self.source, self.body = source, body
        self.tensors = {body + name: tensor for name, tensor in source.tensors.items()}

    def read(self, piece: Piece) -> Tensor:
        return self.source.read(replace(piece, name=piece.name.removeprefix(self.body)))


def open_weights(path: Path) -> SafetensorsWeights | PthWeights:
    """Weights of a `.safetensors`, `.bin` or `.pth` file, or of the first of `WEIGHT_FILES` that a
    directory holds.

    Raises ValueError naming the path when a directory holds none of them.
    """
    if path.is_dir():
        files = [path / name for name in WEIGHT_FILES if (path / name).exists()]
        if not files:
            raise ValueError(f"{path} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")
        path = files[0]
    is_pickle = path.suffix in (".pth", ".bin") or path.name.endswith(".bin.index.json")
    return PthWeights(path) if is_pickle else SafetensorsWeights(path)


def _cut(tensor: Any, piece: Piece) -> Tensor:
    """The slice `piece` of a tensor or of a lazy safetensors slice."""
    cut: Tensor = tensor[piece.stored]
    return cut.T if piece.transposed else cut


def _open(path: Path | None) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({_one_line(error)})") from None


def _names_by_file(path: Path) -> dict[Path, list[str]]:
    """The tensors that are to be read from each file: those that an index places there. An empty
    list, for a file that is no index, stands for all of them. Raises ValueError if a file that an
    index names does not exist."""
    if path.suffix != ".json":
        return {path: []}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): path.parent / file for name, file in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of weight files ({_one_line(error)})") from None
    names_of: dict[Path, list[str]] = {}
    for name, file in files.items():
        try:
            exists = file.is_file()
        except (ValueError, OSError):  # not a valid file name
            exists = False
        if not exists:
            raise ValueError(
                f"{file} does not exist, though {path.name} places tensor {name} there"
            )
        names_of.setdefault(file, []).append(name)
    return names_of


def _check_placed(
    names: list[str], stored: Collection[str], file: Path, index: Path
) -> Collection[str]:
    """The tensors to read of a file: `names`, or all that it has `stored` if there are none. Raises
    ValueError if it lacks one of them."""
    missing = next((name for name in names if name not in stored), None)
    if missing is not None:
        raise ValueError(
            f"{file}: tensor {missing} is missing, though {index.name} places it there"
        )
    return names or stored


def _load_tensors(path: Path, gpt_fast: bool = False) -> dict[str, Tensor]:
    try:
        value = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path}: holds pickled objects other than tensors, which are not read; "
            "save a plain dict of tensors"
        ) from None
    except Exception as error:  # a broken file may raise anything here
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
        if GPT_FAST_NAME.fullmatch(str(name)) and not gpt_fast:
            raise ValueError(
                f"{path}: tensor {name} shows the gpt-fast layout; convert the file first: "
                f"magicdec convert --checkpoint_dir {path.parent} --out FILE"
            )
    return value


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
