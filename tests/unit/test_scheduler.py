"""Scheduler: which requests are in the batch, and where each request ends; and requests that join
and leave a running batch: who is admitted, prefilled and preempted in each step, on every rank."""

import copy
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HANG
from fake_clock import VirtualClock
from hypothesis import given
from hypothesis import strategies as st

from magicdec.engine.arrivals import Arrivals
from magicdec.engine.engine import Engine
from magicdec.engine.scheduler import Scheduler
from magicdec.runner.request import Batch, Request, RequestStatus, SamplingParams, StepOutput
from magicdec.runner.step_plan import BatchLimits, StepPlan

EOS = 99


def requests(*max_new_tokens: int, prompt_len: int = 3) -> list[Request]:
    prompt = tuple(range(prompt_len))
    return [
        Request(i, prompt, SamplingParams(n, (EOS, EOS + 1))) for i, n in enumerate(max_new_tokens)
    ]


def prefilled(*max_new_tokens: int, first: int = 1) -> tuple[Scheduler, list[Request]]:
    """A scheduler with all requests admitted at 0 s and their first tokens emitted at 1 s."""
    scheduler = Scheduler(len(max_new_tokens))
    new = requests(*max_new_tokens)
    scheduler.add(new, now=0.0)
    step(scheduler, *[[first]] * len(max_new_tokens), now=1.0)
    return scheduler, new


def batch_of(plan: StepPlan) -> Batch:
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
    assert {r.status for r in new} == {RequestStatus.WAITING} and new[0].row is None
    scheduler.add(new, now=7.0)
    plan = scheduler.schedule()
    assert [(r.row, r.status, r.arrived_s) for r in new] == [
        (0, RequestStatus.RUNNING, 7.0),
        (1, RequestStatus.RUNNING, 7.0),
    ]
    assert plan is not None and plan.decoding is None
    assert [(p.request, p.row, p.start, p.stop) for p in plan.parts] == [
        (new[0], 0, 0, 3),
        (new[1], 1, 0, 3),
    ]


def test_the_plan_of_a_static_batch_is_made_anew_only_when_a_request_leaves() -> None:
    scheduler, _ = prefilled(4, 3)
    first = scheduler.schedule()
    assert first is not None and first.decoding is not None and not first.parts
    step(scheduler, [5], [5])
    assert scheduler.schedule() is first
    step(scheduler, [5], [5])
    last = scheduler.schedule()
    assert last is not first and last is not None and batch_of(last).rows == (0,)


def test_each_row_ends_at_its_own_length() -> None:
    scheduler, new = prefilled(2, 4, 3)
    step(scheduler, [5], [5], [5], now=2.0)
    assert next_batch(scheduler).rows == (1, 2)
    step(scheduler, [6], [6], now=3.0)
    step(scheduler, [7], now=4.0)
    assert scheduler.schedule() is None
    assert outputs(new) == [[1, 5], [1, 5, 6, 7], [1, 5, 6]]
    assert [r.finished_s for r in new] == [2.0, 4.0, 3.0]
    assert {r.status for r in new} == {RequestStatus.FINISHED}


@pytest.mark.parametrize("end", [EOS, EOS + 1])
def test_each_row_ends_at_any_of_its_end_tokens(end: int) -> None:
    scheduler, new = prefilled(9, 9)
    step(scheduler, [end], [5])
    assert next_batch(scheduler).rows == (1,)
    step(scheduler, [5, 6])
    assert outputs(new) == [[1, end], [1, 5, 5, 6]]


def test_tokens_after_the_end_are_dropped() -> None:
    """From the output of the step too, of which its tokens are counted."""
    scheduler, new = prefilled(9, 4, 9)
    output = StepOutput([[5, EOS, 6, 7], [5, 6, 7, 8], [EOS, EOS]], 3, [3, 3, 1])
    found = scheduler.commit(next_batch(scheduler), output, now=2.0)
    assert found == replace(output, token_ids=[[5, EOS], [5, 6, 7], [EOS]], contexts=[4, 4, 4])
    assert outputs(new) == [[1, 5, EOS], [1, 5, 6, 7], [1, EOS]]
    assert [len(request.token_times_s) for request in new] == [3, 4, 2]
    assert scheduler.schedule() is None


