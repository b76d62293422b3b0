"""Decides whether a model's head is its embedding: as in transformers, a stored head counts,
whatever `tie_word_embeddings` says, and is tied where it equals the embedding. Values are compared,
because files may hold a copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from magicdec.model.checkpoint.weight_files import RenamedWeights, WeightSource, row_spans
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family


def as_stored(config: ModelConfig, source: WeightSource) -> tuple[ModelConfig, WeightSource]:
    """The stored model's config and weights. A tied pair may be stored under either name. An
    untied head has a bias if one is stored."""
    if not config.tie_word_embeddings:
        return config, source
    family = find_family(config.architecture)
    names = family.names(config)
    head = f"{names.head}.weight"
    embedding = f"{names.embedding}.weight"
    has_bias = family.has_head_bias and f"{names.head}.bias" in source.tensors
    if head in source.tensors and embedding not in source.tensors:
        source = RenamedWeights(source, {embedding: head})
    elif has_bias and head not in source.tensors and embedding in source.tensors:
        source = RenamedWeights(source, {head: embedding})
    is_own = head in source.tensors and not are_equal(source, head, embedding)
    if is_own or has_bias:  # a tied head is computed without a bias
        config = replace(config, tie_word_embeddings=False, head_bias=has_bias)
    return config, source


def are_equal(source: WeightSource, first: str, second: str) -> bool:
    shape = source.tensors[first].shape
    if shape != source.tensors[second].shape or len(shape) != 2:
        return False
    for rows in row_spans((0, shape[0]), shape[1]):
        ours, theirs = (source.read(name, (slice(*rows),)) for name in (first, second))
        if ours.data_ptr() != theirs.data_ptr() and not torch.equal(ours.double(), theirs.double()):
            return False
    return True
