"""Scheduler: which requests are in the batch, and where each request ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import HANG
from hypothesis import given
from hypothesis import strategies as st

from magicdec.request import Request, SamplingParams, Status, StepOutput
from magicdec.scheduler import Scheduler

EOS = 99


def requests(*max_new_tokens: int, prompt_len: int = 3) -> list[Request]:
    prompt = tuple(range(prompt_len))
    return [
        Request(i, prompt, SamplingParams(n, (EOS, EOS + 1))) for i, n in enumerate(max_new_tokens)
    ]


def prefilled(*max_new_tokens: int, first: int = 1) -> Scheduler:
    """A scheduler with all requests admitted at 0 s and their first tokens emitted at 1 s."""
    scheduler = Scheduler(len(max_new_tokens))
    scheduler.add(requests(*max_new_tokens), now=0.0)
    step(scheduler, *[[first]] * len(max_new_tokens), now=1.0)
    return scheduler


def step(scheduler: Scheduler, *tokens: list[int], now: float = 2.0) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, StepOutput(list(tokens)), now)


def outputs(scheduler: Scheduler) -> list[list[int]]:
    return [r.output_ids for r in scheduler.requests]


def test_admission_gives_each_request_a_row() -> None:
    scheduler = Scheduler(3)
    assert scheduler.schedule() is None
    new = requests(5, 5)
    assert {r.status for r in new} == {Status.WAITING} and new[0].row is None
    scheduler.add(new, now=7.0)
    assert [(r.row, r.status, r.arrived_s) for r in new] == [
        (0, Status.RUNNING, 7.0),
        (1, Status.RUNNING, 7.0),
    ]
    batch = scheduler.schedule()
    assert batch is not None and batch.rows == [0, 1] and batch.requests == tuple(new)


def test_requests_are_admitted_only_to_free_rows_and_when_none_runs() -> None:
    with pytest.raises(AssertionError):
        Scheduler(1).add(requests(5, 5), now=0.0)
    scheduler = prefilled(2, 3)
    with pytest.raises(AssertionError):
        scheduler.add(requests(5), now=0.0)
    step(scheduler, [4], [4])
    step(scheduler, [4])
    scheduler.add(requests(5), now=0.0)
    assert outputs(scheduler) == [[]]


def test_prefill_comes_before_decoding() -> None:
    scheduler = Scheduler(2)
    scheduler.add(requests(5, 5), now=0.0)
    batch = scheduler.schedule()
    assert batch is not None and batch.is_prefill and len(batch.requests) == 2
    first = type(batch)(batch.requests[:1], is_prefill=True)
    scheduler.commit(first, StepOutput([[1]]), now=1.0)
    batch = scheduler.schedule()
    assert batch is not None and batch.is_prefill and batch.rows == [1]
    scheduler.commit(batch, StepOutput([[1]]), now=1.0)
    batch = scheduler.schedule()
    assert batch is not None and not batch.is_prefill and batch.rows == [0, 1]


def test_each_row_ends_at_its_own_length() -> None:
    scheduler = prefilled(2, 4, 3)
    step(scheduler, [5], [5], [5], now=2.0)
    batch = scheduler.schedule()
    assert batch is not None and batch.rows == [1, 2]
    step(scheduler, [6], [6], now=3.0)
    step(scheduler, [7], now=4.0)
    assert scheduler.schedule() is None
    assert outputs(scheduler) == [[1, 5], [1, 5, 6, 7], [1, 5, 6]]
    assert [r.finished_s for r in scheduler.requests] == [2.0, 4.0, 3.0]
    assert {r.status for r in scheduler.requests} == {Status.FINISHED}


@pytest.mark.parametrize("end", [EOS, EOS + 1])
def test_each_row_ends_at_any_of_its_end_tokens(end: int) -> None:
    scheduler = prefilled(9, 9)
    step(scheduler, [end], [5])
    batch = scheduler.schedule()
    assert batch is not None and batch.rows == [1]
    step(scheduler, [5, 6])
    assert outputs(scheduler) == [[1, end], [1, 5, 5, 6]]


def test_tokens_after_the_end_are_dropped() -> None:
    scheduler = prefilled(9, 4, 9)
    step(scheduler, [5, EOS, 6, 7], [5, 6, 7, 8], [EOS, EOS])
    assert outputs(scheduler) == [[1, 5, EOS], [1, 5, 6, 7], [1, EOS]]
    assert scheduler.schedule() is None


def test_a_request_may_end_with_its_first_token() -> None:
    scheduler = prefilled(1, 5)
    batch = scheduler.schedule()
    assert batch is not None and batch.rows == [1]
    assert prefilled(5, first=EOS).schedule() is None


def test_without_end_tokens_only_the_length_ends_a_request() -> None:
    scheduler = Scheduler(1)
    scheduler.add([Request(0, (1,), SamplingParams(3))], now=0.0)
    step(scheduler, [EOS])
    step(scheduler, [EOS, EOS, EOS])
    assert outputs(scheduler) == [[EOS] * 3]


def test_times_of_tokens_are_those_of_the_step_or_of_each_prefill() -> None:
    scheduler = Scheduler(2)
    scheduler.add(requests(5, 1), now=0.0)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, StepOutput([[1], [2]], emitted_s=[0.5, 0.9]), now=1.0)
    assert [r.first_token_s for r in scheduler.requests] == [0.5, 0.9]
    assert [r.finished_s for r in scheduler.requests] == [None, 0.9]
    step(scheduler, [3, 4], now=2.0)
    assert scheduler.requests[0].first_token_s == 0.5


def test_a_step_must_return_tokens_for_every_request() -> None:
    with pytest.raises(ValueError, match="zip"):
        step(prefilled(5, 5), [1])


def test_the_newest_token_is_not_cached() -> None:
    scheduler = Scheduler(1)
    scheduler.add(requests(9, prompt_len=4), now=0.0)
    request = scheduler.requests[0]
    assert request.num_cached == 4
    step(scheduler, [7])
    assert (request.num_cached, request.last_token) == (4, 7)
    step(scheduler, [8, 9])
    assert (request.num_cached, request.last_token) == (6, 9)


def test_rewind_can_be_repeated() -> None:
    """Two passes follow one prefill. The second pass starts from the same state as the first, and
    the snapshots stay as they were."""
    scheduler = prefilled(3, 1)
    snapshots = [r.snapshot() for r in scheduler.requests]
    for _ in range(2):
        scheduler.rewind(snapshots)
        assert outputs(scheduler) == [[1], [1]]
        assert [r.status for r in scheduler.requests] == [Status.RUNNING, Status.FINISHED]
        batch = scheduler.schedule()
        assert batch is not None and not batch.is_prefill and batch.rows == [0]
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
    scheduler = Scheduler(len(streams))
    scheduler.add(requests(*(n for n, _ in streams)), now=0.0)
    num_steps = 0
    while (batch := scheduler.schedule()) is not None:
        size = sizes[num_steps % len(sizes)]
        tokens = []
        for request in batch.requests:
            done = len(request.output_ids)
            tokens.append(streams[request.request_id][1][done : done + size])
        scheduler.commit(batch, StepOutput(tokens), now=1.0)
        num_steps += 1
    for request, (most, stream) in zip(scheduler.requests, streams, strict=True):
        ends = stream.index(EOS) + 1 if EOS in stream else len(stream)
        assert request.output_ids == stream[: min(ends, most)]


def test_the_scheduler_imports_no_torch() -> None:
    code = "import sys, magicdec.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG).returncode == 0