def test_without_end_tokens_only_the_length_ends_a_request() -> None:
    scheduler = Scheduler(1)
    request = Request(0, (1,), SamplingParams(3))
    scheduler.add([request], now=0.0)
    step(scheduler, [EOS])
    step(scheduler, [EOS, EOS, EOS])
    assert request.output_ids == [EOS] * 3


def test_times_of_tokens_are_those_of_the_step_or_of_each_prefill() -> None:
    scheduler = Scheduler(2)
    new = requests(5, 1)
    scheduler.add(new, now=0.0)
    batch = next_batch(scheduler)
    scheduler.commit(batch, StepOutput([[1], [2]], emitted_s=[0.5, 0.9]), now=1.0)
    assert [r.first_token_s for r in new] == [0.5, 0.9]
    assert [r.finished_s for r in new] == [None, 0.9]
    step(scheduler, [3, 4], now=2.0)
    assert new[0].first_token_s == 0.5


def test_the_newest_token_is_not_cached() -> None:
    scheduler = Scheduler(1)
    (request,) = requests(9, prompt_len=4)
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
        assert [r.status for r in again] == [RequestStatus.RUNNING, RequestStatus.FINISHED]
        assert next_batch(scheduler).rows == (0,)
        step(scheduler, [5, 6])
        assert scheduler.schedule() is None
    assert [r.output_ids for r in snapshots] == [[1], [1]]
    assert snapshots[0].finished_s is None and snapshots[0].status is RequestStatus.RUNNING


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
    new = requests(*(n for n, _ in streams))
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
    code = "import sys, magicdec.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG).returncode == 0


def make(request_id: int, prompt: int = 4, new: int = 9, arrived: float = 0.0) -> Request:
    request = Request(request_id, (1,) * prompt, SamplingParams(new))
    request.arrived_s = arrived
    return request


def emit(scheduler: Scheduler, plan: StepPlan) -> None:
    """One token for each request that decodes, and the first token of each complete prompt."""
    for requests in (
        () if plan.decoding is None else plan.decoding.requests,
        [part.request for part in plan.parts if part.is_last],
    ):
        tokens = [[] if r in new_again(plan) else [5] for r in requests]
        scheduler.commit(Batch(tuple(requests)), StepOutput(tokens), now=0.0)


def new_again(plan: StepPlan) -> list[Request]:
    """Requests whose text is prefilled after a preemption; their newest token is known."""
    return [part.request for part in plan.parts if part.request.output_ids]


def run_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    emit(scheduler, plan)
    return plan


def test_a_request_that_can_never_be_served_is_refused_with_the_numbers() -> None:
    row = Scheduler(2, BatchLimits(max_tokens=100, step_tokens=4))
    with pytest.raises(ValueError, match=r"request 7 needs 105 tokens .* a row holds at most 100"):
        row.add([make(7, prompt=90, new=13)], 0.0)
    row.add([make(7, prompt=90, new=8)], 0.0)
    pool = Scheduler(2, BatchLimits(block_size=16, num_blocks=2, step_tokens=1))
    with pytest.raises(ValueError, match=r"needs 33 tokens .* the cache holds 2 blocks of 16"):
        pool.add([make(0, prompt=30, new=4)], 0.0)
    pool.add([make(0, prompt=30, new=3)], 0.0)


def test_a_request_joins_at_the_next_step_and_its_row_is_used_again() -> None:
    scheduler = Scheduler(2)
    first = make(0, new=3)
    second = make(1, new=9)
    third = make(2)
    scheduler.add([first], 0.0)
    assert run_step(scheduler).decoding is None
    scheduler.add([second, third], 1.0)
    plan = run_step(scheduler)
    assert plan.admitted == ((second, 1),) and plan.decoding == Batch((first,))
    assert [part.request for part in plan.parts] == [second]
    assert run_step(scheduler).decoding == Batch((first, second))
    assert first.status is RequestStatus.FINISHED and third.status is RequestStatus.WAITING
    plan = run_step(scheduler)
    assert plan.admitted == ((third, 0),) and plan.decoding == Batch((second,))


