"""The weights of an EAGLE-3 head under one set of names, and what they say about the head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import RenamedWeights, WeightSource
from magicdec.model.config import ModelConfig

PREFIX = "model."
RENAMED = {"midlayer.": "layers.0."}
STATE_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
MAP = "d2t"
MARKS = "t2d"  # of each id of the target, whether the draft vocabulary has it


def head_as_stored(config: ModelConfig, source: WeightSource) -> tuple[ModelConfig, WeightSource]:
    """The config and weights of a head, with the number of states that its `fc` takes, and whether
    it has an embedding and a draft vocabulary of its own. Raises ValueError if they contradict
    the config."""
    weights = _renamed(source)
    eagle = config.eagle
    assert eagle is not None, "asked of a head"
    where = weights.where("fc.weight")
    if "fc.weight" not in weights.tensors:
        raise ValueError(f"{where}: fc.weight is missing, which an EAGLE-3 head has")
    shape = weights.tensors["fc.weight"].shape
    if len(shape) != 2 or shape[1] % eagle.state_size:
        raise ValueError(
            f"{where}: fc.weight has shape {shape}, which takes no whole number of states of "
            f"{eagle.state_size}; correct target_hidden_size in config.json"
        )
    num_states = shape[1] // eagle.state_size
    if eagle.capture is not None and len(eagle.capture) != num_states:
        raise ValueError(
            f"{where}: fc.weight takes {num_states} states, but config.json lists "
            f"{len(eagle.capture)} layers for them"
        )
    has_map = MAP in weights.tensors
    if not has_map and config.vocab_size < eagle.target_vocab_size:
        raise ValueError(
            f"{where}: {MAP} is missing, which says what the {config.vocab_size} ids of the draft "
            f"vocabulary are among the target's {eagle.target_vocab_size}"
        )
    if has_map and weights.tensors[MAP].shape != (config.vocab_size,):
        raise ValueError(
            f"{where}: {MAP} has shape {weights.tensors[MAP].shape}, expected "
            f"({config.vocab_size},), the draft vocabulary"
        )
    eagle = replace(
        eagle,
        num_states=num_states,
        has_embedding="embed_tokens.weight" in weights.tensors,
        has_map=has_map,
    )
    config = replace(config, eagle=eagle)
    ids = target_ids(config, weights)  # which checks them
    if MARKS in weights.tensors:
        _check_marks(weights, ids, eagle.target_vocab_size)
    return config, weights


def target_ids(config: ModelConfig, source: WeightSource) -> Tensor:
    """The target's ids of the draft vocabulary of any head, int64 [draft vocabulary]. Raises
    ValueError for ids that the target does not have, or that come twice."""
    eagle = config.eagle
    ids = torch.arange(config.vocab_size)
    if eagle is None:
        return ids
    if eagle.has_map:
        ids = ids + source.read(MAP).long()  # stored as differences
    first = int(ids.min())
    last = int(ids.max())
    if first < 0 or last >= eagle.target_vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"{source.where(MAP)}: {MAP} maps {len(ids)} draft ids to {len(ids.unique())} ids from "
            f"{first} to {last}, expected as many of the target's {eagle.target_vocab_size}"
        )
    return ids


def _check_marks(source: WeightSource, ids: Tensor, target_vocab_size: int) -> None:
    """Raise ValueError unless the marks say what `ids` do. Programs that train take the rows of
    marked ids in their order, so the draft vocabulary has them in this order."""
    where = source.where(MARKS)
    shape = source.tensors[MARKS].shape
    if shape != (target_vocab_size,):
        raise ValueError(
            f"{where}: {MARKS} has shape {shape}, expected ({target_vocab_size},), the vocabulary "
            "of the target"
        )
    marked = source.read(MARKS).bool().nonzero().flatten()
    if torch.equal(marked, ids):
        return
    if len(marked) != len(ids):
        what = f"{len(marked)} ids, and {MAP} maps to {len(ids)}"
    else:
        first = int((marked != ids).nonzero()[0])
        what = f"{int(marked[first])} as draft id {first}, which {MAP} maps to {int(ids[first])}"
    raise ValueError(
        f"{where}: {MARKS} marks {what}; take both tables from the head's maker, or remove {MARKS} "
        f"if {MAP} is right"
    )


def _renamed(source: WeightSource) -> WeightSource:
    """Under the names of `speculators`, whatever the program called them that wrote the head."""
    stored_as = {}
    for stored in source.tensors:
        name = stored.removeprefix(PREFIX)
        for old, new in RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        for number, old in enumerate(STATE_NORMS):
            name = f"fc_norm.{number}.weight" if name == f"{old}.weight" else name
        stored_as[name] = stored
    renamed = RenamedWeights(source, stored_as)
    renamed.tensors = {name: renamed.tensors[name] for name in stored_as}
    return renamed
