"""PassObserver: what is seen of a pass, step by step and by request id. A system tells it when its
steps begin, what each of them did and took, and what it did before the first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from magicdec.engine.scheduler import StepCounts
from magicdec.hardware.threads import ThreadCount
from magicdec.hardware.timing import PhaseTimer
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.records.acceptance import Verifications
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import Digest
from magicdec.runner.request import StepOutput
from magicdec.runner.step_plan import StepPlan


def ignore_tokens(num_tokens: int) -> None:
    """Nobody counts the tokens."""


def do_nothing() -> None:
    """Nothing is noted before the first step."""


@dataclass(frozen=True)
class ObservedStep:
    """A decode step. Lists are by request, in the order of `request_ids`; `num_drafted` and
    `num_accepted` are None without drafts, `digests` where no log is kept (`DraftLog`),
    `acceptance` where drafts are only counted (`StepOutput`)."""

    request_ids: tuple[int, ...]
    seconds: float
    num_forwards: int  # of the target and of drafts, as this rank has counted them
    prompt_tokens: int  # that the step has also prefilled
    draft_width: int
    num_emitted: list[int]  # tokens, up to the end of the request
    num_drafted: list[int] | None
    num_accepted: list[int] | None
    digests: list[Digest] | None
    acceptance: list[list[float]] | None


@dataclass(frozen=True)
class Preparation:
    """What a strategy did between prefill and the first step. `calibration_s` is the part of its
    time that went into measuring draft lengths, None if it never measures."""

    seconds: float
    calibration_s: float | None
    is_draft_prefill: bool


@dataclass
class PassObserver:
    """The observer of a pass over one group of requests. It calls `advance` with each step's number
    of tokens, and `note_begin` when the first step comes now."""

    counts: StepCounts = field(default_factory=StepCounts)
    advance: Callable[[int], None] = ignore_tokens
    threads: ThreadCount = field(default_factory=ThreadCount)
    verifications: Verifications = field(default_factory=Verifications)
    is_measured: bool = False
    is_logged: bool = False  # steps say what was drafted and read, where the system can
    is_timed: bool = False  # steps take their time alone, and do not wait for each other: kept
    phases: PhaseTimer | None = None  # of steps, if they are timed
    note_begin: Callable[[], None] = do_nothing
    steps: list[ObservedStep] = field(default_factory=list)
    preparation: Preparation | None = None  # None where requests join while others decode
    begun_s: float = 0.0
    reads: list[ForwardCounts] = field(default_factory=list)  # of each runner, in decode steps
    _runners: Sequence[ModelRunner] = ()
    # The counts of the runners when the first of the steps that decode came; None while steps only
    # prefill.
    _counted_from: list[ForwardCounts] | None = None
    _num_forwards: int = 0  # so far, by all runners
    _prompt_tokens: int = 0  # that the step which is executed prefills

    def begin(self, runners: Sequence[ModelRunner] = ()) -> None:
        """The first step comes now. The forwards of these runners are counted, until `end`."""
        self._runners = runners
        self._counted_from = self._copy_counts()
        self.reads = [ForwardCounts() for _ in runners]
        self.note_begin()
        self._num_forwards = self._count_forwards()
        self.begun_s = time.perf_counter()

    def end(self) -> None:
        """The last step has ended."""
        if self._counted_from is not None:
            self._count_reads()
        self._runners = ()

    def _count_reads(self) -> None:
        """Count what the runners read from now on, or no longer."""
        if self._counted_from is None:
            self._counted_from = self._copy_counts()
        else:
            columns = zip(self.reads, self._runners, self._counted_from, strict=True)
            self.reads = [reads.plus(runner.counts.minus(then)) for reads, runner, then in columns]
            self._counted_from = None
        self._num_forwards = self._count_forwards()

    def _copy_counts(self) -> list[ForwardCounts]:
        return [runner.counts.copy() for runner in self._runners]

    def watch(self, plan: StepPlan) -> None:
        """A step begins now."""
        self.counts.watch(plan)
        # Counts take some time, so that there are none from one step that decodes to the next.
        if (plan.decoding is None) != (self._counted_from is None):
            self._count_reads()
        self._prompt_tokens = sum([part.stop - part.start for part in plan.parts])

    def observe(self, request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        """A step that decodes has ended; other requests may have been prefilled in it."""
        self.verifications.observe(request_ids, output)
        before = self._num_forwards
        self._num_forwards = self._count_forwards()
        if self.is_timed:
            step = ObservedStep(
                request_ids=tuple(request_ids),
                seconds=seconds,
                num_forwards=self._num_forwards - before,
                prompt_tokens=self._prompt_tokens,
                draft_width=output.draft_width,
                num_emitted=[len(tokens) for tokens in output.token_ids],
                num_drafted=output.num_drafted,
                num_accepted=output.num_accepted,
                digests=output.digests,
                acceptance=output.acceptance,
            )
            self.steps.append(step)
        self.advance(output.num_tokens)

    def use_digests(self, digests: Sequence[list[Digest] | None]) -> None:
        """Put these digests of each step in place of those of this rank alone."""
        pairs = zip(self.steps, digests, strict=True)
        self.steps = [replace(step, digests=step_digests) for step, step_digests in pairs]
        request_digests = dict[int, list[Digest | None]]()
        for step in self.steps:
            rows = [None] * len(step.request_ids) if step.digests is None else step.digests
            drafted = step.num_drafted or [step.draft_width] * len(step.request_ids)
            for request_id, count, digest in zip(step.request_ids, drafted, rows, strict=True):
                if count:
                    request_digests.setdefault(request_id, []).append(digest)
        self.verifications.use_digests(request_digests)

    def _count_forwards(self) -> int:
        return sum([runner.counts.num_forwards for runner in self._runners])
