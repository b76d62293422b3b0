"""Convert any readable checkpoint to one file of weights, tensor by tensor.

Owns the order of writing. A crash leaves no partial file: everything is written under a temporary
name and renamed when it is complete. Holds a bounded part of one tensor in memory at a time. Must
not know of command lines.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from magicdec.files import hash_file, removed
from magicdec.model.checkpoint.gpt_fast import GptFastWeights
from magicdec.model.checkpoint.manifest import (
    Manifest,
    TensorEntry,
    manifest_path,
    raw_bytes,
    row_parts,
)
from magicdec.model.checkpoint.quantization import QuantizedWeights
from magicdec.model.checkpoint.source import ModelSource, check_weights, find_model
from magicdec.model.checkpoint.weight_files import (
    GPT_FAST_NAME,
    TORCH_NAMES,
    WEIGHT_FILES,
    PthWeights,
    WeightSource,
)
from magicdec.model.checkpoint.weight_map import SCALE
from magicdec.model.families.hf_config import load_model_config

# Files that a checkpoint needs besides its weights; copied when the output is in another directory.
COMPANIONS = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer.model", "original/tokenizer.model", "tokenizer_config.json"),
)
SAFETENSORS_NAMES = {name: code for code, name in TORCH_NAMES.items()}

Shapes = Mapping[str, tuple[int, ...]]


def find_checkpoint(flag: str, directory: Path) -> ModelSource:
    """The checkpoint in `directory`: one that can be run, or a `model.pth` in the gpt-fast layout.

    Raises ValueError in the same cases as `find_model`.
    """
    if not directory.is_dir():
        raise ValueError(f"{flag} {directory} is not a directory; name one that holds a checkpoint")
    pth = directory / "model.pth"
    others = [name for name in WEIGHT_FILES if name != pth.name and (directory / name).exists()]
    if others or not pth.exists() or not _is_gpt_fast(pth):
        return find_model(flag, str(directory.resolve()))  # never a packaged model of that name
    config = load_model_config(directory)
    weights = GptFastWeights(pth, config)
    check_weights(config, weights)
    return ModelSource(config.name, config, weights, directory, is_random=False)


def _is_gpt_fast(path: Path) -> bool:
    """Whether the file has the gpt-fast layout. False for a broken file, so that `find_model` reads
    it and reports the error."""
    try:
        names = PthWeights(path, gpt_fast=True).shapes()
    except ValueError:
        return False
    return any(GPT_FAST_NAME.fullmatch(name) for name in names)


def quantized(source: ModelSource) -> ModelSource:
    """The same model with its matrices in int8; unchanged if they are stored in int8 already."""
    if source.is_int8:
        return source
    return replace(source, weights=QuantizedWeights(source.weights, source.config))


def convert(
    source: ModelSource,
    out: Path,
    dtype: str | None,
    progress: Callable[[str], None] = lambda name: None,
) -> Manifest:
    """Write the model's tensors to `out` (`.safetensors` or `.pth`) and the manifest beside it.

    `dtype` None keeps the stored dtypes; int8 matrices and their scales are always kept. `progress`
    is called with each tensor's name. Raises ValueError when `out` is one of the files to read or
    the disk has too little space, and OSError when writing fails; `out` is then unchanged.
    """
    shapes = source.stored_shapes
    sources = {source.weights.where(name) for name in shapes}
    if out.exists() and any(path is not None and path.samefile(out) for path in sources):
        raise ValueError(f"--out {out} is a file of the checkpoint to convert; name another file")
    stored = source.weights.dtypes()
    int8_names = {name for name in shapes if name.endswith(SCALE) or name + SCALE in shapes}
    dtypes = {n: stored[n] if n in int8_names else dtype or stored[n] for n in shapes}
    out.parent.mkdir(parents=True, exist_ok=True)
    check_disk(out, (2 if out.suffix == ".pth" else 1) * num_bytes(shapes, dtypes), out.parent)
    manifest = write_checkpoint(out, source.weights, shapes, dtypes, progress)
    copy_companions(source, out.parent)
    return manifest


def num_bytes(shapes: Shapes, dtypes: Mapping[str, str]) -> int:
    """The bytes of all values of these tensors."""
    return sum(prod(shape) * _dtype(dtypes[name]).itemsize for name, shape in shapes.items())


def check_disk(out: Path, size: int, directory: Path) -> None:
    """Raises ValueError if `directory` has no room for `size` bytes more."""
    free = shutil.disk_usage(directory).free
    if size > free:
        raise ValueError(
            f"--out {out} needs {size / 1e9:.2f} GB of disk while it is written, "
            f"{free / 1e9:.2f} GB are free there"
        )


def write_checkpoint(
    out: Path,
    source: WeightSource,
    shapes: Shapes,
    dtypes: Mapping[str, str],
    progress: Callable[[str], None],
    metadata: dict[str, str] | None = None,
) -> Manifest:
    """Write the tensors of `shapes` to `out`, and the manifest beside it. `metadata` is kept in the
    header of a safetensors file."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    flat = partial.with_suffix(".tensors") if out.suffix == ".pth" else partial
    with removed(partial, flat, out=out):
        entries, digest, start = _write_safetensors(
            flat, source, shapes, dtypes, progress, metadata
        )
        if flat != partial:
            _write_pth(partial, flat, start, entries)
            digest = hash_file(partial)
        is_int8 = any(name.endswith(SCALE) for name in shapes)
        size = partial.stat().st_size
        manifest = Manifest(out.name, size, digest, entries, "int8" if is_int8 else None)
        _publish(partial, out, manifest)
    return manifest


