"""What is timed before decoding under `--gamma auto`, under a scripted clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from magicdec.decoding import calibration
from magicdec.decoding.calibration import measure_steps, repeated
from magicdec.request import Batch, Request, SamplingParams
from magicdec.sampling.model_tokens import Proposal

BATCH = Batch((Request(0, (1, 2), SamplingParams(9)), Request(1, (3,), SamplingParams(9))))
CACHED = [2, 1]


@dataclass
class ScriptedSteps:
    """Steps whose work advances the clock. A draft costs 2 ms and 1 ms for each token, a decode
    step 10 ms, a verification 11 ms and 0.5 ms for each draft token."""

    disturbed: int = -1  # the call that takes 70 ms more
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)
    phase: Any = "timed"
    drafter: Any = None

    def decode(self, batch: Batch) -> None:
        self._work("decode", 0, 0.010)

    def draft(self, batch: Batch, count: int) -> Proposal:
        self._work("draft", count, 0.002 + 0.001 * count)
        return Proposal(torch.ones(2, count, dtype=torch.int64))

    def verify(self, batch: Batch, proposal: Proposal) -> None:
        assert proposal.ids.shape[0] == 2
        count = proposal.ids.shape[1]
        self._work("verify", count, 0.011 + 0.0005 * count)

    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        assert batch is BATCH and lengths == CACHED
        self.now += 5.0
        self.calls.append(("undo", 0))

    def _work(self, kind: str, count: int, seconds: float) -> None:
        assert self.phase != "timed", "this is no phase of a step"
        is_disturbed = sum(kind != "undo" for kind, _ in self.calls) == self.disturbed
        self.now += seconds + 0.07 * is_disturbed
        self.calls.append((kind, count))


def measure(steps: ScriptedSteps, most: int, patch: pytest.MonkeyPatch) -> list[float]:
    patch.setattr("time.perf_counter", lambda: steps.now)
    return measure_steps(cast(Any, steps), BATCH, CACHED, most)


def seconds_of(most: int) -> list[float]:
    drafting = [0.002 + 0.001 * k + 0.011 + 0.0005 * k for k in range(1, most + 1)]
    return [pytest.approx(s) for s in (0.010, *drafting)]


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_seconds_lie_on_the_lines_through_what_was_timed(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ScriptedSteps()
    assert measure(steps, most, monkeypatch) == seconds_of(most)
    assert steps.phase == "timed", "the phases of steps are timed again"


def test_what_the_drafter_observed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.arange(3.0)
    drafter = SimpleNamespace(draft_kv=SimpleNamespace(state=[weights]))

    class Observing(ScriptedSteps):
        def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
            super().undo(batch, lengths)
            weights.add_(1.0)

    measure(Observing(drafter=drafter), 8, monkeypatch)
    assert weights.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("disturbed", range(10))
def test_one_disturbance_changes_nothing(disturbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(ScriptedSteps(disturbed), 8, monkeypatch) == seconds_of(8)


def test_few_steps_are_timed_and_each_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ScriptedSteps()
    measure(steps, 8, monkeypatch)
    once = [("decode", 0), ("draft", 1), ("draft", 3), ("verify", 1), ("verify", 8)]
    assert [call for call in steps.calls if call[0] != "undo"] == once * calibration.REPEATS
    assert steps.calls[1::2] == [("undo", 0)] * len(once) * calibration.REPEATS


def test_longer_drafts_are_never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only noise makes them appear so."""

    class Odd(ScriptedSteps):
        def verify(self, batch: Batch, proposal: Proposal) -> None:
            self._work("verify", proposal.ids.shape[1], 0.020 - 0.001 * proposal.ids.shape[1])

    seconds = measure(Odd(), 8, monkeypatch)
    assert seconds[8] - seconds[1] == pytest.approx(7 * 0.001)


def test_a_proposal_is_repeated_with_its_probabilities() -> None:
    ids, probs = torch.tensor([[4, 5], [6, 7]]), torch.rand(2, 2, 9)
    found = repeated(Proposal(ids, probs), 5)
    assert found.ids.tolist() == [[4, 5, 4, 5, 4], [6, 7, 6, 7, 6]]
    assert found.probabilities is not None
    assert torch.equal(found.probabilities, probs[:, [0, 1, 0, 1, 0]])
    assert repeated(Proposal(ids), 1).ids.tolist() == [[4], [6]]
