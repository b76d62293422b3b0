"""The rule of the gate: what is the same, a change, a gain, a regression, or cannot be compared.

Owns the rule, which docs/statistics.md states. Times are not compared; ratios within one run are,
where that is asked for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magicdec.names import BASELINE
from magicdec.records.comparison.change import Change, Pair, change_of
from magicdec.records.identities.of_metrics import check_acceptance
from magicdec.records.identities.of_samples import check_samples
from magicdec.records.record import RunRecord
from magicdec.records.statistics.intervals import FEWEST_PROMPTS, LEVEL

REGRESSION, INCOMPARABLE, CHANGED = "regression", "not comparable", "changed"
GAIN, SAME, MISSING = "gain", "same", "missing"
VERDICTS = (REGRESSION, INCOMPARABLE, CHANGED, GAIN, SAME, MISSING)  # the worst first
DEFAULT_MARGIN = 0.02
READS_TOLERANCE = 0.02  # of the tokens that a draft forward reads
RATIOS = ("speedup", "net_speedup", "roofline_fraction")


@dataclass(frozen=True)
class Rule:
    """What the user may choose. `margin` replaces that of the baselines; `is_exact` lets no change
    pass; `performance` is the share that a ratio within one run may lose (None: not compared)."""

    margin: float | None = None
    is_exact: bool = False
    performance: float | None = None

    def margin_of(self, baseline: RunRecord) -> float:
        given = baseline.margin if self.margin is None else self.margin
        return DEFAULT_MARGIN if given is None else given


@dataclass(frozen=True)
class Comparison:
    """What was found out about one record, or about several together, in one line."""

    name: str
    verdict: str
    text: str
    rates: tuple[float, float] | None = None  # acceptance rate: baseline, new
    change: Change | None = None

    @property
    def severity(self) -> int:
        """Its place among the verdicts, of which the first is the worst."""
        return VERDICTS.index(self.verdict)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def contradiction_of(record: RunRecord) -> str | None:
    """The first contradiction between the acceptance metrics and the samples of a record; None if
    there is none, or it has no samples."""
    strategy = record.config["decoding"]["strategy"]
    if record.samples is None or record.metrics is None or strategy == BASELINE:
        return None
    samples = record.samples[strategy].restored()
    try:
        check_samples(strategy, samples)
        check_acceptance(strategy, record.metrics, samples)
    except AssertionError as error:
        return f"contradicts itself: {error}"
    return None


def other_reads(new: RunRecord, old: RunRecord) -> str | None:
    """What a draft forward reads, if it is no longer what it was: then it is not the same policy or
    budget, whatever the records say."""
    assert new.metrics is not None and old.metrics is not None
    after, before = new.metrics.kv_tokens_read, old.metrics.kv_tokens_read
    if after is None or before is None or abs(after - before) <= READS_TOLERANCE * before:
        return None
    return f"regression: a draft forward reads {after:.1f} tokens of a row's KV, was {before:.1f}"


def judge(name: str, pair: Pair, margin: float, level: float = LEVEL) -> Comparison:
    """The verdict on the acceptance rate of one pair of records."""
    rates = pair.rates()
    forks = f"; {pair.num_different} outputs differ" if pair.num_different else ""
    if pair.is_equal:
        text = f"acceptance rate {rates[1]:.4f}, all counts as before{forks}"
        return Comparison(name, SAME, text, rates, Change(0.0, None, pair.after.num_prompts))
    change = change_of([pair], level)
    verdict, why = decide(rates, change, margin)
    text = f"acceptance rate {rates[0]:.4f} -> {rates[1]:.4f}, {change}{forks}: {verdict}, {why}"
    return Comparison(name, verdict, text, rates, change)


def judge_together(name: str, pairs: list[Pair], margin: float, level: float) -> Comparison:
    """The verdict on several pairs of one method, whose losses may be too small to see in each."""
    change = change_of(pairs, level)
    verdict, why = decide(None, change, margin)
    text = f"acceptance rate of {len(pairs)} rows {change}: {verdict}, {why}"
    return Comparison(name, verdict, text, None, change)


def decide(rates: tuple[float, float] | None, change: Change, margin: float) -> tuple[str, str]:
    """The verdict and its reason. `rates`: of one pair, to tell a rate that fell to 0."""
    is_lost = rates is not None and rates[1] == 0
    if change.relative < -margin and (margin == 0 or is_lost):
        return REGRESSION, "any loss is one" if margin == 0 else "no draft is accepted any more"
    if abs(change.relative) > margin and change.interval is None:
        return INCOMPARABLE, f"{change.num_prompts} prompts; {FEWEST_PROMPTS} are needed"
    if change.is_noise:
        return CHANGED, "inside the noise"
    if abs(change.relative) <= margin:
        return CHANGED, f"within the margin of {100 * margin:g} %"
    verdict = REGRESSION if change.relative < 0 else GAIN
    return verdict, f"beyond the margin of {100 * margin:g} % and the noise"


def judge_ratios(name: str, new: RunRecord, old: RunRecord, share: float) -> Iterator[Comparison]:
    """The verdicts on ratios within one run, such as the speedup. A loss beyond the share counts,
    unless both records have intervals and these overlap."""
    assert new.metrics is not None and old.metrics is not None
    for metric in RATIOS:
        before, after = (getattr(m, metric) for m in (old.metrics, new.metrics))
        if before is None or after is None:
            continue
        ends = [getattr(m, f"{metric}_interval", None) for m in (old.metrics, new.metrics)]
        overlap = all(ends) and ends[1][1] >= ends[0][0]  # type: ignore[index]
        is_loss = after < before * (1 - share) and not overlap
        verdict = REGRESSION if is_loss else SAME
        text = f"{metric} {before:.3f} -> {after:.3f}, {100 * (after / before - 1):+.1f} %"
        yield Comparison(name, verdict, f"{text}{': regression' if is_loss else ''}")
