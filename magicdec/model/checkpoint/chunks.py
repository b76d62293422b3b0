"""Weights in one file for each stage of a pipeline, of which a host needs only its own.

They are safetensors files with an index, as published checkpoints in several files are. The index
also has the shape and dtype of every tensor, so that a host can check a model without the files of
the others, and a fingerprint of the model and its split, which every file repeats. Owns this index
and reading; `split.py` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from magicdec.model.checkpoint.weight_files import (
    Index,
    SafetensorsWeights,
    StoredTensor,
    WeightSource,
)
from magicdec.model.checkpoint.weight_map import read_index

INDEX = "model.safetensors.index.json"
CHUNKS = "chunks"  # the key in the index's metadata that only an index of chunks has
MODEL_SHA256 = "model_sha256"  # the key of the fingerprint of the whole checkpoint
FINGERPRINT = "chunk_of"  # the key in the metadata of a chunk


def chunk_name(stage: int) -> str:
    return f"model_secondary{stage - 1}.safetensors" if stage else "model_starter.safetensors"


class ChunkedWeights(WeightSource):
    """The tensors of all chunks that an index names, of which some files may not be here. Shapes
    and dtypes are known of absent files too.

    Raises ValueError naming the file when one that is here is broken or of another model or split,
    and when a tensor is read whose file is not here.
    """

    def __init__(self, index: Path, chunks: dict[str, Any]) -> None:
        super().__init__(index)
        try:
            self.fingerprint, self.layers = str(chunks[FINGERPRINT]), str(chunks["layers"])
            self.model_sha256 = str(chunks[MODEL_SHA256])
            for name, file in read_index(index).items():
                header = chunks["tensors"][name]
                shape = tuple(map(int, header["shape"]))
                self.tensors[name] = StoredTensor(shape, str(header["dtype"]), index.parent / file)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{index}: not an index of chunks ({error!r})") from None
        self._opened: dict[Path | None, SafetensorsWeights] = {}  # those that are here
        for path in sorted({index.parent / file for file in read_index(index).values()}):
            if path.is_file():
                self._opened[path] = self._open(path)

    def read(self, name: str, index: Index = ()) -> Tensor:
        self.check_present([name])
        return self._opened[self.tensors[name].file].read(name, index)

    def check_present(self, names: Iterable[str]) -> None:
        """Raises ValueError naming the first file of these tensors that is not here."""
        for name in names:
            if self.where(name) not in self._opened:
                raise ValueError(
                    f"{self.where(name)} is not on this host; it has {name}. The chunks were made "
                    f"with --layer_split {self.layers}"
                )

    def _open(self, file: Path) -> SafetensorsWeights:
        weights = SafetensorsWeights(file)
        with safe_open(file, framework="pt") as handle:
            fingerprint = (handle.metadata() or {}).get(FINGERPRINT)
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{file}: a chunk of another model or of another split than {INDEX} says"
            )
        for name, tensor in weights.tensors.items():
            if tensor != self.tensors.get(name):
                raise ValueError(f"{file}: {name} is not the tensor that {INDEX} lists")
        return weights


def open_chunks(path: Path) -> ChunkedWeights | None:
    """The chunks in a directory; None if it holds no index of chunks."""
    index = path / INDEX
    try:
        chunks = json.loads(index.read_text(encoding="utf-8"))["metadata"][CHUNKS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # whoever reads the directory in another way says what is wrong with it
    return ChunkedWeights(index, chunks)