def _write_safetensors(
    path: Path,
    source: WeightSource,
    shapes: Shapes,
    dtypes: Mapping[str, str],
    progress: Callable[[str], None],
    metadata: dict[str, str] | None,
) -> tuple[dict[str, TensorEntry], str, int]:
    """Returns the entries of the manifest, the sha256 of the file, and the byte offset of the first
    tensor."""
    header = safetensors_header(shapes, dtypes, metadata)
    whole, entries = hashlib.sha256(header), {}
    with path.open("xb") as handle:
        handle.write(header)
        for name, shape in shapes.items():
            progress(name)
            digest = hashlib.sha256()
            for piece in row_parts(name, shape):
                data = raw_bytes(source.read(piece).to(_dtype(dtypes[name])))
                handle.write(data)
                digest.update(data)
                whole.update(data)
            entries[name] = TensorEntry(shape, dtypes[name], digest.hexdigest())
        _sync(handle)
    return entries, whole.hexdigest(), len(header)


def safetensors_header(
    shapes: Shapes, dtypes: Mapping[str, str], metadata: dict[str, str] | None = None
) -> bytes:
    """The header's length and JSON table, padded to align the tensors that follow it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, shape in shapes.items():
        first, end = end, end + prod(shape) * _dtype(dtypes[name]).itemsize
        code = SAFETENSORS_NAMES[dtypes[name]]
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


def _write_pth(path: Path, flat: Path, start: int, entries: dict[str, TensorEntry]) -> None:
    """torch.save a dict of the tensors that are in the file `flat` from byte `start` on. The file
    is memory-mapped, so that the tensors are not loaded into memory."""
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        dtype = _dtype(entry.dtype)
        size = prod(entry.shape) * dtype.itemsize
        # Mapped as writable, because torch warns about read-only arrays; nothing is written.
        mapped = np.memmap(flat, np.uint8, "r+", start, (size,))
        tensors[name] = torch.from_numpy(mapped).view(dtype).view(entry.shape)
        start += size
    with path.open("xb") as handle:
        torch.save(tensors, handle)
        _sync(handle)


def _publish(partial: Path, out: Path, manifest: Manifest) -> None:
    """Move the file and its manifest to their final names. After a crash between the steps the file
    may lack a manifest, but never has the manifest of another file."""
    beside = manifest_path(out)
    partial_manifest = beside.with_name(f".{beside.name}.{os.getpid()}.partial")
    with removed(partial_manifest, out=beside):
        with partial_manifest.open("x", encoding="utf-8") as handle:
            handle.write(manifest.to_json())
            _sync(handle)
        beside.unlink(missing_ok=True)
        partial.replace(out)
        partial_manifest.replace(beside)


def copy_companions(source: ModelSource, directory: Path) -> None:
    """Copy the config and tokenizer files that `directory` does not have."""
    assert source.tokenizer_directory is not None, "a checkpoint on disk has a directory"
    for name in COMPANIONS:
        theirs, ours = source.tokenizer_directory / name, directory / name
        if theirs.is_file() and not ours.exists():
            ours.parent.mkdir(exist_ok=True)
            shutil.copyfile(theirs, ours)


def _sync(handle: Any) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
