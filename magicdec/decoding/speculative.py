"""Speculative decoding: draft tokens, verify all of them in one forward, keep the accepted ones of
each row and one more token of the target. A step without drafts is a step of autoregressive
decoding, so the baseline is this strategy without a drafter.

Drafts of greedy requests are compared with the target's own tokens, which is exact. Drafts of other
requests are judged by rejection sampling. Source: Leviathan et al. 2023, algorithm 1; that each row
of a batch accepts its own number of drafts: MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from magicdec.config.tree_shape import TreeShape
from magicdec.decoding.calibration import measure_steps
from magicdec.decoding.captured_steps import CapturedSteps
from magicdec.decoding.steps import Steps
from magicdec.decoding.strategy import Setup
from magicdec.drafting.draft_length import DraftLength, FixedLength, make_draft_length
from magicdec.drafting.drafter import Drafter, DraftPlan, make_drafter
from magicdec.request import Batch, Request, StepOutput
from magicdec.runner import ModelRunner


class Speculative:
    """In each step, `drafter` drafts as many tokens for each row as `draft_length` chooses, or a
    `tree` of that depth."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        draft_length: DraftLength,
        steps: Steps,
        tree: TreeShape | None = None,
    ) -> None:
        self.runner, self.drafter, self.tree = runner, drafter, tree
        self.draft_length, self.steps = draft_length, steps
        self._running: dict[int, Request] = {}  # by row

    def admit(self, batch: Batch) -> None:
        self._running |= zip(batch.rows, batch.requests, strict=True)
        running = Batch(tuple(self._running[row] for row in sorted(self._running)))
        if self.drafter is not None:
            self.drafter.admit(batch.requests)
        self.steps.admit(running, self.draft_length.choices)
        self.draft_length.begin(running, self.measure)

    def release(self, rows: Sequence[int]) -> None:
        """A row that was never admitted, because its request left before, is passed over."""
        admitted_rows = [row for row in rows if self._running.pop(row, None) is not None]
        self.steps.release(admitted_rows)

    def step(self, batch: Batch) -> StepOutput:
        """Every row emits one token, and one more for each draft that it accepts. Rows that draft
        different numbers of tokens are computed one group after the other."""
        lengths = self.draft_length.lengths(batch)
        if len(set(lengths)) == 1:
            return self._step(batch, lengths[0])
        tokens, accepted = dict[Request, list[int]](), dict[Request, int]()
        proposed, most = dict[Request, int](), 0
        for count in sorted(set(lengths)):
            pairs = zip(batch.requests, lengths, strict=True)
            group = Batch(tuple(request for request, length in pairs if length == count))
            output = self._step(group, count)
            tokens |= zip(group.requests, output.token_ids, strict=True)
            if output.num_accepted is not None:
                accepted |= zip(group.requests, output.num_accepted, strict=True)
            if output.num_proposed is not None:
                proposed |= zip(group.requests, output.num_proposed, strict=True)
            most = max(most, output.num_drafted)
        return StepOutput(
            [tokens[request] for request in batch.requests], most,
            [accepted.get(request, 0) for request in batch.requests],
            [proposed.get(request, 0) for request in batch.requests],
        )  # fmt: skip

    def _step(self, batch: Batch, count: int) -> StepOutput:
        started = time.perf_counter()
        plan = DraftPlan((), ())
        if self.drafter is not None:
            plan = self.drafter.plan(batch.requests, count, self.draft_length)
        if any(plan.counts):
            output = self._speculate(batch, plan.counts)
        else:
            output = StepOutput(self.steps.decode(batch))
        seconds = time.perf_counter() - started
        accepted = output.num_accepted or ()
        self.draft_length.observe(batch, output.num_drafted, accepted, seconds, plan.judged)
        return output

    def _speculate(self, batch: Batch, proposed: Sequence[int]) -> StepOutput:
        """One draft and one verification. Rows for which fewer tokens are `proposed` than for
        another are padded. The draft may end before; nothing drafted is a plain decode."""
        count = self.steps.padded_length(max(proposed))
        proposal = self.steps.draft(batch, count, self.tree)
        verdict = self.steps.verify(batch, proposal)
        emitted = [row[1 : 2 + row[0]] for row in verdict]
        if self.tree is None:
            count = proposal.ids.shape[1]
        if count == 0:
            return StepOutput(emitted)
        accepted = [row[0] for row in verdict]
        return StepOutput(emitted, count, accepted, [min(count, each) for each in proposed])

    def measure(self, batch: Batch) -> list[float]:
        """The seconds of a step of `batch` with 0, 1, 2, ... draft tokens. Changes nothing."""
        cached = [self.runner.cache.lengths[row] for row in batch.rows]
        return measure_steps(self.steps, batch, cached, self.draft_length.most)


def speculative(setup: Setup) -> Speculative:
    """The strategy with the drafter that the run names."""
    assert setup.decoding.drafter is not None, "a speculative run names its drafter"
    runner = setup.runner
    drafter = make_drafter(setup.decoding.drafter, setup)
    # Captured steps are captured for sets of rows, and groups would be many sets.
    per_row = setup.is_in_flight and not setup.recorder.captures
    length = setup.draft_length or make_draft_length(
        setup.decoding, runner.group, runner.device, per_row=per_row
    )
    steps = make_steps(setup, drafter)
    return Speculative(runner, drafter, length, steps, setup.decoding.tree_shape)


def autoregressive(setup: Setup) -> Speculative:
    """One token for each row in each step: the baseline, whose tokens every other strategy must
    reproduce."""
    return Speculative(setup.runner, None, FixedLength(0), make_steps(setup, None))


def make_steps(setup: Setup, drafter: Drafter | None) -> Steps:
    """The steps that the setup asks for."""
    if setup.recorder.captures:
        return CapturedSteps(
            setup.runner, drafter, setup.phase, setup.recorder, setup.is_in_flight
        )  # fmt: skip
    return Steps(setup.runner, drafter, setup.phase, setup.is_in_flight)
