"""The head for multi-token prediction in a model's own checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace

from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource, check_weights
from magicdec.model.checkpoint.weight_files import RenamedWeights, WeightSource
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.families.family import MtpNames, find_family

OTHERS = "choose another draft, such as self, ngram or eagle:DIR"


def find_mtp_head(flag: str, target: ModelSource) -> ModelSource:
    """The head of `target`, which a user has asked for with `flag` ("--draft mtp").

    Raises:
        ValueError: the checkpoint has none, one of several layers, or not that of its config.
    """
    model = target.config
    if target.is_random and model.num_mtp_layers:
        config = model.mtp_config()
        random = RandomWeights(expected_shapes(config))
        return replace(target, config=config, weights=random, tokenizer_path=None)
    num_layers = check_mtp_layers(target)
    if num_layers == 0:
        raise ValueError(
            f"{flag}: {target.name} has no head for multi-token prediction (tensors "
            f"{names_of_head(target).prefix}*); {OTHERS}"
        )
    if num_layers > 1:
        raise ValueError(
            f"{flag}: the head of {target.name} has {num_layers} layers, and only one is served; "
            f"{OTHERS}"
        )
    return checked_head(target)


def stored_mtp_head(target: ModelSource) -> ModelSource | None:
    """The head of `target`, of any number of layers, None without one. Raises ValueError if it is
    not that of its config."""
    return checked_head(target) if check_mtp_layers(target) else None


def names_of_head(target: ModelSource) -> MtpNames:
    return find_family(target.config.architecture).names(target.config).mtp


def mtp_tensors(target: ModelSource) -> list[str]:
    prefix = names_of_head(target).prefix
    return [name for name in target.weights.tensors if name.startswith(prefix)]


def check_mtp_layers(target: ModelSource) -> int:
    """The number of a head's layers in a checkpoint, which the config must say too, if it has
    any."""
    model = target.config
    names = mtp_tensors(target)
    if not names:
        return 0
    theirs = names_of_head(target)
    layer = re.compile(re.escape(theirs.layer).replace(re.escape("{}"), r"(\d+)"))
    found = {int(match[1]) for match in map(layer.match, names) if match is not None}
    if len(found) != model.num_mtp_layers:
        raise ValueError(
            f"{target.weights.where(names[0])}: {theirs.prefix}* are {len(found)} layers for "
            f"multi-token prediction, but its config says {model.num_mtp_layers} "
            "(mtp_num_hidden_layers, num_nextn_predict_layers or nextn_predict_layers); correct it"
        )
    return len(found)


def checked_head(target: ModelSource) -> ModelSource:
    config = target.config.mtp_config()
    weights = only_tensors(target.weights, mtp_tensors(target))
    check_weights(config, weights)
    return replace(target, config=config, weights=weights, tokenizer_path=None)


def only_tensors(source: WeightSource, names: list[str]) -> WeightSource:
    part = RenamedWeights(source, {})
    part.tensors = {name: source.tensors[name] for name in names}
    return part
