"""Acceptance for the cost model, from `--acceptance` or `--conditional_acceptance` of `magicdec
plan` ([Leviathan et al.](https://arxiv.org/abs/2211.17192), section 3.1). Imports no torch.

A record's *acceptance rate* is accepted / drafted tokens. The *conditional rate*, the probability
that a draft token is accepted if all before it in the step were, is larger, because tokens after a
rejected one are drafted too. All contexts share one curve per KV budget, as acceptance hardly
depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.config.setting import setting
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.predict.golden import is_golden, load_golden
from magicdec.records.comparison.conditions import sampling
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes

AcceptanceCurve = float | tuple[float, ...] | Mapping[int, float]
"""One conditional rate; or the shares of verifications that accept at least 1, 2, ... draft tokens
(a record's `acceptance_per_position`); or acceptance lengths by the draft tokens of a step."""

PRECISION = 1e-9  # of a converted rate


def conditional_rate(acceptance_rate: float, gamma: int) -> float:
    """The conditional rate whose first `gamma` powers have the acceptance rate as their mean."""
    low = 0.0
    high = 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        mean = (expected_tokens(middle, gamma) - 1) / gamma
        low, high = (middle, high) if mean < acceptance_rate else (low, middle)
    return low if acceptance_rate < 1 else 1.0


def survival(acceptance: float | tuple[float, ...], position: int) -> float:
    if isinstance(acceptance, tuple):
        assert 1 <= position <= len(acceptance), "gamma is at most the curve's length"
        return acceptance[position - 1]
    return acceptance**position


def expected_tokens(acceptance: AcceptanceCurve, gamma: int) -> float:
    """Expected tokens per row and verification with the bonus token: 1 to gamma + 1. `gamma` is 0
    or one of `known_gammas`."""
    if isinstance(acceptance, Mapping):
        return acceptance[gamma] if gamma else 1.0
    return 1.0 + sum(survival(acceptance, k) for k in range(1, gamma + 1))


def known_gammas(acceptance: AcceptanceCurve, max_gamma: int) -> Sequence[int]:
    """The draft tokens of a step, 1 to `max_gamma`, of which the acceptance is known."""
    if isinstance(acceptance, Mapping):
        return [gamma for gamma in sorted(acceptance) if gamma <= max_gamma]
    return range(1, max_gamma + 1)


DEFAULT_BUDGET = 257
DEFAULT_GAMMA = 4
CHOICES = "a rate such as 0.8, and in a plan a file of records or of golden lengths (.yaml)"


@dataclass(frozen=True)
class AcceptanceSection:
    """The acceptance, by one of the first two settings. A plan needs it; a simulation takes a rate
    of 0.8 by default."""

    acceptance: tuple[str, ...] | None = setting(
        None,
        "An acceptance rate as in a record (accepted / drafted tokens) such as 0.8. A plan also "
        "takes a file of records, InferenceX's golden acceptance lengths (a .yaml), or several "
        "rates, one for each --budget. Default: 0.8 in simulate.",
        metavar="A",
    )
    conditional_acceptance: tuple[float, ...] | None = setting(
        None,
        "In place of --acceptance: the probability that a draft token is accepted if all before it "
        "in the step were. A plan takes one value, or one for each --budget.",
        metavar="A",
        least=0,
        most=1,
    )
    acceptance_gamma: int = setting(
        4, "Draft tokens in a step with which the rate of --acceptance was measured.", least=1
    )

    def __post_init__(self) -> None:
        if self.acceptance is not None and self.conditional_acceptance is not None:
            raise ValueError("--conditional_acceptance is given in place of --acceptance; give one")


def find_curves(
    values: Sequence[str],
    budgets: Sequence[int] | None,
    drafter: str,
    policy: str | None = None,
    gamma: int = DEFAULT_GAMMA,
    weights: str | None = None,
    records: Sequence[PassRecord] | None = None,
    golden_curve: str | None = None,
) -> tuple[dict[int, AcceptanceCurve], str]:
    """Returns budget -> acceptance, and a text that names the source.

    `values` are one for all budgets, one per budget, or one file. The records of a file
    (`records`, if already read) count if they have this `drafter` (`self` or `model`), draft
    `weights` and KV policy (None: the default); a golden file has `golden_curve` for all budgets
    (None: its only one). A rate was measured with `gamma` draft tokens. `budgets` None stands for
    all in the file of records, or the default. Raises ValueError for other values.
    """
    if len(values) == 1 and is_golden(values[0]):
        lengths, what = load_golden(Path(values[0]), golden_curve)
        source = f"{values[0]} (InferenceX, {what}, of its own draft)"
        return _spread("--acceptance", [lengths], budgets), source
    if len(values) == 1 and is_file(values[0]):
        path = Path(values[0])
        like = (drafter, policy or DEFAULT_KV_POLICY, weights)
        return _from_records(path, records or load_passes(path), budgets, like)
    rates = [conditional_rate(parse_acceptance(value), gamma) for value in values]
    source = f"{' '.join(values)} of {gamma} draft tokens a step"
    return _spread("--acceptance", rates, budgets), source


def find_conditional(
    rates: Sequence[float], budgets: Sequence[int] | None
) -> tuple[dict[int, AcceptanceCurve], str]:
    return _spread("--conditional_acceptance", list(rates), budgets), "given"


def _spread(
    flag: str, values: Sequence[AcceptanceCurve], budgets: Sequence[int] | None
) -> dict[int, AcceptanceCurve]:
    budgets = (DEFAULT_BUDGET,) if budgets is None else budgets
    if len(values) not in (1, len(budgets)):
        raise ValueError(
            f"{flag} has {len(values)} values for {len(budgets)} of --budget; "
            "give one value, or one per budget"
        )
    each = list(values) * (len(budgets) // len(values))
    return dict(zip(budgets, each, strict=True))


def parse_acceptance(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"--acceptance {text} is not known; choose from {CHOICES}") from None
    if not 0 <= rate <= 1:
        raise ValueError(f"--acceptance {text}: {rate:g} is not between 0 and 1")
    return rate


def longest(curves: dict[int, AcceptanceCurve]) -> int | None:
    """The largest gamma that all curves reach; None if all are rates."""
    reached = [c for c in curves.values() if isinstance(c, tuple | Mapping)]
    return min((max(c) if isinstance(c, Mapping) else len(c) for c in reached), default=None)


def is_file(text: str) -> bool:
    return Path(text).suffix == ".jsonl" or is_golden(text) or Path(text).is_file()


Drafting = tuple[str, str, str | None]
"""The drafter, the KV policy and the draft weights of a run."""


def drafting_of(config: Mapping[str, Any]) -> Drafting | None:
    """Drafter, policy and weights in a record's config. None without drafts that read a cache, and
    for chains unlike those of a plan, which end early (`--pa`) or whose lengths a given cost
    chose."""
    decoding = config["decoding"]
    is_other = any(decoding.get(name) is not None for name in ("pa", "step_cost"))
    if is_other or decoding["drafter"] is None or config.get("kv") is None:
        return None
    return decoding["drafter"], config["kv"]["policy"], decoding.get("draft_weights")


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether requests were greedy, and the policy chose once."""
    return sampling(config) == "greedy" and not config["kv"].get("reselect_every")


def _from_records(
    path: Path, records: Sequence[PassRecord], budgets: Sequence[int] | None, like: Drafting
) -> tuple[dict[int, AcceptanceCurve], str]:
    """The longest curve of each budget; among curves of equal length that of most verifications,
    and the newest of these. Of records that
    drafted as `like` says, and of those the greedy ones that chose once, if there are any."""
    drafter, policy, weights = like
    curves: dict[int, tuple[float, ...]] = {}
    places: dict[int, str] = {}
    weights_of: dict[int, tuple[int, int]] = {}
    likes = [record for record in records if drafting_of(record.config) == like]
    plain = [record for record in likes if is_plain(record.config)]
    for record in plain or likes:
        config = record.config
        metrics = record.metrics
        budget = config["kv"]["budget"]
        curve = metrics and metrics.acceptance_per_position
        if metrics is None or budget <= 0 or not curve:
            continue
        weight = len(curve), (metrics.judged_per_position or [0])[0]
        if weight >= weights_of.get(budget, (0, 0)):
            weights_of[budget] = weight
            place = f"{config['model']['model']} at {config['workload']['prefix_len']} tokens"
            curves[budget] = tuple(curve)
            places[budget] = place
    if not curves:
        command = "selfspec" if drafter == "self" else "longspec"
        raise ValueError(
            f"--acceptance {path} has no record with acceptance under a KV budget and --kv_policy "
            f"{policy}{f' --draft_weights {weights}' if weights else ''}; "
            f"`magicdec {command}` makes one"
        )
    chosen_budgets = sorted(curves) if budgets is None else budgets
    for budget in chosen_budgets:
        if budget not in curves:
            choices = " ".join(map(str, sorted(curves)))
            raise ValueError(f"--budget {budget} is not in {path}; choose from {choices}")
    of = ", ".join(sorted({places[budget] for budget in chosen_budgets}))
    chosen: dict[int, AcceptanceCurve] = {budget: curves[budget] for budget in chosen_budgets}
    return chosen, f"{path} (measured with {of}, {policy})"
