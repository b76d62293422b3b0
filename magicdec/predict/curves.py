"""Acceptance for the cost model, from `--acceptance` or `--conditional_acceptance` of `magicdec
plan` ([Leviathan et al.](https://arxiv.org/abs/2211.17192), section 3.1). Imports no torch.

A record's *acceptance rate* is accepted / drafted tokens. The *conditional rate*, the probability
that a draft token is accepted if all before it in the step were, is larger, because tokens after a
rejected one are drafted too. Rates and curves of passes hold at every context; records of `magicdec
acceptance` and golden files may have lengths for several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.config.setting import setting
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.predict.acceptance_file import RecordsByKind, curves_of_file, load_by_kind
from magicdec.predict.golden import is_golden, load_golden
from magicdec.predict.lengths import EVERYWHERE, AcceptanceLengths

AcceptanceCurve = float | tuple[float, ...] | AcceptanceLengths
"""One conditional rate; or the shares of verifications that accept at least 1, 2, ... draft tokens
(a record's `acceptance_per_position`); or acceptance lengths by context and the draft tokens of a
step. The first two hold at every context."""

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


def expected_tokens(acceptance: AcceptanceCurve, gamma: int, context: int = EVERYWHERE) -> float:
    """Expected tokens per row and verification with the bonus token: 1 to gamma + 1. `gamma` is 0
    or one of `known_gammas`; `context` is needed where the acceptance depends on it."""
    if isinstance(acceptance, AcceptanceLengths):
        return acceptance.length(context, gamma) if gamma else 1.0
    return 1.0 + sum(survival(acceptance, k) for k in range(1, gamma + 1))


def tokens_interval(acceptance: AcceptanceCurve, gamma: int, context: int) -> list[float] | None:
    """The 95 % interval over texts of `expected_tokens`; None where texts are not known."""
    if not isinstance(acceptance, AcceptanceLengths):
        return None
    return acceptance.interval(context, gamma)


def contexts_of(acceptance: AcceptanceCurve) -> Sequence[int]:
    """The contexts at which the acceptance is known; none if it is the same at every one."""
    if not isinstance(acceptance, AcceptanceLengths):
        return ()
    return acceptance.contexts if len(acceptance.contexts) > 1 else ()


def held(acceptance: AcceptanceCurve) -> AcceptanceCurve:
    """The acceptance of the shortest context, at every one."""
    return acceptance.shortest if isinstance(acceptance, AcceptanceLengths) else acceptance


def known_gammas(acceptance: AcceptanceCurve, max_gamma: int) -> Sequence[int]:
    """The draft tokens of a step, 1 to `max_gamma`, of which the acceptance is known."""
    if isinstance(acceptance, AcceptanceLengths):
        return [gamma for gamma in acceptance.gammas if gamma <= max_gamma]
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
        "takes a file of records (of magicdec acceptance by context, or of runs), InferenceX's "
        "golden acceptance lengths (a .yaml), or several rates, one for each --budget. Default: "
        "0.8 in simulate.",
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
    records: RecordsByKind | None = None,
    golden_curve: str | None = None,
    names: Mapping[str, str] | None = None,
    copied: str | None = None,
) -> tuple[dict[int, AcceptanceCurve], str]:
    """Returns budget -> acceptance, and a text that names the source.

    `values` are one for all budgets, one per budget, or one file. The records of a file (`records`,
    if already read) count if they have this `drafter` (`self` or `model`), draft `weights`, KV
    policy (None: the default) and dtype of a copy of every token (`copied`), and `names` as
    `curves_of_file` has them; a golden file has `golden_curve` for all budgets (None: its only
    one). A rate was measured with `gamma` draft tokens. `budgets` None stands for all in the file
    of records, or the default. Raises ValueError for other values.
    """
    if len(values) == 1 and is_golden(values[0]):
        lengths, what = load_golden(Path(values[0]), golden_curve)
        check_common(values[0], [lengths])
        source = f"{values[0]} (InferenceX, {what}, of its own draft)"
        return _spread("--acceptance", [lengths], budgets), source
    if len(values) == 1 and is_file(values[0]):
        path = Path(values[0])
        like = (drafter, policy or DEFAULT_KV_POLICY, weights, copied)
        by_kind = load_by_kind(path) if records is None else records
        found, source = curves_of_file(path, by_kind, budgets, like, names or {})
        check_common(values[0], found.values())
        return {**found}, source
    rates = [conditional_rate(parse_acceptance(value), gamma) for value in values]
    source = f"{' '.join(values)} of {gamma} draft tokens a step"
    return _spread("--acceptance", rates, budgets), source


def check_common(file: str, curves: Iterable[AcceptanceCurve]) -> None:
    """Raises ValueError unless the contexts of each curve share a number of draft tokens."""
    for curve in curves:
        if isinstance(curve, AcceptanceLengths) and not curve.gammas:
            contexts = ", ".join(map(str, curve.contexts))
            raise ValueError(
                f"--acceptance {file}: the contexts {contexts} have no number of draft tokens in "
                "common; measure them with one --gamma"
            )


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
    by_budget = list(values) * (len(budgets) // len(values))
    return dict(zip(budgets, by_budget, strict=True))


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
    lengths = [max(c.gammas) for c in curves.values() if isinstance(c, AcceptanceLengths)]
    shares = [len(c) for c in curves.values() if isinstance(c, tuple)]
    return min([*lengths, *shares], default=None)


def is_file(text: str) -> bool:
    return Path(text).suffix == ".jsonl" or is_golden(text) or Path(text).is_file()
