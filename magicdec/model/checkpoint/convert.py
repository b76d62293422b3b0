"""Converts any readable checkpoint to one file of weights, tensor by tensor, with a checksum in
FILE.manifest.json.

A crash leaves no partial file: files are renamed when complete. Memory is bounded by a part of one
tensor.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magicdec.model.checkpoint.finite import check_finite
from magicdec.model.checkpoint.quantization import QuantizedWeights
from magicdec.model.checkpoint.quantized.converted import (
    stored_parts,
    values_of_matrix,
    values_of_outputs,
)
from magicdec.model.checkpoint.quantized.stated import stated_tables
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.model.checkpoint.weight_files import (
    TORCH_NAMES,
    StoredTensor,
    WeightSource,
    row_spans,
)
from magicdec.model.checkpoint.weight_map import (
    Piece,
    expected_shapes,
    find_pieces,
    matrix_pieces,
    untie_head,
)
from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import FOREIGN
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.gguf.file import read_gguf
from magicdec.model.gguf.named import is_gguf
from magicdec.model.gguf.vocabulary import tokenizer_files
from magicdec.model.linear.quantizers import Quantizer
from magicdec.names import QUANTIZERS, load_named
from magicdec.output.files import complete_file, hash_file, load_json, load_object, make_new
from magicdec.output.writing import to_json, write_text

# Files that a checkpoint needs besides its weights; copied when the output is in another directory.
CONFIG = "config.json"
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SAFETENSORS_NAMES = {name: code for code, name in TORCH_NAMES.items()}
MANIFEST_VERSION = 1
FLAG = "--out"  # names what is written

Tensors = Mapping[str, StoredTensor]
"""The tensors to write, as they are to be stored."""


def find_checkpoint(flag: str, directory: Path) -> ModelSource:
    """The checkpoint in `directory`, or a GGUF file. Raises ValueError as `find_model` does."""
    if not directory.is_dir() and not (is_gguf(directory) and directory.is_file()):
        raise ValueError(
            f"{flag} {directory} is not a directory; name one that holds a checkpoint, or a .gguf "
            "file"
        )
    return find_model(flag, str(directory.resolve()))  # never a packaged model of that name


def quantized(source: ModelSource, name: str, mtp_head: ModelConfig | None = None) -> ModelSource:
    """The source with its matrices, and those of its head for multi-token prediction, in the format
    of that name. Raises ValueError for a matrix that its groups do not divide."""
    quantizer: Quantizer = load_named(QUANTIZERS, name)
    config = untie_head(source.config)
    pieces = matrix_pieces(config) + ([] if mtp_head is None else matrix_pieces(mtp_head))
    odd = next((piece for piece in pieces if not quantizer.divides(piece.width)), None)
    if odd is not None:
        raise ValueError(
            f"--quantize {name}: groups of {quantizer.least_group} do not divide the "
            f"{odd.width} inputs of {odd.name}; leave it out"
        )
    weights = QuantizedWeights(source.weights, source.config, quantizer, mtp_head)
    return replace(source, config=config, weights=weights)


def convert(
    source: ModelSource,
    out: Path,
    dtype: str | None,
    progress: Callable[[str], None] = lambda name: None,
    widens: bool = True,
    mtp_head: ModelConfig | None = None,
) -> Tensors:
    """Write the model's tensors, and those of its head for multi-token prediction with the config
    `mtp_head`, to `out` (`.safetensors` or `.pth`), with a manifest. Returns the tensors written.

    `dtype` None keeps stored dtypes, and numbers in groups. `widens`: a dtype is that of matrices
    in groups too. `progress` gets tensor names.

    Raises:
        ValueError: `out` is an input file or beside the config of quantised weights, the disk has
            too little space, a value is not finite as written, or writing fails. `out` is then
            unchanged.
    """
    tensors = source.tensors
    pieces = find_pieces(source.config)
    if mtp_head is not None:
        tensors |= {name: source.weights.tensors[name] for name in expected_shapes(mtp_head)}
        pieces |= find_pieces(mtp_head)
    files = {tensor.file for tensor in tensors.values()}
    if out.exists() and any(file is not None and file.samefile(out) for file in files):
        raise ValueError(f"{FLAG} {out} is a file of the checkpoint to convert; name another file")
    if dtype is not None:
        tensors = {
            name: tensor
            if tensor.numbers and not widens
            else tensor._replace(dtype=dtype, numbers=None)
            for name, tensor in tensors.items()
        }
    has_config = (out.parent / CONFIG).exists()
    beside = next(iter(stated_tables(out.parent)), None) if has_config else None
    if beside is not None:
        what = f"has a {FOREIGN}" if beside.name == CONFIG else "says how weights are quantised"
        raise ValueError(
            f"{FLAG} {out}: the {beside.name} there {what}, which does not fit what is written; "
            "name a file in another directory"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        name: parts_of(pieces[name], tensor, source.weights.input_order(name) is not None)
        for name, tensor in tensors.items()
    }
    written = _flat(parts)
    size = sum(prod(shape) * _dtype(kind).itemsize for shape, kind, *_ in written.values())
    size = size * (2 if out.suffix == ".pth" else 1)
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise ValueError(
            f"{FLAG} {out} needs {size / 1e9:.2f} GB of disk while it is written, "
            f"{free / 1e9:.2f} GB are free there"
        )
    write_checkpoint(out, source.weights, parts, progress)
    copy_companions(source, out.parent)
    return written


def parts_of(piece: Piece, tensor: StoredTensor, has_order: bool) -> Tensors:
    """What is written of a tensor: itself, or those that hold its numbers in groups."""
    if tensor.numbers is None:
        return {piece.name: tensor}
    first, second = tensor.shape
    shape = (second, first) if piece.transposed else (first, second)
    return stored_parts(piece.name, shape, tensor.numbers, has_order)


def write_checkpoint(
    out: Path, source: WeightSource, parts: Mapping[str, Tensors], progress: Callable[[str], None]
) -> None:
    """Write the tensors to `out`, then its manifest. After a crash `out` may lack one, but never
    has another file's."""
    with complete_file(FLAG, out) as partial:
        if out.suffix == ".pth":
            flat = partial.with_suffix(".tensors")
            try:
                make_new(flat)
                start = _write_safetensors(flat, source, parts, progress)
                _write_pth(partial, flat, start, parts)
            finally:
                flat.unlink(missing_ok=True)
        else:
            _write_safetensors(partial, source, parts, progress)
        manifest = {"file": out.name, "size": partial.stat().st_size, "sha256": hash_file(partial)}
        manifest_path(out).unlink(missing_ok=True)
    content = to_json({"version": MANIFEST_VERSION, **manifest}, indent=1)
    write_text(FLAG, manifest_path(out), content + "\n")


