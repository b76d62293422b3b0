"""GgufFile: the header of a GGUF file (versions 2 and 3, ggml's docs/gguf.md), also of one that is
split into several. Imports no torch.

Nothing of a file is believed: counts, lengths and offsets are compared with the size of the file
before anything of that size is read or made.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from magicdec.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, RETIRED, type_name
from magicdec.model.gguf.named import OTHERWISE
from magicdec.output.files import AGAIN, open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
MOST_NAME_BYTES = 1 << 16
MOST_HEADER_BYTES = 256 << 20  # a vocabulary of 256 thousand tokens has 20 MB
STRING = 8
ARRAY = 9
# By value type: the format of `struct`.
NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, by its `name` there. `shape` is torch's, [outputs, inputs] of a matrix,
    the reverse of the stored order; `type_id` is ggml's; `offset` is from the file's beginning."""

    file: Path
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `shape[-1]` numbers."""
        kind = BLOCK_TYPES.get(self.type_id) or FLOAT_TYPES[self.type_id]
        return self.shape[-1] // kind.block * kind.num_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read_gguf(path: Path) -> GgufFile:
    """The header of a file, and of the others that it was split into. Raises ValueError, one line
    with the file, for anything but a complete file of types that are read."""
    try:
        stat = path.stat()
        return _read_known(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name a .gguf file that you may read"
        ) from None


@lru_cache(maxsize=4)  # config, weights and tokenizer are read one after the other
def _read_known(path: Path, size: int, time_ns: int) -> GgufFile:
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    match = SPLIT_NAME.match(path.name)
    if match is None or int(match[3]) != count:
        raise ValueError(
            f"{path}: it is a part of {count} files, which its name does not say; the parts are "
            f"named NAME-00001-of-{count:05d}.gguf and so on"
        )
    names = [f"{match[1]}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    for name in names:
        if not (path.parent / name).is_file():
            raise ValueError(
                f"{path}: its part {name} is not beside it; put all {count} into one directory"
            )
    tensors: dict[str, GgufTensor] = {}
    metadata: dict[str, Any] = {}
    for index, name in enumerate(names):
        part = _read_one(path.parent / name)
        if part.metadata.get("split.no") != index:
            raise ValueError(
                f"{part.path}: it says that it is not part {index} (`split.no`); {AGAIN}"
            )
        twice = next((tensor for tensor in part.tensors if tensor in tensors), None)
        if twice is not None:
            raise ValueError(f"{part.path}: tensor {twice} is in another part too; {AGAIN}")
        metadata = part.metadata | metadata  # the first part has the model's
        tensors |= part.tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(
            f"{path}: its parts have {len(tensors)} tensors, it says {expected}; {AGAIN}"
        )
    return GgufFile(path, metadata, tensors)


def _read_one(path: Path) -> GgufFile:
    with open_regular(path) as file:
        try:
            return _Header(path, file).read()
        except (UnicodeDecodeError, struct.error, RecursionError):
            raise ValueError(f"{path}: not a complete GGUF file (broken header); {AGAIN}") from None


class _Header:
    """Reads the header of an open file in its order."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = path.stat().st_size
        self.position = 0

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: not a complete GGUF file ({why}); {AGAIN}")

    def take(self, count: int) -> bytes:
        if count > min(self.size, MOST_HEADER_BYTES) - self.position:
            raise self.refuse(f"its header needs {count} bytes at {self.position}, past its end")
        data = self.file.read(count)
        if len(data) != count:
            raise self.refuse("it ends within its header")
        self.position += count
        return data

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things of which each has at least `least_bytes` in the header."""
        count = int(self.number("Q"))
        if count * least_bytes > self.size - self.position:
            raise self.refuse(f"it says that it has {count} {what}")
        return count

    def string(self) -> str:
        return self.take(self.count("bytes of a text", 1)).decode("utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        name = self.string()
        if len(name) > MOST_NAME_BYTES or not name.isprintable():
            raise self.refuse(f"the name of {what} is no text")
        return name

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise self.refuse(f"value type {kind} is not known")
        inner = self.number("I")
        if inner in NUMBERS:
            width = struct.calcsize("<" + NUMBERS[inner])
            count = self.count("values", width)
            return list(struct.unpack(f"<{count}{NUMBERS[inner]}", self.take(count * width)))
        return [self.value(inner) for _ in range(self.count("values", 8))]

    def read(self) -> GgufFile:
        if self.take(4) != MAGIC:
            raise self.refuse("it does not begin with GGUF")
        version = self.number("I")
        if version not in VERSIONS:
            is_swapped = version >> 24 in VERSIONS and version & 0xFFFFFF == 0
            what = "it is big-endian" if is_swapped else f"version {version}"
            raise ValueError(
                f"{self.path}: {what}; little-endian versions 2 and 3 are read; {OTHERWISE}"
            )
        num_tensors = self.count("tensors", 24)
        num_values = self.count("values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.name("a value")
            metadata[key] = self.value(self.number("I"))
        infos = dict[str, tuple[tuple[int, ...], int, int]]()
        for _ in range(num_tensors):
            name = self.name("a tensor")
            if name in infos:
                raise self.refuse(f"tensor {name} is there twice")
            infos[name] = self.info(name)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.refuse(f"general.alignment {alignment} is no power of two")
        start = -(-self.position // alignment) * alignment
        tensors = {name: self.tensor(name, *info, start, alignment) for name, info in infos.items()}
        self.check_order(tensors, start, alignment)
        return GgufFile(self.path, metadata, tensors)

    def check_order(self, tensors: dict[str, GgufTensor], start: int, alignment: int) -> None:
        """Raise ValueError unless tensors lie one after the other, as ggml demands: else a type or
        an offset is wrong."""
        expected = start
        for name, tensor in tensors.items():
            if tensor.offset != expected:
                raise self.refuse(
                    f"tensor {name} is at {tensor.offset}, but the one before it ends at {expected}"
                )
            num_bytes = tensor.num_rows * tensor.row_bytes
            expected += -(-num_bytes // alignment) * alignment

    def info(self, name: str) -> tuple[tuple[int, ...], int, int]:
        count = self.number("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise self.refuse(f"tensor {name} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))
        return shape[::-1], self.number("I"), self.number("Q")

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        type_id: int,
        offset: int,
        start: int,
        alignment: int,
    ) -> GgufTensor:
        kind = BLOCK_TYPES.get(type_id) or FLOAT_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(map(type_name, (*FLOAT_TYPES, *BLOCK_TYPES)))
            what = "retired" if type_id in RETIRED else "not read"
            raise ValueError(
                f"{self.path}: tensor {name} has type {type_name(type_id)}, which is {what}; "
                f"types that are: {known}; {OTHERWISE}"
            )
        if min(shape) < 1 or shape[-1] % kind.block:
            raise ValueError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} numbers, which {kind.name} "
                f"divides into blocks of {kind.block}; {AGAIN}"
            )
        tensor = GgufTensor(self.path, name, shape, type_id, start + offset)
        if offset % alignment:
            raise self.refuse(f"tensor {name} is at {offset}, which is not aligned to {alignment}")
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        if end > self.size:
            raise self.refuse(
                f"tensor {name} of type {kind.name} ends at {end}, the file at {self.size}"
            )
        return tensor
