"""What must agree before two records are compared: what they measure, and under which conditions.

Names the first cause in words of the command line, not as a hash. Must not know how records are
judged. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from magicdec.config.checks import policy_called
from magicdec.names import KV_POLICIES
from magicdec.records.record import RunRecord

Key = tuple[tuple[str, Any], ...]
PLAIN = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
# Fields of a record's KV section, by the names that the gate prints.
SHORT_NAMES = {
    "budget": "budget",
    "num_sink_tokens": "sinks",
    "window_size": "window",
    "pooling": "pooling",
    "reselect_every": "reselect_every",
    "recent_window": "recent_window",
}


def measured_thing(record: RunRecord) -> Key:
    """What a record measures: two records of the same thing are meant to be compared. A setting
    that its policy does not read is None."""
    decoding, kv = record.config["decoding"], record.config["kv"]
    draft = None if record.workload is None else record.workload.draft
    # Prompt lookup reads no cache, whatever policy the run names.
    policy = None if decoding["drafter"] == "ngram" else kv["policy"]
    settings = settings_of(policy)
    return (
        ("strategy", decoding["strategy"]),
        ("drafter", decoding["drafter"]),
        ("draft", None if draft is None else draft.model),
        ("policy", policy),
        *((SHORT_NAMES[s], kv.get(s) if s in settings else None) for s in SHORT_NAMES),
        ("gamma", decoding.get("tree") or decoding["num_draft_tokens"]),
    )


def settings_of(policy: str | None) -> tuple[str, ...]:
    """The fields of a record's KV section that a policy reads. A policy that this version does not
    know reads all, so that it is never taken for another."""
    if policy is None:
        return ()
    return policy_called(policy).settings if policy in KV_POLICIES else tuple(SHORT_NAMES)


def first_difference(new: RunRecord, old: RunRecord) -> str | None:
    """The first condition in which two records of the same thing differ, such as `prefix_len 1024,
    was 4096`; None if all agree. Neither record failed."""
    for name, value, before in _conditions(new, old):
        if value != before:
            return f"{name} {value}, was {before}"
    ours, theirs = new.workload, old.workload
    assert ours is not None and theirs is not None, "only a failed record may lack it"
    if ours.sha256 != theirs.sha256:
        return f"dataset {ours.dataset} has other text for the same settings"
    if ours.model_sha256 != theirs.model_sha256:
        return f"model {ours.model} has other weights"
    if ours.draft is not None and ours.draft != theirs.draft:
        return f"draft {ours.draft.model} has other weights"
    return None


def _conditions(new: RunRecord, old: RunRecord) -> Iterator[tuple[str, Any, Any]]:
    """(name, new value, old value) of each setting that must agree."""
    ours, theirs = new.workload, old.workload
    assert ours is not None and theirs is not None, "only a failed record may lack it"
    yield "model", ours.model, theirs.model
    if ours.sha256 != theirs.sha256:
        for name in ("dataset", "prefix_len", "num_prompts", "seed", "skip_tokens", "tokenizer"):
            yield name, getattr(ours, name), getattr(theirs, name)
    one, other = new.config, old.config
    yield "gen_len", one["workload"]["gen_len"], other["workload"]["gen_len"]
    yield "dtype", one["model"]["dtype"], other["model"]["dtype"]
    yield "weights", weight_dtypes(one), weight_dtypes(other)
    yield "draft KV", draft_kv_dtype(one), draft_kv_dtype(other)
    yield "sampling", sampling(one), sampling(other)
    yield "ignore_eos", one["decoding"]["ignore_eos"], other["decoding"]["ignore_eos"]


def weight_dtypes(config: dict[str, Any]) -> str:
    """The dtypes of the target's matrices and of the draft's."""
    target, draft = config["model"]["target_dtype"], config["draft"]
    drafts = target if draft is None else draft["draft_dtype"]
    return str(target) if drafts == target else f"{target}, draft {drafts}"


def draft_kv_dtype(config: dict[str, Any]) -> str:
    """The dtype of a draft's own cache."""
    return str(config["kv"]["draft_kv_dtype"])


def sampling(config: dict[str, Any]) -> dict[str, Any] | str:
    """How tokens were chosen; the seed and the rest of the section are idle in plain greedy
    decoding."""
    section = config.get("sampling") or {}
    plain = all(section.get(name, value) == value for name, value in PLAIN.items())
    return "greedy" if plain else section


def compared_with_nothing(record: RunRecord) -> bool:
    """Whether a run that could have been compared with its baseline was not (`--no_baseline`)."""
    checked = record.correctness is not None and record.correctness.reference is not None
    return not checked and sampling(record.config) == "greedy"


def describe(record: RunRecord) -> str:
    """What a record measures, in one line."""
    return " ".join(f"{k}={v}" for k, v in measured_thing(record) if v is not None)


def method_of(record: RunRecord) -> str:
    """The drafter and the policy of a record, without their parameters."""
    thing = dict(measured_thing(record))
    return " ".join(str(thing[key]) for key in ("drafter", "draft", "policy") if thing[key])
