"""A hash that tells two models of the same shape apart without reading all their weights."""

from __future__ import annotations

import hashlib

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.chunks import ChunkedWeights
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.checkpoint.weight_map import weight_map


def fingerprint(source: ModelSource) -> str:
    """It is cheap: besides names and shapes, only the one-dimensional tensors are read. Chunks of a
    checkpoint have that of the whole checkpoint, whichever files are here."""
    if isinstance(source.weights, ChunkedWeights):
        return source.weights.model_sha256
    digest = hashlib.sha256(repr(sorted(source.weights.shapes().items())).encode())
    config = source.config
    for pieces in weight_map(config, Shard(), range(config.num_layers)).values():
        for piece in pieces:
            if len(piece.full_shape) == 1:
                digest.update(source.weights.read(piece).float().numpy().tobytes())
    return digest.hexdigest()
