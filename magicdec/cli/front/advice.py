"""The advice of `magicdec advise` from its short runs: one sentence and a command. The plan
predicts longer contexts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.config.sections import NONE, SELF
from magicdec.records.intervals import LEVEL, ratio_interval
from magicdec.records.record import RunRecord

if TYPE_CHECKING:
    from magicdec.cli.front.advise import AdviceSection
    from magicdec.predict.plan import SpeculationPlan

CLOSE = 0.15  # a plan within this share of the measurement is said to agree with it
LONGEST = 16  # the plan looks at contexts of up to so many times the measured one


@dataclass(frozen=True)
class MeasuredDraft:
    """The best short run: its draft's flags and net speedup. `interval` holds with 95 % for all
    `num_candidates` together; None with too few batches. `predicted` is the plan's net speedup at
    the same place, if any."""

    draft: str
    speedup: float
    interval: Sequence[float] | None = None
    predicted: float | None = None
    num_candidates: int = 1


def describe_advice(best: MeasuredDraft, place: str, expectation: str) -> str:
    """The sentence. `place` says where it was measured, such as `B 4 and 2048 tokens of
    context`."""
    verdict = "pays here"
    draft = f"`{best.draft}`"
    if best.speedup <= 1:
        verdict = "does not pay here"
        draft = f"the best draft, {draft},"
    between = ""
    if best.interval is not None:
        of_all = (
            f" for all {best.num_candidates} drafts together" if best.num_candidates > 1 else ""
        )
        low, high = best.interval
        between = f" (95 % interval{of_all}: {low:.2f} to {high:.2f})"
        if best.interval[0] <= 1 <= best.interval[1]:
            verdict = "may or may not pay here"
    return (
        f"Speculation {verdict}: at {place}, {draft} was {best.speedup:.2f} times as fast as "
        f"decoding without drafts{between}; {expectation}{_how_sure(best)}."
    )


def _how_sure(best: MeasuredDraft) -> str:
    if best.interval is None:
        return "unsure, because so few batches have no interval: give --num_batches 3 or more"
    if best.interval[0] <= 1 <= best.interval[1]:
        return "unsure, because the interval includes 1: give more --num_batches"
    if best.predicted is None:
        return "sure of this place, which says nothing of other contexts for this draft"
    expectation = f"because the plan expected {best.predicted:.2f} times here"
    if abs(best.predicted / best.speedup - 1) <= CLOSE:
        return f"sure, {expectation} too"
    return f"sure of this place but not of other contexts, {expectation}"


def net_speedup(record: RunRecord) -> float:
    return (record.metrics.net_speedup if record.metrics else None) or 0.0


def least_speedup(record: RunRecord) -> float:
    """The lower end of the net speedup's interval, or the speedup. It ranks drafts, because the
    highest of many noisy speedups is often the most disturbed."""
    interval = record.metrics.net_speedup_interval if record.metrics else None
    return interval[0] if interval else net_speedup(record)


def find_advice(
    args: AdviceSection, records: Mapping[str, RunRecord], plan: SpeculationPlan | None
) -> str:
    """The sentence, and in a line of its own the command. Raises ValueError if no run has a
    speedup."""
    flags, record = max(records.items(), key=lambda item: least_speedup(item[1]))
    if not net_speedup(record) or record.metrics is None:
        raise ValueError("no run has a speedup: their tokens differ, or the weights are random")
    predicted = None
    kv = record.config["kv"]
    if plan is not None and record.config["decoding"]["drafter"] == SELF:
        candidate = next(each for each in plan.candidates() if each.budget == kv["budget"])
        here = candidate.predict(args.B, args.prefix_len, args.gamma)
        predicted = here.net_speedup(args.num_new_tokens)
    # The best of many drafts without a gain has a gain by chance: each has a share of the 5 %.
    ratios = record.metrics.net_speedup_per_batch or ()
    num_candidates = len(records)
    interval = ratio_interval(ratios, 1 - (1 - LEVEL) / num_candidates)
    best = MeasuredDraft(flags, net_speedup(record), interval, predicted, num_candidates)
    place = f"B {args.B} and {args.prefix_len} tokens of context"
    sentence = describe_advice(best, place, "" if plan is None else expectation_of(plan, args))
    drafts = shlex.split(flags) if best.speedup > 1 else ["--draft", NONE]
    return f"{sentence}\n\n    {shlex.join(['magicdec', 'run', *drafts, *args.workload])}"


def expectation_of(plan: SpeculationPlan, args: AdviceSection) -> str:
    """The contexts in which the plan expects self-speculation to pay, as a part of a sentence."""
    pays_from = plan.break_even(args.B)
    expected = f"not to pay up to {plan.longest} tokens, the longest context"
    if pays_from is not None:
        context = plan.prefix_lens[-1]
        far = plan.predict(args.B, context)
        expected = f"to pay from {pays_from} tokens on"
        if far.gamma:
            expected += (
                f", and {far.net_speedup(args.num_new_tokens):.2f} times at {context} with "
                f"`--kv_policy {plan.kv_policy} --budget {far.budget} --gamma {far.gamma}`"
            )
    return f"the plan expects self-speculation {expected}; "


def make_plan(
    args: AdviceSection, records: Mapping[str, RunRecord], file: Path
) -> SpeculationPlan | None:
    """The plan for the fastest self-speculation's policy and weights, with the acceptance of the
    file's runs; None without one that has an acceptance."""
    from magicdec.cli import plan
    from magicdec.model.presets.presets import find_config

    own = [
        record
        for record in records.values()
        if record.config["decoding"]["drafter"] == SELF
        and record.metrics
        and record.metrics.acceptance_per_position
    ]
    if not own:
        return None
    config = max(own, key=least_speedup).config
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
        B=(args.B,),
        gen_len=args.gen_len,
        tp=args.num_ranks,
        prefix_len=tuple(contexts),
    )
    return plan.make_plan(section)
