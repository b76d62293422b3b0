"""Which acceptance records are of one draft, so that they may stand beside each other by context;
and their acceptance lengths. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from magicdec.bench.acceptance.record import AcceptanceRecord, lengths_by_depth
from magicdec.config.capabilities import policy_called
from magicdec.names import KV_POLICIES
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.workload import format_mark


def conditions_of(record: AcceptanceRecord) -> dict[str, str]:
    """What records of several contexts and drafts must share to stand in one file or plan, by its
    noun in the plural."""
    workload = record.workload
    model = record.config["model"]
    return {
        "models": workload.model,
        "weights of one model": workload.model_sha256[:12],
        "dtypes": model["dtype"],
        "dtypes of weights": model["target_dtype"],
        "datasets": f"{workload.text}{format_mark(record.config)}",
        "ways of sampling": record.sampling or "greedy",
    }


def settings_of(record: AcceptanceRecord) -> dict[str, str]:
    """What records of one draft, policy and budget must share, by its noun in the plural."""
    policy = policy_of(record.config)
    used = policy_called(policy).settings if policy in KV_POLICIES else ()
    kv = record.config["kv"] or {}
    draft = record.workload.draft
    settings = " ".join(f"--{name} {kv.get(name)}" for name in used if name != "budget")
    return {
        "draft models": "none" if draft is None else draft.model,
        "weights of one draft model": "none" if draft is None else draft.model_sha256[:12],
        "settings of the policy": settings,
    }


def first_several(found: Iterable[dict[str, str]]) -> tuple[str, list[str]] | None:
    """The noun and the values of the first condition with several of them; None if all agree."""
    values: dict[str, set[str]] = {}
    for conditions in found:
        for noun, value in conditions.items():
            values.setdefault(noun, set()).add(value)
    return next(((noun, sorted(own)) for noun, own in values.items() if len(own) > 1), None)


def by_context(records: Sequence[AcceptanceRecord]) -> dict[int, AcceptanceRecord]:
    """A record of each context, in rising order: of several that with the most draft tokens, among
    these of most positions, and the newest of these."""
    chosen: dict[int, AcceptanceRecord] = {}
    for record in records:
        old = chosen.get(record.context)
        if old is None or _weight(record) >= _weight(old):
            chosen[record.context] = record
    return dict(sorted(chosen.items()))


def _weight(record: AcceptanceRecord) -> tuple[int, int]:
    return record.gamma, record.num_positions


def lengths_of(record: AcceptanceRecord) -> dict[int, tuple[float, ...]]:
    """By number of draft tokens that the record knows, the acceptance length of a run over all
    texts, followed by those without each."""
    lengths = lengths_by_depth(record.cumulative_by_text, record.gamma)
    known = [row.depth for row in record.rows if row.tokens_per_step is not None]
    return {gamma: tuple(lengths[:, gamma - 1].tolist()) for gamma in known}
