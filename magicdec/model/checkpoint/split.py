"""Writes a checkpoint as one file for each stage of a pipeline (MDI-LLM's chunks).

Owns which tensors a stage needs and the order of writing: the index comes last, so that a directory
with an index has all its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    num_bytes,
    write_checkpoint,
)
from magicdec.model.checkpoint.manifest import raw_bytes
from magicdec.model.checkpoint.source import ModelSource, fingerprint
from magicdec.model.checkpoint.weight_map import Piece, find_pieces


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
    layers = ",".join(str(len(part)) for part in split)
    model_sha256, chunk_of = fingerprint(source), fingerprint_of_split(source, layers)
    out.mkdir(parents=True, exist_ok=True)
    check_disk(out, num_bytes(shapes, dtypes), out)
    (out / INDEX).unlink(missing_ok=True)
    files, owner = [out / chunk_name(stage) for stage in range(len(split))], dict[str, str]()
    for stage, file in enumerate(files):
        # The first stage has the embedding, the final norm and the head.
        pieces = find_pieces(source.config, source.is_int8, split[stage], has_ends=stage == 0)
        of_stage = {name: shape for name, shape in shapes.items() if name in pieces}
        write_checkpoint(file, source.weights, of_stage, dtypes, progress, {FINGERPRINT: chunk_of})
        owner |= dict.fromkeys(of_stage, file.name)
    chunks = {FINGERPRINT: chunk_of, MODEL_SHA256: model_sha256, "layers": layers}
    _write_index(out / INDEX, owner, shapes, dtypes, chunks)
    copy_companions(source, out)
    return files


def fingerprint_of_split(source: ModelSource, layers: str) -> str:
    """Tells models and splits apart without reading all weights: a sha256 of the split and of the
    name, shape, dtype and first row of every tensor."""
    digest = hashlib.sha256(layers.encode())
    dtypes = source.weights.dtypes()
    for name, shape in source.stored_shapes.items():
        digest.update(f"{name} {shape} {dtypes[name]}".encode())
        first = Piece(name, (0, min(1, shape[0])), None, shape)
        digest.update(raw_bytes(source.weights.read(first)))
    return digest.hexdigest()


def _write_index(
    index: Path,
    owner: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
    chunks: dict[str, Any],
) -> None:
    tensors = {name: {"shape": shapes[name], "dtype": dtypes[name]} for name in owner}
    chunks = {**chunks, "tensors": tensors}
    metadata = {"total_size": num_bytes(shapes, dtypes), CHUNKS: chunks}
    table = {"metadata": metadata, "weight_map": owner}
    partial = index.with_name(f".{index.name}.{os.getpid()}.partial")
    with removed(partial, out=index):
        partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        partial.replace(index)
