"""Writes a checkpoint as one file for each stage of a pipeline (MDI-LLM's chunks).

Owns which tensors a stage needs and the order of writing: the index comes last, so that a directory
with an index has all its files. Must not know of command lines.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from magicdec.files import removed
from magicdec.model.checkpoint.chunks import (
    CHUNKS,
    FINGERPRINT,
    INDEX,
    MODEL_SHA256,
    chunk_name,
)
from magicdec.model.checkpoint.convert import (
    check_disk,
    copy_companions,
    publish,
    write_safetensors,
)
from magicdec.model.checkpoint.manifest import Manifest, raw_bytes
from magicdec.model.checkpoint.source import ModelSource, fingerprint, tensors_of
from magicdec.model.checkpoint.weight_map import SCALE, Piece

SAMPLED_ROWS = 1


def split_checkpoint(
    source: ModelSource,
    out: Path,
    split: Sequence[range],
    progress: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write a file for each stage into the directory `out`, with checksums beside it, then the
    index, the config and the tokenizer. Returns the files in the order of the stages.

    Raises ValueError when the disk has too little space, and OSError when writing fails.
    """
    shapes, dtypes = source.stored_shapes, source.weights.dtypes()
    names = [stage_tensors(source, split, stage) for stage in range(len(split))]
    layers = ",".join(str(len(part)) for part in split)
    model_sha256, chunk_of = fingerprint(source), fingerprint_of_split(source, layers)
    out.mkdir(parents=True, exist_ok=True)
    check_disk(out, sum(_size(shapes[name], dtypes[name]) for name in shapes), out)
    (out / INDEX).unlink(missing_ok=True)
    files = [out / chunk_name(stage) for stage in range(len(split))]
    for file, held in zip(files, names, strict=True):
        _write(file, source, {name: shapes[name] for name in held}, chunk_of, progress)
    owner = {name: file.name for file, held in zip(files, names, strict=True) for name in held}
    chunks = {FINGERPRINT: chunk_of, MODEL_SHA256: model_sha256, "layers": layers}
    _write_index(out / INDEX, owner, shapes, dtypes, chunks)
    copy_companions(source, out)
    return files


def stage_tensors(source: ModelSource, split: Sequence[range], stage: int) -> list[str]:
    """The stored tensors of a stage, in the order of the checkpoint. The first stage has the
    embedding, the final norm and the head."""
    needed = tensors_of(source.config, split[stage], stage == 0, source.is_int8)
    return [name for name in source.stored_shapes if name in needed]


def fingerprint_of_split(source: ModelSource, layers: str) -> str:
    """Tells models and splits apart without reading all weights: a sha256 of the split and of the
    name, shape, dtype and first row of every tensor."""
    digest = hashlib.sha256(layers.encode())
    dtypes = source.weights.dtypes()
    for name, shape in source.stored_shapes.items():
        digest.update(f"{name} {shape} {dtypes[name]}".encode())
        first = Piece(name, (0, min(SAMPLED_ROWS, shape[0])), None, shape)
        digest.update(raw_bytes(source.weights.read(first)))
    return digest.hexdigest()


def _write(
    file: Path,
    source: ModelSource,
    shapes: dict[str, tuple[int, ...]],
    chunk_of: str,
    progress: Callable[[str], None],
) -> None:
    dtypes = source.weights.dtypes()
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    with removed(partial, out=file):
        entries, digest, _ = write_safetensors(
            partial, source.weights, shapes, dtypes, progress, {FINGERPRINT: chunk_of}
        )
        quantized = "int8" if any(name.endswith(SCALE) for name in shapes) else None
        manifest = Manifest(file.name, partial.stat().st_size, digest, entries, quantized)
        publish(partial, file, manifest)


def _write_index(
    index: Path,
    owner: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
    chunks: dict[str, Any],
) -> None:
    tensors = {name: {"shape": shapes[name], "dtype": dtypes[name]} for name in owner}
    total = sum(_size(shapes[name], dtypes[name]) for name in owner)
    table = {
        "metadata": {"total_size": total, CHUNKS: {**chunks, "tensors": tensors}},
        "weight_map": owner,
    }
    partial = index.with_name(f".{index.name}.{os.getpid()}.partial")
    with removed(partial, out=index):
        partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        partial.replace(index)


def _size(shape: tuple[int, ...], dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return prod(shape) * kind.itemsize
