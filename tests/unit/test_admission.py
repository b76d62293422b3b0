"""Requests that join and leave a running batch: who is admitted, prefilled and preempted in each
step, and the plan that is sent to other ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.names import ADMISSION_ORDERS, load_named
from magicdec.request import Batch, Request, SamplingParams, Status, StepOutput
from magicdec.scheduling.plan import Limits, Plan
from magicdec.scheduling.scheduler import Scheduler


def make(
    request_id: int, prompt: int = 4, new: int = 9, arrived: float = 0.0, priority: int = 0
) -> Request:
    request = Request(request_id, (1,) * prompt, SamplingParams(new), priority=priority)
    request.arrived_s = arrived
    return request


def emit(scheduler: Scheduler, plan: Plan) -> None:
    """One token for each request that decodes, and the first token of each complete prompt."""
    for requests in (
        () if plan.decoding is None else plan.decoding.requests,
        [part.request for part in plan.parts if part.is_last],
    ):
        tokens = [[] if r in new_again(plan) else [5] for r in requests]
        scheduler.commit(Batch(tuple(requests)), StepOutput(tokens), now=0.0)


def new_again(plan: Plan) -> list[Request]:
    """Requests whose text is prefilled after a preemption; their newest token is known."""
    return [part.request for part in plan.parts if part.request.output_ids]


def run_step(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    emit(scheduler, plan)
    return plan


def test_a_request_that_can_never_be_served_is_refused_with_the_numbers() -> None:
    row = Scheduler(2, Limits(max_tokens=100, step_tokens=4))
    with pytest.raises(ValueError, match=r"request 7 needs 105 tokens .* a row holds at most 100"):
        row.add([make(7, prompt=90, new=13)], 0.0)
    row.add([make(7, prompt=90, new=8)], 0.0)
    pool = Scheduler(2, Limits(block_size=16, num_blocks=2, step_tokens=1))
    with pytest.raises(ValueError, match=r"needs 33 tokens .* the cache holds 2 blocks of 16"):
        pool.add([make(0, prompt=30, new=4)], 0.0)
    pool.add([make(0, prompt=30, new=3)], 0.0)


def test_only_so_many_requests_may_wait() -> None:
    scheduler = Scheduler(1, Limits(max_waiting=2))
    scheduler.add([make(0), make(1)], 0.0)
    assert not scheduler.has_room
    with pytest.raises(ValueError, match=r"2 requests are waiting .* at most 2 may wait"):
        scheduler.add([make(2)], 0.0)
    run_step(scheduler)
    assert scheduler.has_room


def test_a_request_joins_at_the_next_step_and_its_row_is_used_again() -> None:
    scheduler = Scheduler(2)
    first, second, third = make(0, new=3), make(1, new=9), make(2)
    scheduler.add([first], 0.0)
    assert run_step(scheduler).decoding is None
    scheduler.add([second, third], 1.0)
    plan = run_step(scheduler)
    assert plan.admitted == ((second, 1),) and plan.decoding == Batch((first,))
    assert [part.request for part in plan.parts] == [second]
    assert run_step(scheduler).decoding == Batch((first, second))
    assert first.status is Status.FINISHED and third.status is Status.WAITING
    plan = run_step(scheduler)
    assert plan.admitted == ((third, 0),) and plan.decoding == Batch((second,))


def test_a_step_prefills_as_many_tokens_as_it_may() -> None:
    scheduler = Scheduler(3, Limits(prefill_tokens=5))
    requests = [make(0, prompt=7), make(1, prompt=2), make(2, prompt=6)]
    scheduler.add(requests, 0.0)
    steps = [
        [(part.row, part.start, part.stop) for part in run_step(scheduler).parts] for _ in range(4)
    ]
    assert steps == [[(0, 0, 5)], [(0, 5, 7), (1, 0, 2), (2, 0, 1)], [(2, 1, 6)], []]
    assert [len(r.output_ids) for r in requests] == [3, 3, 2]


@pytest.mark.parametrize(
    ("order", "admitted"),
    [("fcfs", [2, 1, 3, 0]), ("shortest_remaining", [3, 1, 0, 2]), ("priority", [0, 2, 1, 3])],
)
def test_the_order_of_admission(order: str, admitted: list[int]) -> None:
    """At 10 s: request 0 has priority 9 and has waited for 7 s."""
    scheduler = Scheduler(1, order=load_named(ADMISSION_ORDERS, order))
    for request in (
        make(0, new=5, priority=9), make(1, new=4), make(2, new=6), make(3, new=3),
    ):  # fmt: skip
        scheduler.add([request], {0: 3.0, 1: 1.0, 2: 0.0, 3: 2.0}[request.request_id])
    found = []
    while (plan := scheduler.schedule()) is not None:
        found += [request.request_id for request, _ in plan.admitted]
        emit(scheduler, plan)
    assert found == admitted


def test_waiting_raises_the_priority() -> None:
    priority = load_named(ADMISSION_ORDERS, "priority")
    old, urgent = make(0, arrived=0.0), make(1, arrived=9.0, priority=5)
    assert priority(urgent) > priority(old), "9 s count more than 5 levels"
    assert priority(replace(urgent, arrived_s=1.0)) < priority(old)


def test_the_youngest_request_is_preempted_and_continues_later() -> None:
    scheduler = Scheduler(3, Limits(block_size=4, num_blocks=5))
    old, young = make(0, prompt=7, new=8), make(1, prompt=3, new=9)
    scheduler.add([young], 1.0)
    scheduler.add([old], 0.5)
    plans = [run_step(scheduler) for _ in range(8)]
    assert plans[0].reserved == ((0, 8), (1, 4)), "the text and a step"
    assert plans[1].reserved == (), "there is room for this step"
    preempted = next(plan for plan in plans if plan.preempted)
    assert preempted.preempted == ((young, 1),) and preempted.decoding == Batch((old,))
    assert young.status is Status.WAITING and 0 < len(young.output_ids) < 9
    while (plan := scheduler.schedule()) is not None:
        emit(scheduler, plan)
    assert [len(r.output_ids) for r in (old, young)] == [8, 9]


def test_a_cancelled_request_frees_its_row_in_the_next_step() -> None:
    scheduler = Scheduler(1, Limits(block_size=4, num_blocks=4))
    first, second, third = make(0), make(1), make(2)
    scheduler.add([first, second, third], 0.0)
    run_step(scheduler)
    scheduler.cancel(first)
    scheduler.cancel(second)
    plan = run_step(scheduler)
    assert plan.cancelled == ((first, 0),) and plan.admitted == ((third, 0),)
    assert {first.status, second.status} == {Status.CANCELLED}


requests_drawn = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=8
)


@given(
    drawn=requests_drawn,
    num_rows=st.integers(1, 4),
    spare=st.integers(0, 4),
    step_tokens=st.integers(1, 4),
    budget=st.sampled_from([None, 1, 5]),
    order=st.sampled_from(sorted(ADMISSION_ORDERS)),
)
def test_every_request_ends_and_no_block_is_given_twice(
    drawn: list[tuple[int, int, int]],
    num_rows: int,
    spare: int,
    step_tokens: int,
    budget: int | None,
    order: str,
) -> None:
    """Also: another rank that gets the plans as numbers has the same state after each step."""
    size = 4
    needed = max(prompt + max(new, 2) - 2 + step_tokens for prompt, new, _ in drawn)
    limits = Limits(
        block_size=size, num_blocks=-(-needed // size) + spare, step_tokens=step_tokens,
        prefill_tokens=budget,
    )  # fmt: skip
    function = load_named(ADMISSION_ORDERS, order)
    leader, follower = (Scheduler(num_rows, limits, function) for _ in range(2))
    ours, theirs = (
        [make(i, prompt, new, arrived) for i, (prompt, new, arrived) in enumerate(drawn)]
        for _ in range(2)
    )
    follower.waiting.add(theirs)
    for request in ours:
        leader.add([request], request.arrived_s)
    for _ in range(2000):
        digest = leader.digest()
        plan = leader.schedule()
        if plan is None:
            break
        numbers = plan.to_numbers(num_rows, digest)
        received = Plan.from_numbers(numbers, follower.digest(), theirs.__getitem__, follower.rows)
        follower.apply(received)
        assert received.to_numbers(num_rows, digest) == numbers
        emit(follower, received)
        emit(leader, plan)
        held = leader.blocks.held
        assert sum(held) <= (limits.num_blocks or 0)
        for row, request in enumerate(leader.rows):
            assert request is not None or held[row] == 0
    assert leader.schedule() is None and sum(leader.blocks.held) == 0
    for mine, other, (_, new, _) in zip(ours, theirs, drawn, strict=True):
        assert mine.output_ids == other.output_ids == [5] * new


def test_ranks_that_disagree_stop() -> None:
    leader, follower = Scheduler(2), Scheduler(2)
    ours, theirs = make(0), make(0)
    leader.add([ours], 0.0)
    follower.add([theirs], 0.0)
    for scheduler in (leader, follower):
        run_step(scheduler)
    theirs.output_ids[-1] += 1
    digest = leader.digest()
    plan = leader.schedule()
    assert plan is not None
    numbers = plan.to_numbers(2, digest)
    with pytest.raises(RuntimeError, match="the ranks disagree about the running batch"):
        Plan.from_numbers(numbers, follower.digest(), [theirs].__getitem__, follower.rows)
    numbers[-1] += 1
    with pytest.raises(RuntimeError, match="the ranks disagree"):
        Plan.from_numbers(numbers, digest, [theirs].__getitem__, follower.rows)


def test_a_step_costs_nothing_for_requests_that_wait() -> None:
    """The value of a request in the order is computed once, when it begins to wait."""
    asked = []

    def order(request: Request) -> float:
        asked.append(request)
        return request.arrived_s

    scheduler = Scheduler(2, order=order)
    requests = [make(i, new=3) for i in range(500)]
    scheduler.add(requests, 0.0)
    assert asked == requests
    cancelled = requests[10::2]
    for request in cancelled:
        scheduler.cancel(request)
    num_steps = 0
    while scheduler.waiting:
        run_step(scheduler)
        num_steps += 1
    num_waves = -(-(500 - len(cancelled)) // 2)
    assert asked == requests and num_steps == 3 * (num_waves - 1) + 1
    assert not set(cancelled) & set(scheduler.running)


def test_a_row_that_needs_no_block_does_not_change_the_plan() -> None:
    """With limited blocks too, and while others wait for a row."""
    scheduler = Scheduler(1, Limits(block_size=8, num_blocks=4))
    scheduler.add([make(0, prompt=4, new=20), make(1)], 0.0)
    plans = [run_step(scheduler) for _ in range(8)]
    assert [plan.reserved for plan in plans[1:]] == [()] * 4 + [((0, 9),)] + [()] * 2
    assert plans[1] is plans[4] and plans[6] is plans[7] and plans[6] is not plans[1]
