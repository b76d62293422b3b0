"""The `--acceptance` of `magicdec plan`: a rate, an acceptance curve, or a file of records. Imports
no torch.

Owns the meaning of `--acceptance` and its checks. Acceptance depends on the KV budget and hardly on
the context length. So there is one curve per budget, which is used for all context lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from magicdec.cost_model.costs import Acceptance
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

DEFAULT_BUDGET, DEFAULT_POLICY = 257, DEFAULT_KV_POLICY
CHOICES = "a rate such as 0.8, a share for each position such as 0.8,0.7,0.6, or a file of records"


def find_curves(
    values: Sequence[str], budgets: Sequence[int] | None, drafter: str, policy: str | None = None
) -> tuple[dict[int, Acceptance], str]:
    """Returns budget -> acceptance, and a text that says where the acceptance comes from.

    `values` of `--acceptance` are one value for all budgets, one value per budget, or one file. Of
    a file, records with this `drafter` (`self` or `model`) and this KV policy (None:
    `DEFAULT_POLICY`) are used. `budgets` None: all budgets in the file, or the default budget.
    Raises ValueError for anything else.
    """
    if len(values) == 1 and _is_file(values[0]):
        return _from_records(Path(values[0]), budgets, drafter, policy or DEFAULT_POLICY)
    if policy is not None:
        raise ValueError(
            f"--kv_policy {policy} selects records from a file, but --acceptance {values[0]} is "
            "not a file"
        )
    budgets = (DEFAULT_BUDGET,) if budgets is None else budgets
    if len(values) not in (1, len(budgets)):
        raise ValueError(
            f"--acceptance has {len(values)} values for {len(budgets)} of --budget; "
            "give one value, or one per budget"
        )
    parsed = [parse_acceptance(value) for value in values]
    parsed *= len(budgets) // len(parsed)
    return dict(zip(budgets, parsed, strict=True)), "given"


def parse_acceptance(text: str) -> Acceptance:
    """`0.8` is a rate; `0.8,0.7` are the shares of verifications that accept at least 1 and at
    least 2 draft tokens."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--acceptance {text} is not known; choose from {CHOICES}") from None
    for share in shares:
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise ValueError(f"--acceptance {text}: {share:g} is not between 0 and 1")
    for before, after in pairwise(shares):
        if after > before:
            raise ValueError(
                f"--acceptance {text}: {after:g} follows {before:g}, but no more verifications can "
                "accept a later token than an earlier one"
            )
    return shares[0] if "," not in text else tuple(shares)


def longest(curves: dict[int, Acceptance]) -> int | None:
    """The largest gamma for which all curves have a value; None if all are rates."""
    return min((len(c) for c in curves.values() if isinstance(c, tuple)), default=None)


def _is_file(text: str) -> bool:
    return Path(text).suffix == ".jsonl" or Path(text).is_file()


def _from_records(
    path: Path, budgets: Sequence[int] | None, drafter: str, policy: str
) -> tuple[dict[int, Acceptance], str]:
    """The longest curve of each budget; among curves of equal length the newest."""
    found: dict[int, tuple[float, ...]] = {}
    models: dict[int, str] = {}
    for record in load_records(path):
        budget, curve = _curve(record, drafter, policy)
        if budget is not None and len(curve) >= len(found.get(budget, ())):
            found[budget], models[budget] = curve, record.config["model"]["model"]
    if not found:
        command = "selfspec" if drafter == "self" else "longspec"
        raise ValueError(
            f"--acceptance {path} has no record with acceptance under a KV budget and --kv_policy "
            f"{policy}; `magicdec {command}` makes one"
        )
    wanted = sorted(found) if budgets is None else budgets
    for budget in wanted:
        if budget not in found:
            known = " ".join(map(str, sorted(found)))
            raise ValueError(f"--budget {budget} is not in {path}; choose from {known}")
    of = ", ".join(sorted({models[budget] for budget in wanted}))
    return {budget: found[budget] for budget in wanted}, f"{path} (measured with {of}, {policy})"


def _curve(record: RunRecord, drafter: str, policy: str) -> tuple[int | None, tuple[float, ...]]:
    """Budget and acceptance per position; (None, ()) if the record has another drafter or policy,
    no budget, or no acceptance."""
    kv, metrics = record.config["kv"], record.metrics
    curve = tuple((metrics and metrics.acceptance_per_position) or ())
    is_bounded = kv["policy"] == policy and kv["budget"] > 0
    if not is_bounded or not curve or record.config["decoding"]["drafter"] != drafter:
        return None, ()
    return kv["budget"], curve
