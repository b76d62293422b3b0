"""The head for multi-token prediction in a model's own checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace

from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource, check_weights
from magicdec.model.checkpoint.weight_files import RenamedWeights, WeightSource
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.families.family import MTP_PREFIX

LAYER = re.compile(rf"{re.escape(MTP_PREFIX)}layers\.(\d+)\.")
OTHERS = "choose another draft, such as self, ngram or eagle:DIR"


def find_mtp_head(flag: str, target: ModelSource) -> ModelSource:
    """The head of `target`, which a user has asked for with `flag` ("--draft mtp").

    Raises:
        ValueError: the checkpoint has none, one of several layers, or not that of its config.
    """
    model = target.config
    names = [name for name in target.weights.tensors if name.startswith(MTP_PREFIX)]
    if target.is_random and model.num_mtp_layers:
        config = model.mtp_config()
        random = RandomWeights(expected_shapes(config))
        return replace(target, config=config, weights=random, tokenizer_path=None)
    if not names:
        raise ValueError(
            f"{flag}: {target.name} has no head for multi-token prediction (tensors "
            f"{MTP_PREFIX}*); {OTHERS}"
        )
    found = {int(match[1]) for match in map(LAYER.match, names) if match is not None}
    where = target.weights.where(names[0])
    if len(found) != model.num_mtp_layers:
        raise ValueError(
            f"{where}: {MTP_PREFIX}* are {len(found)} layers for multi-token prediction, but "
            f"config.json says {model.num_mtp_layers} (mtp_num_hidden_layers or "
            "num_nextn_predict_layers); correct it"
        )
    if len(found) > 1:
        raise ValueError(
            f"{flag}: the head of {target.name} has {len(found)} layers, and only one is served; "
            f"{OTHERS}"
        )
    config = model.mtp_config()
    weights = only_tensors(target.weights, names)
    check_weights(config, weights)
    return replace(target, config=config, weights=weights, tokenizer_path=None)


def only_tensors(source: WeightSource, names: list[str]) -> WeightSource:
    part = RenamedWeights(source, {})
    part.tensors = {name: source.tensors[name] for name in names}
    return part
