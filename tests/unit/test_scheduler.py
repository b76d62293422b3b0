"""Scheduler: which requests are in the batch, and where each request ends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import HANG
from hypothesis import given
from hypothesis import strategies as st

from magicdec.request import Batch, Request, SamplingParams, Status, StepOutput
from magicdec.scheduling.plan import Plan
from magicdec.scheduling.scheduler import Scheduler

EOS = 99


def requests(*max_new_tokens: int, prompt_len: int = 3) -> list[Request]:
    prompt = tuple(range(prompt_len))
    return [
        Request(i, prompt, SamplingParams(n, (EOS, EOS + 1))) for i, n in enumerate(max_new_tokens)
    ]


def prefilled(*max_new_tokens: int, first: int = 1) -> tuple[Scheduler, list[Request]]:
    """A scheduler with all requests admitted at 0 s and their first tokens emitted at 1 s."""
    scheduler, new = Scheduler(len(max_new_tokens)), requests(*max_new_tokens)
    scheduler.add(new, now=0.0)
    step(scheduler, *[[first]] * len(max_new_tokens), now=1.0)
    return scheduler, new


def batch_of(plan: Plan) -> Batch:
    """The requests that emit tokens in a step, which decodes or prefills whole prompts."""
    assert plan.decoding is None or not plan.parts
    return plan.decoding or Batch(tuple(part.request for part in plan.parts))


def next_batch(scheduler: Scheduler) -> Batch:
    plan = scheduler.schedule()
    assert plan is not None
    return batch_of(plan)


def step(scheduler: Scheduler, *tokens: list[int], now: float = 2.0) -> None:
    scheduler.commit(next_batch(scheduler), StepOutput(list(tokens)), now)


def outputs(all_requests: list[Request]) -> list[list[int]]:
    return [r.output_ids for r in all_requests]


def test_admission_gives_each_request_a_row() -> None:
    scheduler = Scheduler(3)
    assert scheduler.schedule() is None
    new = requests(5, 5)
    assert {r.status for r in new} == {Status.WAITING} and new[0].row is None
    scheduler.add(new, now=7.0)
    plan = scheduler.schedule()
    assert [(r.row, r.status, r.arrived_s) for r in new] == [
        (0, Status.RUNNING, 7.0),
        (1, Status.RUNNING, 7.0),
    ]
    assert plan is not None and plan.decoding is None
    assert [(p.request, p.row, p.start, p.stop) for p in plan.parts] == [
        (new[0], 0, 0, 3),
        (new[1], 1, 0, 3),
    ]


def test_requests_without_a_row_wait_until_one_is_free() -> None:
    scheduler, new = Scheduler(1), requests(2, 3)
    scheduler.add(new, now=0.0)
    step(scheduler, [1])
    assert next_batch(scheduler).requests == (new[0],) and new[1].status is Status.WAITING
    scheduler.commit(Batch((new[0],)), StepOutput([[4]]), now=2.0)
    assert next_batch(scheduler).requests == (new[1],) and new[1].row == 0


def test_prefill_comes_before_decoding() -> None:
    scheduler = Scheduler(2)
    scheduler.add(requests(5, 5), now=0.0)
    plan = scheduler.schedule()
    assert plan is not None and plan.decoding is None and len(plan.parts) == 2
    scheduler.commit(batch_of(plan), StepOutput([[1], [1]]), now=1.0)
    plan = scheduler.schedule()
    assert plan is not None and plan.decoding is not None and not plan.parts
    assert plan.decoding.rows == [0, 1]


def test_the_plan_of_a_static_batch_is_made_anew_only_when_a_request_leaves() -> None:
    scheduler, _ = prefilled(4, 3)
    first = scheduler.schedule()
    step(scheduler, [5], [5])
    assert scheduler.schedule() is first
    step(scheduler, [5], [5])
    last = scheduler.schedule()
    assert last is not first and last is not None and batch_of(last).rows == [0]


def test_each_row_ends_at_its_own_length() -> None:
    scheduler, new = prefilled(2, 4, 3)
    step(scheduler, [5], [5], [5], now=2.0)
    assert next_batch(scheduler).rows == [1, 2]
    step(scheduler, [6], [6], now=3.0)
    step(scheduler, [7], now=4.0)
    assert scheduler.schedule() is None
    assert outputs(new) == [[1, 5], [1, 5, 6, 7], [1, 5, 6]]
    assert [r.finished_s for r in new] == [2.0, 4.0, 3.0]
    assert {r.status for r in new} == {Status.FINISHED}


@pytest.mark.parametrize("end", [EOS, EOS + 1])
def test_each_row_ends_at_any_of_its_end_tokens(end: int) -> None:
    scheduler, new = prefilled(9, 9)
    step(scheduler, [end], [5])
    assert next_batch(scheduler).rows == [1]
    step(scheduler, [5, 6])
    assert outputs(new) == [[1, end], [1, 5, 5, 6]]


def test_tokens_after_the_end_are_dropped() -> None:
    """From the output of the step too, of which its tokens are counted."""
    scheduler, new = prefilled(9, 4, 9)
    output = StepOutput([[5, EOS, 6, 7], [5, 6, 7, 8], [EOS, EOS]], 3, [3, 3, 1])
    found = scheduler.commit(next_batch(scheduler), output, now=2.0)
    assert found == replace(output, token_ids=[[5, EOS], [5, 6, 7], [EOS]])
    assert outputs(new) == [[1, 5, EOS], [1, 5, 6, 7], [1, EOS]]
    assert [len(request.token_times_s) for request in new] == [3, 4, 2]
    assert scheduler.schedule() is None


def test_a_request_may_end_with_its_first_token() -> None:
    scheduler, _ = prefilled(1, 5)
    assert next_batch(scheduler).rows == [1]
    assert prefilled(5, first=EOS)[0].schedule() is None


def test_without_end_tokens_only_the_length_ends_a_request() -> None:
    scheduler, request = Scheduler(1), Request(0, (1,), SamplingParams(3))
    scheduler.add([request], now=0.0)
    step(scheduler, [EOS])
    step(scheduler, [EOS, EOS, EOS])
    assert request.output_ids == [EOS] * 3


def test_times_of_tokens_are_those_of_the_step_or_of_each_prefill() -> None:
    scheduler, new = Scheduler(2), requests(5, 1)
    scheduler.add(new, now=0.0)
    batch = next_batch(scheduler)
    scheduler.commit(batch, StepOutput([[1], [2]], emitted_s=[0.5, 0.9]), now=1.0)
    assert [r.first_token_s for r in new] == [0.5, 0.9]
    assert [r.finished_s for r in new] == [None, 0.9]
    step(scheduler, [3, 4], now=2.0)
    assert new[0].first_token_s == 0.5


def test_a_step_must_return_tokens_for_every_request() -> None:
    with pytest.raises(ValueError, match="zip"):
        step(prefilled(5, 5)[0], [1])


def test_the_newest_token_is_not_cached() -> None:
    scheduler, (request,) = Scheduler(1), requests(9, prompt_len=4)
    scheduler.add([request], now=0.0)
    assert request.num_cached == 4 and request.cached_ids == (0, 1, 2, 3)
    step(scheduler, [7])
    assert (request.num_cached, request.last_token) == (4, 7)
    step(scheduler, [8, 9])
    assert (request.num_cached, request.last_token) == (6, 9)
    assert request.cached_ids == (0, 1, 2, 3, 7, 8)


def test_rewind_can_be_repeated() -> None:
    """Two passes follow one prefill. The second pass starts from the same state as the first, and
    the snapshots stay as they were."""
    scheduler, new = prefilled(3, 1)
    snapshots = [r.snapshot() for r in new]
    for _ in range(2):
        again = [r.snapshot() for r in snapshots]
        scheduler.rewind(again)
        assert outputs(again) == [[1], [1]]
        assert [r.status for r in again] == [Status.RUNNING, Status.FINISHED]
        assert next_batch(scheduler).rows == [0]
        step(scheduler, [5, 6])
        assert scheduler.schedule() is None
    assert [r.output_ids for r in snapshots] == [[1], [1]]
    assert snapshots[0].finished_s is None and snapshots[0].status is Status.RUNNING


@given(
    streams=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(90, EOS), min_size=12, max_size=12)),
        min_size=1,
        max_size=4,
    ),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_outputs_do_not_depend_on_the_tokens_per_step(
    streams: list[tuple[int, list[int]]], sizes: list[int]
) -> None:
    """Speculation emits several tokens of a row in one step. The row ends at the same token."""
    scheduler, new = Scheduler(len(streams)), requests(*(n for n, _ in streams))
    scheduler.add(new, now=0.0)
    num_steps = 0
    while (plan := scheduler.schedule()) is not None:
        batch = batch_of(plan)
        size = sizes[num_steps % len(sizes)]
        tokens = []
        for request in batch.requests:
            done = len(request.output_ids)
            tokens.append(streams[request.request_id][1][done : done + size])
        scheduler.commit(batch, StepOutput(tokens), now=1.0)
        num_steps += 1
    for request, (most, stream) in zip(new, streams, strict=True):
        ends = stream.index(EOS) + 1 if EOS in stream else len(stream)
        assert request.output_ids == stream[: min(ends, most)]


def test_the_scheduler_imports_no_torch() -> None:
    code = "import sys, magicdec.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG).returncode == 0