@pytest.mark.parametrize(
    "limits", [BatchLimits(), BatchLimits(block_size=8, num_blocks=9)], ids=repr
)
def test_a_request_that_joins_decodes_in_the_next_step(limits: BatchLimits) -> None:
    """Also where the same plan was repeated before it came."""
    scheduler = Scheduler(2, limits)
    first = make(0, new=20)
    second = make(1, new=20)
    scheduler.add([first], 0.0)
    plans = [run_step(scheduler) for _ in range(4)]
    assert plans[1] is plans[3]
    scheduler.add([second], 1.0)
    joined = run_step(scheduler)
    assert joined.admitted == ((second, 1),) and joined.decoding == Batch((first,))
    assert run_step(scheduler).decoding == Batch((first, second))


def test_a_step_prefills_as_many_tokens_as_it_may() -> None:
    scheduler = Scheduler(3, BatchLimits(prefill_tokens=5))
    requests = [make(0, prompt=7), make(1, prompt=2), make(2, prompt=6)]
    scheduler.add(requests, 0.0)
    steps = [
        [(part.row, part.start, part.stop) for part in run_step(scheduler).parts] for _ in range(4)
    ]
    assert steps == [[(0, 0, 5)], [(0, 5, 7), (1, 0, 2), (2, 0, 1)], [(2, 1, 6)], []]
    assert [len(r.output_ids) for r in requests] == [3, 3, 2]


def test_first_come_first_served() -> None:
    scheduler = Scheduler(1)
    admitted = list[int]()
    for number, arrived_s in ((0, 3.0), (1, 1.0), (2, 0.0), (3, 1.0)):
        scheduler.add([make(number, new=5 - number)], arrived_s)
    while (plan := scheduler.schedule()) is not None:
        admitted += [request.request_id for request, _ in plan.admitted]
        emit(scheduler, plan)
    assert admitted == [2, 1, 3, 0]


def test_the_youngest_request_is_preempted_and_continues_later() -> None:
    scheduler = Scheduler(3, BatchLimits(block_size=4, num_blocks=5))
    old = make(0, prompt=7, new=8)
    young = make(1, prompt=3, new=9)
    scheduler.add([young], 1.0)
    scheduler.add([old], 0.5)
    plans = [run_step(scheduler) for _ in range(8)]
    assert plans[0].reserved == ((0, 8), (1, 4)), "the text and a step"
    assert plans[1].reserved == (), "there is room for this step"
    preempted = next(plan for plan in plans if plan.preempted)
    assert preempted.preempted == ((young, 1),) and preempted.decoding == Batch((old,))
    assert young.status is RequestStatus.WAITING and 0 < len(young.output_ids) < 9
    while (plan := scheduler.schedule()) is not None:
        emit(scheduler, plan)
    assert [len(r.output_ids) for r in (old, young)] == [8, 9]


def test_a_cancelled_request_frees_its_row_in_the_next_step() -> None:
    scheduler = Scheduler(1, BatchLimits(block_size=4, num_blocks=4))
    first = make(0)
    second = make(1)
    third = make(2)
    scheduler.add([first, second, third], 0.0)
    run_step(scheduler)
    scheduler.cancel(first)
    scheduler.cancel(second)
    plan = run_step(scheduler)
    assert plan.cancelled == ((first, 0),) and plan.admitted == ((third, 0),)
    assert {first.status, second.status} == {RequestStatus.CANCELLED}


requests_drawn = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=8
)


