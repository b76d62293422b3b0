"""The advice of `magicdec advise` from its short runs: one sentence and a command. The plan
predicts longer contexts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.config.sections import NONE, SELF, KVSection
from magicdec.hardware.other_load import busy_share, is_busy
from magicdec.names import EVERY_TOKEN
from magicdec.records.comparison.conditions import copied_dtype
from magicdec.records.describe import method
from magicdec.records.intervals import LEVEL, ratio_interval
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes

if TYPE_CHECKING:
    from magicdec.cli.advise import AdviceSection
    from magicdec.predict.plan import SpeculationPlan

CLOSE = 0.15  # a plan within this share of the measurement is said to agree with it
MOST_EQUALS = 3  # drafts that are named beside the best one
LONGEST = 16  # the plan looks at contexts of up to so many times the measured one


@dataclass(frozen=True)
class MeasuredDraft:
    """A short run: its draft's flags, and its net speedup, of all batches and of each. `interval`
    holds with 95 % for all drafts together; None with too few batches. `predicted` is the plan's
    net speedup at the same place, if any."""

    draft: str
    speedup: float
    interval: Sequence[float] | None = None
    predicted: float | None = None
    per_batch: Sequence[float] = ()

    @property
    def least(self) -> float:
        """The lower end of the interval, or the speedup. It ranks drafts, because the highest of
        many noisy speedups is often the most disturbed."""
        return self.interval[0] if self.interval else self.speedup

    def __str__(self) -> str:
        return with_interval(self.speedup, self.interval)


@dataclass(frozen=True)
class Finding:
    """What the runs say: the draft to take, those that cannot be told apart from it, how many were
    measured, and the largest share of the cores that another load took meanwhile."""

    best: MeasuredDraft
    equals: Sequence[MeasuredDraft] = ()
    num_candidates: int = 1
    cores_taken: float | None = None


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.2f}x{'' if interval is None else ' [{:.2f}, {:.2f}]'.format(*interval)}"


def joint_level(num_candidates: int) -> float:
    """The level of each interval with which all of them hold with `LEVEL` together: the best of
    many drafts without a gain has a gain by chance, so that each has a share of what is left."""
    return 1 - (1 - LEVEL) / max(1, num_candidates)


def describe_advice(found: Finding, place: str, expectation: str) -> str:
    """The sentence. `place` says where it was measured, such as `B 4 and 2048 tokens of
    context`."""
    best = found.best
    verdict = "pays here"
    draft = f"`{best.draft}`"
    if best.speedup <= 1:
        verdict = "does not pay here"
        draft = f"the best draft, {draft},"
    if best.interval is not None and best.interval[0] <= 1 <= best.interval[1]:
        verdict = "may or may not pay here"
    scope = f" for all {found.num_candidates} drafts together" if found.num_candidates > 1 else ""
    between = f" (95 % interval{scope})" if best.interval else ""
    return (
        f"Speculation {verdict}: at {place}, {draft} has a net speedup of {best}{between} over "
        f"decoding without drafts{_equals_of(found)}; {expectation}{_how_sure(found)}."
    )


def _equals_of(found: Finding) -> str:
    """The drafts that are equal to the best one as far as the batches tell, the fastest first."""
    if not found.equals or found.best.interval is None:
        return ""
    ordered = sorted(found.equals, key=lambda draft: -draft.speedup)
    named = [f"`{draft.draft}` {draft}" for draft in ordered[:MOST_EQUALS]]
    more = len(ordered) - len(named)
    drafts = ", ".join(named) + (f" and {more} more" if more else "")
    return (
        f", and its interval begins highest of those that {len(found.best.per_batch)} batches "
        f"cannot tell apart from it ({drafts})"
    )


def _how_sure(found: Finding) -> str:
    best = found.best
    if is_busy(found.cores_taken):
        return (
            f"unsure, because another load took up to {busy_share(found.cores_taken)} of the cores "
            "meanwhile: measure again when nothing else runs"
        )
    if best.interval is None:
        return "unsure, because so few batches have no interval: give --num_batches 3 or more"
    if best.interval[0] <= 1 <= best.interval[1]:
        return "unsure, because the interval includes 1: give more --num_batches"
    if best.predicted is None:
        return "sure of this place, which says nothing of other contexts for this draft"
    expectation = f"because the plan expected {best.predicted:.2f}x here"
    if abs(best.predicted / best.speedup - 1) <= CLOSE:
        return f"sure, {expectation} too"
    return f"sure of this place but not of other contexts, {expectation}"


def net_speedup(record: PassRecord) -> float:
    return (record.metrics.net_speedup if record.metrics else None) or 0.0


def describe_runs(records: Mapping[str, PassRecord]) -> list[str]:
    """A line for each run, the best first, with intervals that hold for all of them together."""
    level = joint_level(len(records))
    drafts = {draft.draft: draft for draft in measured_drafts(records)}
    ordered = sorted(drafts, key=lambda flags: -drafts[flags].least)
    last = {draft.draft for draft in finalists([*drafts.values()])}
    ordered = sorted(ordered, key=lambda flags: flags not in last)
    ordered += [flags for flags in records if flags not in drafts]
    lines = list[str]()
    for flags in ordered:
        record = records[flags]
        metrics = record.metrics
        parts = [record.status if record.error is None else f"{record.status}: {record.error}"]
        if metrics is not None and metrics.decode_tokens_per_s is not None:
            parts.append(f"{metrics.decode_tokens_per_s:.1f} tokens/s")
        if metrics is not None and metrics.speedup is not None:
            interval = ratio_interval(metrics.speedup_per_group or (), level)
            parts.append(f"speedup {with_interval(metrics.speedup, interval)}")
        if flags in drafts:
            parts.append(f"net {drafts[flags]}")
        lines.append(f"{'run':<10} {method(record)}: {', '.join(parts)}")
    if any(draft.interval for draft in drafts.values()):
        scope = f"of all {len(records)} drafts together" if len(records) > 1 else "of the draft"
        lines.append(f"{'':<10} in brackets: 95 % intervals {scope}")
    return lines


def measured_drafts(records: Mapping[str, PassRecord]) -> list[MeasuredDraft]:
    """The drafts whose runs have a net speedup."""
    level = joint_level(len(records))
    found = []
    for flags, record in records.items():
        if net_speedup(record) and record.metrics is not None:
            ratios = record.metrics.net_speedup_per_group or ()
            interval = ratio_interval(ratios, level)
            found.append(MeasuredDraft(flags, net_speedup(record), interval, None, ratios))
    return found


def finalists(drafts: Sequence[MeasuredDraft]) -> list[MeasuredDraft]:
    """Without those that were far behind after the first batch. One that the end came before has a
    batch less than the others."""
    most = max((len(draft.per_batch) for draft in drafts), default=0)
    return [draft for draft in drafts if len(draft.per_batch) >= most - 1]


def find_best(drafts: Sequence[MeasuredDraft]) -> tuple[MeasuredDraft, list[MeasuredDraft]]:
    """The draft whose interval begins highest, and those that cannot be told apart from it. None is
    surely faster: the spread of a ratio is at least the difference of the spreads of both.
    Intervals are those of all `drafts` together, since the finalists were chosen among them."""
    level = joint_level(len(drafts))
    others = finalists(drafts)
    best = max(others, key=lambda draft: draft.least)
    others.remove(best)
    return best, [other for other in others if not is_surely_faster(best, other, level)]


def is_surely_faster(one: MeasuredDraft, other: MeasuredDraft, level: float) -> bool:
    """Whether the interval of the ratio of their speedups lies above 1. All drafts decode the same
    batches, each beside the same baseline."""
    if len(one.per_batch) != len(other.per_batch):  # they are not of the same batches
        return False
    ratios = [a / b for a, b in zip(one.per_batch, other.per_batch, strict=True)]
    interval = ratio_interval(ratios, level)
    return interval is not None and interval[0] > 1


def find_advice(
    args: AdviceSection, records: Mapping[str, PassRecord], plan: SpeculationPlan | None
) -> str:
    """The sentence, and in a line of its own the command. Raises ValueError if no run has a
    speedup."""
    drafts = measured_drafts(records)
    if not drafts:
        raise ValueError("no run has a speedup: their tokens differ, or the weights are random")
    best, equals = find_best(drafts)
    config = records[best.draft].config
    if plan is not None and config["decoding"]["drafter"] == SELF:
        from magicdec.predict.acceptance_file import budget_of

        candidate = next(
            planned for planned in plan.candidates() if planned.budget == budget_of(config)
        )
        here = candidate.predict(args.B, args.prefix_len, args.gamma)
        best = replace(best, predicted=here.net_speedup(args.num_new_tokens))
    taken = [record.environment.cores_taken or 0.0 for record in records.values()]
    found = Finding(best, equals, len(records), max(taken))
    place = f"B {args.B} and {args.prefix_len} tokens of context"
    sentence = describe_advice(found, place, "" if plan is None else expectation_of(plan, args))
    flags = shlex.split(best.draft) if best.speedup > 1 else ["--draft", NONE]
    return f"{sentence}\n\n    {shlex.join(['magicdec', 'run', *flags, *args.workload])}"


def expectation_of(plan: SpeculationPlan, args: AdviceSection) -> str:
    """The contexts in which the plan expects self-speculation to pay, as a part of a sentence."""
    pays_from = plan.break_even(args.B)
    expected = f"not to pay up to {plan.longest} tokens, the longest context"
    if pays_from is not None:
        context = plan.prefix_lens[-1]
        far = plan.predict(args.B, context)
        expected = f"to pay from {pays_from} tokens on"
        if far.gamma:
            budget = "" if far.budget == EVERY_TOKEN else f" --budget {far.budget}"
            expected += (
                f", and {far.net_speedup(args.num_new_tokens):.2f}x at {context} with "
                f"`--kv_policy {plan.kv_policy}{budget} --gamma {far.gamma}`"
            )
    return f"the plan expects self-speculation {expected}; "


def make_plan(
    args: AdviceSection, records: Mapping[str, PassRecord], file: Path
) -> SpeculationPlan | None:
    """The plan for the fastest self-speculation's policy and weights, with the acceptance of the
    file's runs; None without one that has an acceptance."""
    from magicdec.cli import plan
    from magicdec.model.presets.presets import find_config

    own = {
        flags: record
        for flags, record in records.items()
        if record.config["decoding"]["drafter"] == SELF
        and record.metrics
        and record.metrics.acceptance_per_position
    }
    drafts = [draft for draft in measured_drafts(records) if draft.draft in own]
    if not drafts:
        return None
    config = own[find_best(drafts)[0].draft].config
    name = config["model"]["model"]
    # As long as a run allows.
    longest = max(args.prefix_len, find_config("--model", name).max_length - args.num_new_tokens)
    contexts = sorted({min(args.prefix_len * n, longest) for n in (1, 4, LONGEST)})
    section = plan.PlanSection(
        model=name,
        machine=args.machine,
        allow_busy_machine=args.allow_busy_machine,
        acceptance=(str(file),),
        dtype=config["model"]["dtype"],
        kv_policy=config["kv"]["policy"],
        draft_weights=config["decoding"].get("draft_weights"),
        draft_kv_dtype=copied_dtype(config) or KVSection.draft_kv_dtype,
        B=(args.B,),
        gen_len=args.gen_len,
        tp=args.num_ranks,
        prefix_len=tuple(contexts),
    )
    return plan.make_plan(section, {"pass": load_passes(file)})
