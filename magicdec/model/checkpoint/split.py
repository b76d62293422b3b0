"""Writes a checkpoint as one file for each stage of a pipeline (MDI-LLM's chunks).

Owns which tensors a stage needs and the order of writing: the index comes last, so that a directory
with an index has all its files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from magicdec.model.checkpoint.chunks import CHUNKS, FINGERPRINT, INDEX, MODEL_SHA256, chunk_name
from magicdec.model.checkpoint.convert import (
    FLAG,
    check_disk,
    copy_companions,
    num_bytes,
    write_checkpoint,
)
from magicdec.model.checkpoint.source import ModelSource, fingerprint
from magicdec.model.checkpoint.weight_map import find_pieces
from magicdec.records.writing import to_json, write_text


def split_checkpoint(
    source: ModelSource,
    out: Path,
    split: Sequence[range],
    progress: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write a file for each stage into the directory `out`, with checksums beside it, then the
    index, the config and the tokenizer. Returns the files in the order of the stages.

    Raises ValueError when the disk has too little space, or when writing fails.
    """
    tensors, model_sha256 = source.tensors, fingerprint(source)
    layers = ",".join(str(len(part)) for part in split)
    chunk_of = f"{model_sha256} {layers}"
    out.mkdir(parents=True, exist_ok=True)
    check_disk(out, num_bytes(tensors), out)
    (out / INDEX).unlink(missing_ok=True)
    files = [out / chunk_name(stage) for stage in range(len(split))]
    owner: dict[str, str] = {}
    for stage, file in enumerate(files):
        # The first stage has the embedding, the final norm and the head.
        pieces = find_pieces(source.config, source.is_int8, split[stage], has_ends=stage == 0)
        of_stage = {name: tensor for name, tensor in tensors.items() if name in pieces}
        write_checkpoint(file, source.weights, of_stage, progress, {FINGERPRINT: chunk_of})
        owner |= dict.fromkeys(of_stage, file.name)
    listing = {name: {"shape": tensors[name].shape, "dtype": tensors[name].dtype} for name in owner}
    chunks = {FINGERPRINT: chunk_of, MODEL_SHA256: model_sha256, "layers": layers}
    metadata = {"total_size": num_bytes(tensors), CHUNKS: {**chunks, "tensors": listing}}
    index = {"metadata": metadata, "weight_map": owner}
    write_text(FLAG, out / INDEX, to_json(index, indent=1) + "\n")
    copy_companions(source, out)
    return files
