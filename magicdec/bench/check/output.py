"""PassOutput: what a pass has emitted, as a check needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.bench.check.judgement import judge_again
from magicdec.records.correctness import JudgedAgain
from magicdec.runner.request import Request
from magicdec.speculation.steps.logits_recorder import LogitsRecorder
from magicdec.systems.modes import Pass
from magicdec.systems.system import ReplayingSystem, System


@dataclass(frozen=True)
class PassOutput:
    """The requests of a pass, which have ended, in the order of arrival, and the recorder of its
    steps on this rank, if it has kept some."""

    name: str
    serving_pass: Pass
    system: System
    requests: Sequence[Request]
    recorder: LogitsRecorder | None = None

    def judge_steps(self) -> JudgedAgain | None:
        """The steps, judged again; None on a rank that has kept none. Every rank calls it, while
        the system is open."""
        system = self.system
        if (
            self.recorder is None
            or not isinstance(system, ReplayingSystem)
            or system.runner is None
        ):
            return None
        return judge_again(self.recorder, self.requests, system.runner)
