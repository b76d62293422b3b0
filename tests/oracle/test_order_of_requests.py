"""The order in which requests are admitted, grow, are preempted and decode where blocks are scarce,
against a scheduler that is written out from the rules of `docs/flover.md` and keeps no plan."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.engine.scheduler import Scheduler
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput
from magicdec.runner.step_plan import BatchLimits, StepPlan

BLOCK = 4


@dataclass
class Text:
    """A request as the plain scheduler sees it."""

    number: int
    arrived: int
    prompt: int
    most: int
    num_out: int = 0
    row: int | None = None
    num_blocks: int = 0
    left: int = 0  # tokens that are still to be prefilled
    has_left: bool = False

    @property
    def age(self) -> tuple[int, int]:
        """First come, first served; of those that came at once, the smallest number."""
        return self.arrived, self.number

    @property
    def cached(self) -> int:
        """The newest token is not cached."""
        return self.prompt + max(0, self.num_out - 1)


@dataclass
class PlainScheduler:
    num_rows: int
    limits: BatchLimits
    texts: list[Text] = field(default_factory=list)
    joined: list[Text] = field(default_factory=list)  # those in rows, in the order of admission
    cancelled: list[int] = field(default_factory=list)

    def blocks_of(self, text: Text) -> int:
        """For its tokens and one step."""
        return -(-(text.cached + self.limits.step_tokens) // BLOCK)

    @property
    def free(self) -> int:
        assert self.limits.num_blocks is not None
        return self.limits.num_blocks - sum(text.num_blocks for text in self.joined)

    def leave(self, text: Text) -> None:
        self.joined.remove(text)
        text.row = None
        text.num_blocks = 0

    def step(self) -> dict[str, list[tuple[int, ...]]]:
        """What the next step does, by the names of `StepPlan`."""
        done = {name: list[tuple[int, ...]]() for name in ("cancelled", "preempted", "admitted")}
        decoding_before = [t for t in self.joined if not t.left]
        for text in [t for t in self.joined if t.number in self.cancelled]:
            done["cancelled"].append((text.number, text.row or 0))
            text.has_left = True
            self.leave(text)
        for text in sorted(decoding_before, key=lambda t: t.age):  # the oldest grow first
            while text in self.joined and self.blocks_of(text) - text.num_blocks > self.free:
                youngest = max(self.joined, key=lambda t: t.age)
                done["preempted"].append((youngest.number, youngest.row or 0))
                self.leave(youngest)
            if text in self.joined:
                text.num_blocks = max(text.num_blocks, self.blocks_of(text))
        if not done["preempted"]:
            done["admitted"] = self.admit()
        decoding = [t for t in decoding_before if t in self.joined]
        done["decoding"] = [(t.number,) for t in sorted(decoding, key=lambda t: t.row or 0)]
        done["parts"] = self.prefill()
        return {name: sorted(pairs, key=lambda p: p[-1]) for name, pairs in done.items()} | {
            name: done[name] for name in ("admitted", "decoding", "parts")
        }

    def admit(self) -> list[tuple[int, ...]]:
        """The first of those that wait, while a row is free and blocks are: none overtakes one that
        has no room."""
        admitted = list[tuple[int, ...]]()
        waiting = [t for t in self.texts if t.row is None and not t.has_left]
        taken = {text.row for text in self.joined}
        rows = [row for row in range(self.num_rows) if row not in taken]
        for text in sorted(waiting, key=lambda t: t.age):
            if not rows or self.blocks_of(text) > self.free:
                break
            text.row = rows.pop(0)
            text.num_blocks = self.blocks_of(text)
            text.left = text.cached
            self.joined.append(text)
            admitted.append((text.number, text.row))
        return admitted

    def prefill(self) -> list[tuple[int, ...]]:
        """As many tokens as a step may, of those first that were admitted first."""
        room = self.limits.prefill_tokens or 1000
        parts = []
        for text in self.joined:
            count = min(room, text.left)
            if count:
                start = text.cached - text.left
                parts.append((text.row or 0, text.number, start, start + count))
                text.left = text.left - count
                room = room - count
        return [part[1:] for part in sorted(parts)]

    def emitted(self, number: int, count: int) -> None:
        text = self.texts[number]
        text.num_out = min(text.most, text.num_out + count)
        if text.num_out == text.most:
            text.has_left = True
            self.leave(text)


def described(plan: StepPlan) -> dict[str, list[tuple[int, ...]]]:
    decoding = () if plan.decoding is None else plan.decoding.requests
    return {
        "cancelled": [(r.request_id, row) for r, row in plan.cancelled],
        "preempted": [(r.request_id, row) for r, row in plan.preempted],
        "admitted": [(r.request_id, row) for r, row in plan.admitted],
        "decoding": [(r.request_id,) for r in decoding],
        "parts": [(p.request.request_id, p.start, p.stop) for p in plan.parts],
    }


REQUESTS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 14), st.integers(0, 12)), min_size=2, max_size=9
)
seen = Counter[str]()


@settings(max_examples=200)
@given(
    drawn=REQUESTS,
    num_rows=st.integers(1, 4),
    spare=st.integers(0, 5),
    step_tokens=st.integers(1, 4),
    prefill_tokens=st.sampled_from([None, 3, 9]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    cancels=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 20)), max_size=3),
)
def test_requests_are_served_in_the_order_of_the_rules(
    drawn: list[tuple[int, int, int]],
    num_rows: int,
    spare: int,
    step_tokens: int,
    prefill_tokens: int | None,
    counts: list[int],
    cancels: list[tuple[int, int]],
) -> None:
    needed = max(prompt + max(new, 2) - 2 + step_tokens for prompt, new, _ in drawn)
    limits = BatchLimits(
        block_size=BLOCK,
        num_blocks=-(-needed // BLOCK) + spare,
        step_tokens=step_tokens,
        prefill_tokens=prefill_tokens,
    )
    scheduler = Scheduler(num_rows, limits)
    plain = PlainScheduler(num_rows, limits)
    requests = [Request(i, (1,) * n, SamplingParams(new)) for i, (n, new, _) in enumerate(drawn)]
    plain.texts = [
        Text(i, arrived, prompt, new, has_left=True)
        for i, (prompt, new, arrived) in enumerate(drawn)
    ]
    for time in range(400):
        for number, (_, _, arrived) in enumerate(drawn):
            if arrived == time:
                scheduler.add([requests[number]], arrived)
                plain.texts[number].has_left = False
        for number, at in cancels:
            if at == time and number < len(drawn) and drawn[number][2] <= time:
                scheduler.cancel(requests[number])
                text = plain.texts[number]
                text.has_left |= text.row is None
                plain.cancelled += [number] if text.row is not None else []
        plan = scheduler.schedule()
        expected = plain.step()
        if plan is None:
            assert not any(expected.values()), expected
            if time > 12:
                break
            continue
        assert described(plan) == expected, time
        held = {t.row: t.num_blocks for t in plain.joined}
        assert scheduler.blocks.held == [held.get(row, 0) for row in range(num_rows)]
        emit(scheduler, plain, plan, counts[time % len(counts)])
    assert all(text.has_left for text in plain.texts)
    assert [len(r.output_ids) for r in requests] == [t.num_out for t in plain.texts]


def emit(scheduler: Scheduler, plain: PlainScheduler, plan: StepPlan, most: int) -> None:
    """As many tokens of each request that decodes, and the first of each that is new."""
    decoding = () if plan.decoding is None else plan.decoding.requests
    complete = [part.request for part in plan.parts if part.is_last]
    pairs = [(r, min(most, scheduler.limits.step_tokens)) for r in decoding]
    pairs += [(r, int(not r.output_ids)) for r in complete]
    for batch in (pairs[: len(decoding)], pairs[len(decoding) :]):
        tokens = [[5] * count for _, count in batch]
        before = [len(r.output_ids) for r, _ in batch]
        scheduler.commit(Batch(tuple(r for r, _ in batch)), StepOutput(tokens), 0.0)
        for (request, count), _ in zip(batch, before, strict=True):
            plain.emitted(request.request_id, count)