@given(
    drawn=requests_drawn,
    num_rows=st.integers(1, 4),
    spare=st.integers(0, 4),
    step_tokens=st.integers(1, 4),
    budget=st.sampled_from([None, 1, 5]),
)
def test_every_request_ends_and_no_block_is_given_twice(
    drawn: list[tuple[int, int, int]],
    num_rows: int,
    spare: int,
    step_tokens: int,
    budget: int | None,
) -> None:
    """Also: another rank, which is given the same requests, has the same state before each step."""
    needed = max(prompt + max(new, 2) - 2 + step_tokens for prompt, new, _ in drawn)
    limits = BatchLimits(
        block_size=4,
        num_blocks=-(-needed // 4) + spare,
        step_tokens=step_tokens,
        prefill_tokens=budget,
    )
    ranks = [Scheduler(num_rows, limits) for _ in range(2)]
    for scheduler in ranks:
        for number, (prompt, new, arrived) in enumerate(drawn):
            scheduler.add([make(number, prompt, new, arrived)], arrived)
    requests = list(ranks[0].waiting)
    for _ in range(2000):
        assert ranks[0].digest() == ranks[1].digest()
        plan, other = (scheduler.schedule() for scheduler in ranks)
        if plan is None or other is None:
            break
        emit(ranks[0], plan)
        emit(ranks[1], other)
        held = ranks[0].blocks.held
        assert sum(held) <= (limits.num_blocks or 0)
        for row, request in enumerate(ranks[0].rows):
            assert request is not None or held[row] == 0
    assert plan is None and other is None and sum(ranks[0].blocks.held) == 0
    for request in requests:
        assert request.output_ids == [5] * drawn[request.request_id][1]


def test_ranks_that_disagree_stop() -> None:
    """The first rank says how many requests have arrived, whatever the clock of another shows."""
    sent: list[torch.Tensor] = []

    def engine(index: int, now: float) -> Engine:
        group = SimpleNamespace(size=2, index=index, broadcast=lambda x, source: sent[-1])
        if index == 0:
            group.broadcast = lambda x, source: sent.append(x) or x
        caches = SimpleNamespace(prefixes=None)
        place = {"device": torch.device("cpu"), "group": group, "caches": caches}
        runner: Any = SimpleNamespace(num_rows=2, **place)
        return Engine(runner, 64, BatchLimits(), clock=VirtualClock(now))

    first = engine(0, 1.0)
    second = engine(1, 9.0)
    requests = [[make(number, arrived=arrived) for number, arrived in enumerate((0.0, 5.0))]] * 2
    arrivals = [Arrivals(copy.deepcopy(rank_requests)) for rank_requests in requests]
    for scheduler, its in zip((first, second), arrivals, strict=True):
        plan = scheduler._next(its)
        assert plan is not None and len(plan.admitted) == len(its) == 1
        emit(scheduler.scheduler, plan)
    second.scheduler.running[0].output_ids[-1] += 1
    assert first._next(arrivals[0]) is not None
    with pytest.raises(RuntimeError, match="the ranks disagree about the running batch"):
        second._next(arrivals[1])


def test_a_step_costs_nothing_for_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is put in order only when it begins to wait."""
    asked = list[Request]()
    wait = Scheduler._wait

    def noted(scheduler: Scheduler, request: Request) -> None:
        asked.append(request)
        wait(scheduler, request)

    monkeypatch.setattr(Scheduler, "_wait", noted)
    scheduler = Scheduler(2)
    requests = [make(i, new=3) for i in range(500)]
    scheduler.add(requests, 0.0)
    assert scheduler.waiting == requests
    num_asked = len(asked)
    cancelled = requests[10::2]
    for request in cancelled:
        scheduler.cancel(request)
    num_steps = 0
    while scheduler.waiting:
        run_step(scheduler)
        num_steps += 1
    num_waves = -(-(500 - len(cancelled)) // 2)
    assert len(asked) == num_asked and num_steps == 3 * (num_waves - 1) + 1
    assert not set(cancelled) & set(scheduler.running)


def test_a_row_that_needs_no_block_does_not_change_the_plan() -> None:
    """With limited blocks too, and while others wait for a row."""
    scheduler = Scheduler(1, BatchLimits(block_size=8, num_blocks=4))
    scheduler.add([make(0, prompt=4, new=20), make(1)], 0.0)
    plans = [run_step(scheduler) for _ in range(8)]
    assert [plan.reserved for plan in plans[1:]] == [()] * 4 + [((0, 9),)] + [()] * 2
    assert plans[1] is plans[4] and plans[6] is plans[7] and plans[6] is not plans[1]
