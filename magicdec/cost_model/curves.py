"""The `--acceptance` of `magicdec plan`: an acceptance rate, an acceptance curve, or a file of
records; and its `--conditional_acceptance`. Imports no torch.

Owns the meaning of these flags and their checks. Acceptance depends on the KV budget and hardly on
the context length. So there is one curve per budget, which is used for all context lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from magicdec.cost_model.acceptance import Acceptance, conditional_rate
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

DEFAULT_BUDGET, DEFAULT_POLICY, DEFAULT_GAMMA = 257, DEFAULT_KV_POLICY, 4
CHOICES = "a rate such as 0.8, a share for each position such as 0.8,0.7,0.6, or a file of records"


def find_curves(
    values: Sequence[str],
    budgets: Sequence[int] | None,
    drafter: str,
    policy: str | None = None,
    gamma: int = DEFAULT_GAMMA,
) -> tuple[dict[int, Acceptance], str]:
    """Returns budget -> acceptance, and a text that says where the acceptance comes from.

    `values` of `--acceptance` are one value for all budgets, one value per budget, or one file. Of
    a file, records with this `drafter` (`self` or `model`) and this KV policy (None:
    `DEFAULT_POLICY`) are used. A rate was measured with `gamma` draft tokens. `budgets` None: all
    budgets in the file, or the default budget. Raises ValueError for anything else.
    """
    if len(values) == 1 and _is_file(values[0]):
        return _from_records(Path(values[0]), budgets, drafter, policy or DEFAULT_POLICY)
    parsed = [parse_acceptance(value) for value in values]
    rates = [p if isinstance(p, tuple) else conditional_rate(p, gamma) for p in parsed]
    is_rate = any(not isinstance(p, tuple) for p in parsed)
    given = f"{' '.join(values)} of {gamma} draft tokens a step" if is_rate else "given"
    return _spread("--acceptance", rates, budgets), given


def find_conditional(
    rates: Sequence[float], budgets: Sequence[int] | None
) -> tuple[dict[int, Acceptance], str]:
    """`find_curves` for the values of `--conditional_acceptance`."""
    for rate in rates:
        _check_share("--conditional_acceptance", f"{rate:g}", rate)
    return _spread("--conditional_acceptance", list(rates), budgets), "given"


def _spread(
    flag: str, values: Sequence[Acceptance], budgets: Sequence[int] | None
) -> dict[int, Acceptance]:
    """One value for all budgets, or one for each."""
    budgets = (DEFAULT_BUDGET,) if budgets is None else budgets
    if len(values) not in (1, len(budgets)):
        raise ValueError(
            f"{flag} has {len(values)} values for {len(budgets)} of --budget; "
            "give one value, or one per budget"
        )
    each = list(values) * (len(budgets) // len(values))
    return dict(zip(budgets, each, strict=True))


def parse_acceptance(text: str) -> Acceptance:
    """`0.8` is an acceptance rate, accepted / drafted tokens; `0.8,0.7` are the shares of
    verifications that accept at least 1 and at least 2 draft tokens."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--acceptance {text} is not known; choose from {CHOICES}") from None
    for share in shares:
        _check_share("--acceptance", text, share)
    for before, after in pairwise(shares):
        if after > before:
            raise ValueError(
                f"--acceptance {text}: {after:g} follows {before:g}, but no more verifications can "
                "accept a later token than an earlier one"
            )
    return shares[0] if "," not in text else tuple(shares)


def _check_share(flag: str, text: str, share: float) -> None:
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise ValueError(f"{flag} {text}: {share:g} is not between 0 and 1")


def longest(curves: dict[int, Acceptance]) -> int | None:
    """The largest gamma for which all curves have a value; None if all are rates."""
    return min((len(c) for c in curves.values() if isinstance(c, tuple)), default=None)


def is_rate(value: str) -> bool:
    """Whether this value of `--acceptance` is one rate, and neither a curve nor a file."""
    return "," not in value and not _is_file(value)


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
