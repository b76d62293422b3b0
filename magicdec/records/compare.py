"""The gate: new records against a baseline file; exit code 1 on a regression, on records that
cannot be compared and, where that is asked for, on baselines that no new record covers.

Reads records only. Acceptance is compared, not time: times of two machines say nothing about the
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.config.policies import policy_called
from magicdec.names import KV_POLICIES
from magicdec.records.record import RunRecord

Key = tuple[tuple[str, Any], ...]
DEFAULT_TOLERANCE = {"acceptance_rate": 0.03}
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


@dataclass(frozen=True)
class Comparison:
    """One new record against its baseline. `problem` is None where all is well."""

    name: str
    differences: dict[str, tuple[float, float]]  # metric: baseline, new
    problem: str | None


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
        ("gamma", decoding["num_draft_tokens"]),
    )


def settings_of(policy: str | None) -> tuple[str, ...]:
    """The fields of a record's KV section that a policy reads. A policy that this version does not
    know reads all, so that it is never taken for another."""
    if policy is None:
        return ()
    return policy_called(policy).settings if policy in KV_POLICIES else tuple(SHORT_NAMES)


def conditions(record: RunRecord) -> dict[str, Any]:
    """What must be equal for the comparison to mean something. `record` did not fail."""
    config, workload = record.config, record.workload
    assert workload is not None, "only a failed record may lack it"
    return {
        "model": workload.model,
        "model fingerprint": workload.model_sha256,
        "draft fingerprint": None if workload.draft is None else workload.draft.model_sha256,
        "workload sha256": workload.sha256,
        "dtype": config["model"]["dtype"],
        "weights": weight_dtypes(config),
        "draft KV": draft_kv_dtype(config),
        "sampling": sampling(config),
        "generated tokens": config["workload"]["gen_len"],
        "ignore_eos": config["decoding"]["ignore_eos"],
    }


def weight_dtypes(config: dict[str, Any]) -> str:
    """Of the target's matrices and the draft's; records older than the fields had one dtype."""
    dtype, draft = config["model"]["dtype"], config.get("draft") or {}
    target = config["model"].get("target_dtype", dtype)
    drafts = draft.get("draft_dtype", dtype)
    return str(target) if not draft or drafts == target else f"{target}, draft {drafts}"


def draft_kv_dtype(config: dict[str, Any]) -> str:
    """Of a draft's own cache; records older than the field had one dtype."""
    return str(config["kv"].get("draft_kv_dtype", config["model"]["dtype"]))


def sampling(config: dict[str, Any]) -> dict[str, Any] | str:
    """How tokens were chosen; the seed and the rest of the section are idle in plain greedy
    decoding."""
    section = config.get("sampling") or {}
    plain = all(section.get(name, value) == value for name, value in PLAIN.items())
    return "greedy" if plain else section


def covers(new: RunRecord, baseline: RunRecord) -> bool:
    """Both passed, and `new` is the same thing under the same conditions."""
    if not (new.passed and baseline.passed) or compared_with_nothing(new):
        return False
    same = measured_thing(new) == measured_thing(baseline)
    return same and conditions(new) == conditions(baseline)


def compared_with_nothing(record: RunRecord) -> bool:
    """Whether a run that could have been compared with its baseline was not (`--no_baseline`)."""
    checked = record.correctness is not None and record.correctness.reference is not None
    return not checked and sampling(record.config) == "greedy"


def describe(record: RunRecord) -> str:
    """What a record measures, in one line."""
    return " ".join(f"{k}={v}" for k, v in measured_thing(record) if v is not None)


def compare(new: RunRecord, baselines: list[RunRecord]) -> Comparison:
    """`new` against every baseline of the same thing under the same conditions: none of them may
    hide a regression from another. Where there is none, the problem names what differs from the
    nearest."""
    name = describe(new)
    if new.status == "ok_with_ties":
        name += f" [{new.status}]"
    if not new.passed:
        return Comparison(name, {}, f"the new run {new.status}: {new.error or 'outputs differ'}")
    if compared_with_nothing(new):
        return Comparison(name, {}, "not comparable: its tokens were compared with nothing")
    same = [b for b in baselines if measured_thing(b) == measured_thing(new)]
    if not same:
        return Comparison(name, {}, "not comparable: the baseline has no such record")
    alike = [b for b in same if b.passed and conditions(b) == conditions(new)]
    found = [_against(name, new, b) for b in alike or same[:1]]
    return next((comparison for comparison in found if comparison.problem), found[-1])


def _against(name: str, new: RunRecord, baseline: RunRecord) -> Comparison:
    if not baseline.passed:
        return Comparison(name, {}, f"not comparable: the baseline's run {baseline.status}")
    ours = conditions(new)
    for condition, value in conditions(baseline).items():
        if ours[condition] != value:
            return Comparison(
                name, {}, f"not comparable: {condition} is {ours[condition]}, was {value}"
            )
    differences, problem = {}, None
    for metric, tolerance in (baseline.tolerance or DEFAULT_TOLERANCE).items():
        before, after = (getattr(r.metrics, metric, None) for r in (baseline, new))
        if before is None or after is None:
            where = "new record" if after is None else "baseline"
            return Comparison(name, {}, f"not comparable: the {where} has no {metric}")
        differences[metric] = (before, after)
        if after < before - tolerance:
            problem = f"regression: {metric} fell by {before - after:.4f}, tolerance {tolerance}"
    return Comparison(name, differences, problem)
