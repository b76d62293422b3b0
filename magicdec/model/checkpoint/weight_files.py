"""Weights from files: safetensors, or torch.save dicts (`.bin`, `.pth`), whole or with an index.
Runs no code from a file: pickles go through torch's restricted loader.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.model.checkpoint.weight_map import IndexRange, read_index
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat
from magicdec.output.files import check_regular, exists

# In the order in which a directory is searched: published formats before the converted one.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "model.pth",
)
# safetensors' names of the dtypes that torch has. Others are shown under safetensors' names.
TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"},
    **{"F8_E8M0": "float8_e8m0fnu"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}


# Elements read at a time, which bounds the extra memory while loading and converting.
READ_ELEMENTS = 1 << 24
TILE_ROWS = 256  # random weights are made in tiles of so many rows

Index = tuple[slice, ...]
"""A slice of a tensor as it is stored. Dimensions that it leaves out are whole."""


class StoredTensor(NamedTuple):
    """A tensor's header: full shape, torch's dtype name as "bfloat16", and `file`, if any.
    `numbers`: the format of one that is stored in groups, whose `dtype` is that of its weights."""

    shape: tuple[int, ...]
    dtype: str
    file: Path | None = None
    numbers: NumberFormat | None = None


class WeightSource:
    """A source of tensors by Hugging Face names. `path` is the named file or index, if any."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}

    def where(self, name: str) -> Path | None:
        """The file that holds `name`, or should, for messages."""
        return self.tensors[name].file if name in self.tensors else self.path

    def read(self, name: str, index: Index = ()) -> Tensor:
        """A slice of one tensor on the CPU in the stored dtype; from a file, a view that is read
        when copied."""
        raise NotImplementedError

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        """The same of a matrix that is stored in groups, as its numbers, by slices of outputs and
        inputs. A slice of inputs begins and ends with groups, and has all inputs if they have an
        order."""
        raise NotImplementedError

    def input_order(self, name: str) -> Tensor | None:
        """The order of the columns of a matrix that is stored in groups, as in GroupedNumbers."""
        return None


def row_spans(rows: IndexRange, width: int) -> Iterator[IndexRange]:
    """`rows` of `width` elements in bounded parts, cut at multiples of TILE_ROWS, so that no
    random tile is generated twice."""
    step = max(READ_ELEMENTS // max(width, 1) // TILE_ROWS, 1) * TILE_ROWS
    first, end = rows
    while first < end:
        last = min((first // step + 1) * step, end)
        yield first, last
        first = last


class FileWeights(WeightSource):
    """Tensors of one file, or of an index. Raises ValueError for a missing or unreadable file,
    or one without a tensor that the index places there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for file, names in _names_by_file(path).items():
            stored = self.open(file)
            missing = next((name for name in names if name not in stored), None)
            if missing is not None:
                raise ValueError(
                    f"{file}: tensor {missing} is missing, though {path.name} places it there"
                )
            self.tensors |= {name: stored[name] for name in names or stored}

    def open(self, file: Path) -> dict[str, StoredTensor]:
        raise NotImplementedError


class SafetensorsWeights(FileWeights):
    """Tensors of `.safetensors` files, opened for each read, so that no mapped pages stay and
    the object can be pickled."""

    def open(self, file: Path) -> dict[str, StoredTensor]:
        with _open(file) as handle:
            headers = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(
                    tuple(header.get_shape()),
                    TORCH_NAMES.get(header.get_dtype(), header.get_dtype()),
                    file,
                )
                for name, header in headers.items()
            }

    def read(self, name: str, index: Index = ()) -> Tensor:
        with _open(self.tensors[name].file) as handle:
            values: Tensor = handle.get_slice(name)[index or ...]  # `...`: a scalar too
            return values


class PthWeights(FileWeights):
    """Tensors of memory-mapped `.pth` or `.bin` dicts. Pages read are file cache that the system
    may drop. Raises ValueError for a file that holds anything but tensors."""

    def __init__(self, path: Path) -> None:
        self._mapped: dict[Path | None, dict[str, Tensor]] = {}
        super().__init__(path)

    def open(self, file: Path) -> dict[str, StoredTensor]:
        tensors = self._mapped[file] = _load_tensors(file)
        return {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)
            for name, tensor in tensors.items()
        }

    def __reduce__(self) -> tuple[type[PthWeights], tuple[Path | None]]:
        # The other process maps the file itself; pickling the tensors would copy them.
        return PthWeights, (self.path,)

    def read(self, name: str, index: Index = ()) -> Tensor:
        return self._mapped[self.tensors[name].file][name][index]


class RenamedWeights(WeightSource):
    """Weights of which some are stored under other names, in `stored_as` by their own."""

    def __init__(self, source: WeightSource, stored_as: dict[str, str]) -> None:
        super().__init__(source.path)
        self.source = source
        self.stored_as = stored_as
        self.tensors = source.tensors | {n: source.tensors[s] for n, s in stored_as.items()}

    def read(self, name: str, index: Index = ()) -> Tensor:
        return self.source.read(self.stored_as.get(name, name), index)

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        return self.source.read_numbers(self.stored_as.get(name, name), index)

    def input_order(self, name: str) -> Tensor | None:
        return self.source.input_order(self.stored_as.get(name, name))


def with_body(source: WeightSource, body: str, head: str) -> WeightSource:
    """A checkpoint of the model's body, whose names lack the prefix `body` ("transformer."),
    with it. Names of the `head` never have one."""
    stored_as = {
        name if name.startswith(f"{head}.") else body + name: name for name in source.tensors
    }
    whole = RenamedWeights(source, stored_as)
    whole.tensors = {name: whole.tensors[name] for name in stored_as}
    return whole


def open_weights(path: Path) -> FileWeights:
    """Weights of a file, or of the first of `WEIGHT_FILES` in a directory. Raises ValueError if
    it holds none."""
    if path.is_dir():
        files = [path / name for name in WEIGHT_FILES if (path / name).exists()]
        if not files:
            raise ValueError(f"{path} holds no weights; expected one of {', '.join(WEIGHT_FILES)}")
        path = files[0]
    is_pickle = path.suffix in (".pth", ".bin") or path.name.endswith(".bin.index.json")
    return PthWeights(path) if is_pickle else SafetensorsWeights(path)


def _open(path: Path | None) -> Any:
    assert path is not None, "only a tensor of a file is read"
    try:
        check_regular(path)
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({_one_line(error)})") from None


def _names_by_file(path: Path) -> dict[Path, list[str]]:
    """The tensors to read from each file, by index; an empty list stands for all. Raises
    ValueError for a missing file."""
    if path.suffix != ".json":
        return {path: []}
    names_of: dict[Path, list[str]] = {}
    for name, file_name in read_index(path).items():
        file = path.parent / file_name
        if not exists(file):
            raise ValueError(
                f"{file} does not exist, though {path.name} places tensor {name} there"
            )
        names_of.setdefault(file, []).append(name)
    return names_of


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        check_regular(path)
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
    return value


def _one_line(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).strip().split("\n")[0]
