"""What the observer of a pass notes of steps, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from magicdec.kv.forward_counts import ForwardCounts
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput
from magicdec.runner.step_plan import PrefillChunk, StepPlan
from magicdec.systems.observer import PassObserver


def counting() -> Any:
    """A runner that only counts."""
    return SimpleNamespace(counts=ForwardCounts())


def test_steps_have_the_forwards_between_them() -> None:
    """A target and a draft. What comes before the begin is in no step, and the prefill of a step
    that joins others is in that step."""
    target = counting()
    draft = counting()
    runners = [target, draft]
    seen = list[int]()
    observer = PassObserver(
        is_timed=True, note_begin=lambda: seen.append(target.counts.num_forwards)
    )
    target.counts.num_forwards = 5
    observer.begin(runners)
    draft.counts.num_forwards = 7  # a preparation, after which the first step comes
    observer.begin(runners)
    assert seen == [5, 5]
    request = Request(9, (1,) * 6, SamplingParams(4))
    chunk = PrefillChunk(request, 1, 2, 6)
    observer.watch(StepPlan(decoding=Batch((request,))))
    draft.counts.num_forwards += 3
    target.counts.num_forwards += 1
    observer.observe([4, 2], StepOutput([[1, 2], [3]], 3, [1, 0], [3, 2]), 0.25)
    observer.watch(StepPlan(parts=(chunk,)))
    target.counts.num_forwards += 10  # of a step that decodes nothing
    observer.watch(StepPlan(parts=(chunk,), decoding=Batch((request,))))
    target.counts.num_forwards += 2
    observer.observe([4], StepOutput([[5]]), 0.5)
    observer.end()
    first, second = observer.steps
    assert (first.num_forwards, second.num_forwards) == (4, 2)
    assert (first.prompt_tokens, second.prompt_tokens) == (0, 4)
    assert (first.request_ids, first.num_emitted) == ((4, 2), [2, 1])
    assert (first.num_drafted, first.num_accepted, first.draft_width) == ([3, 2], [1, 0], 3)
    assert (second.num_drafted, second.num_accepted, second.digests) == (None, None, None)
    assert [reads.num_forwards for reads in observer.reads] == [3, 3]


def test_without_plans_all_is_read_in_decode_steps() -> None:
    """Nothing is prefilled meanwhile."""
    runner = counting()
    observer = PassObserver()
    observer.begin([runner])
    runner.counts.num_forwards += 4
    observer.observe([0], StepOutput([[1]]), 0.1)
    runner.counts.num_forwards += 2
    observer.end()
    assert [reads.num_forwards for reads in observer.reads] == [6]


def test_steps_that_wait_for_each_other_are_not_kept() -> None:
    """Those of stages, of which there may be many."""
    observer = PassObserver()
    observer.observe([4, 2], StepOutput([[1, 2], [3]], 3, [1, 0], [3, 2]), 0.25)
    assert observer.steps == [] and observer.verifications.num_drafted == 5


def test_a_row_without_drafts_has_no_verification() -> None:
    """Of two rows the first drafts 3 tokens, then none, and the second none, then 2."""
    observer = PassObserver()
    observer.observe([4, 2], StepOutput([[1, 2, 3], [1]], 3, [2, 0], [3, 0]), 0.1)
    observer.observe([4, 2], StepOutput([[1], [1, 2, 3]], 2, [0, 2], [0, 2]), 0.1)
    found = observer.verifications.by_request
    assert {request: [v.drafted for v in found[request]] for request in found} == {4: [3], 2: [2]}


def test_digests_of_all_ranks_take_the_place_of_those_of_one() -> None:
    """In its steps, and in the verifications of requests, which a row without drafts has none
    of."""
    observer = PassObserver(is_timed=True)
    mine = [("abcd", 3), ("0000", 0)]
    observer.observe([4, 2], StepOutput([[1], [1]], 1, [0, 0], [1, 0], digests=mine), 0.1)
    observer.observe([4, 2], StepOutput([[1], [1]]), 0.1)
    observer.use_digests([[("abff", 3), ("0000", 0)], None])
    assert [step.digests for step in observer.steps] == [[("abff", 3), ("0000", 0)], None]
    by_request = observer.verifications.by_request
    assert [request.digest for request in by_request[4]] == [("abff", 3)] and 2 not in by_request
    with pytest.raises(ValueError, match="zip"):
        observer.use_digests([None])