def _write_safetensors(
    path: Path, source: WeightSource, parts: Mapping[str, Tensors], progress: Callable[[str], None]
) -> int:
    """Returns the byte offset of the first tensor. The library would need all in memory."""
    header = safetensors_header(_flat(parts))
    with path.open("wb") as handle:
        handle.write(header)
        for name, written in parts.items():
            progress(name)
            starts = {}
            end = handle.tell()
            for part, (shape, dtype, *_) in written.items():
                starts[part] = end
                end += prod(shape) * _dtype(dtype).itemsize
            outputs, *rest = next(iter(written.values())).shape
            for rows in row_spans((0, outputs), prod(rest)):
                for part, values in _values(source, name, slice(*rows), written).items():
                    handle.seek(starts[part])
                    starts[part] += handle.write(values.view(-1).view(torch.uint8).numpy().data)
            handle.seek(end)
    return len(header)


def _flat(parts: Mapping[str, Tensors]) -> Tensors:
    return {name: tensor for written in parts.values() for name, tensor in written.items()}


def _values(source: WeightSource, name: str, rows: slice, written: Tensors) -> dict[str, Tensor]:
    """The values of what is written of some rows of a tensor, by name. Raises WeightsRefused for
    one that is not finite."""
    if len(written) == 1:
        stored = source.read(name, (rows,))
        values = stored.to(_dtype(written[name].dtype)).contiguous()
        check_finite(values, stored, source, name, (rows,))
        return {name: values}
    numbers = source.read_numbers(name, (rows,))
    parts = values_of_outputs(name, numbers)
    for part, values in parts.items():
        check_finite(values, values, source, part, (rows,))
    if not rows.start:
        parts |= values_of_matrix(name, numbers)
    return {part: values.contiguous() for part, values in parts.items()}


def safetensors_header(tensors: Tensors) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype, *_) in tensors.items():
        first = end
        end = end + prod(shape) * _dtype(dtype).itemsize
        code = SAFETENSORS_NAMES[dtype]
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


def _write_pth(path: Path, flat: Path, start: int, parts: Mapping[str, Tensors]) -> None:
    saved: dict[str, Tensor] = {}
    for name, (shape, dtype, *_) in _flat(parts).items():
        size = prod(shape) * _dtype(dtype).itemsize
        # Mapped as writable, because torch warns about read-only arrays; nothing is written.
        mapped = np.memmap(flat, np.uint8, "r+", start, (size,))
        saved[name] = torch.from_numpy(mapped).view(_dtype(dtype)).view(shape)
        start += size
    torch.save(saved, path)


def manifest_path(file: Path) -> Path:
    return file.with_name(file.name + ".manifest.json")


def find_damage(file: Path) -> str | None:
    """A line on how `file` differs from its manifest, or None. Raises ValueError if either
    cannot be read."""
    path = manifest_path(file)
    try:
        manifest = load_json(path)
        size = manifest["size"]
        sha256 = manifest["sha256"]
        found = file.stat().st_size
    except OSError as error:
        where = error.filename or path
        raise ValueError(f"{where}: {error.strerror}; nothing can be verified") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest ({error})") from None
    if found != size:
        return f"{file} has {found} bytes, its manifest says {size}"
    return None if hash_file(file) == sha256 else f"{file}: its sha256 differs from the manifest's"


def copy_companions(source: ModelSource, directory: Path) -> None:
    assert source.tokenizer_path is not None, "a checkpoint on disk has a directory"
    if is_gguf(source.tokenizer_path):
        write_gguf_companions(source, directory)
        return
    for name in COMPANIONS:
        theirs = source.tokenizer_path / name
        ours = directory / name
        if not theirs.is_file() or ours.exists():
            continue
        fields = load_object(theirs) if name == CONFIG else {}
        if fields.pop(FOREIGN, None):  # the file that was written holds plain numbers
            write_text(FLAG, ours, to_json(fields, indent=2))
        else:
            shutil.copyfile(theirs, ours)


def write_gguf_companions(source: ModelSource, directory: Path) -> None:
    """The config and the tokenizer of a GGUF file in the file formats of a directory."""
    assert source.tokenizer_path is not None, "a GGUF file has its tokenizer"
    contents = {CONFIG: to_json(to_hf_config(source.config), indent=1).encode()}
    contents |= tokenizer_files(read_gguf(source.tokenizer_path))
    for name, data in contents.items():
        if not (directory / name).exists():
            with complete_file(FLAG, directory / name) as partial:
                partial.write_bytes(data)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
