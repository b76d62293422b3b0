"""The order of messages in a ring, with stages that do not compute: how many are under way, how the
rows of ended samples are used again, and what messages say about drafts. A
sample may end among its accepted drafts."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from conftest import (
    TINY,
    decode,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from fake_clock import VirtualClock
from two_stages import serve_with_drafts

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.channels.message import (
    Ends,
    Kind,
    Message,
    MessageForm,
    Traffic,
)
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.engine import Engine
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Observer, Request, ignore_step
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.drafter import Drafter, DraftPlan, DraftSetup, DraftShape
from magicdec.speculation.ngram import NgramDrafter
from magicdec.speculation.steps.strategy import Setup
from magicdec.systems.mdi_llm.details import DraftCounts
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation, most_under_way
from magicdec.systems.mdi_llm.ring_stage import ENDS_PROMPT, IN_PROMPT, VERIFY, WANTED, Stage
from magicdec.systems.observer import PassObserver
from magicdec.systems.stages.emulation import EmulatedTime, SleepingModel

FORM = MessageForm(TINY.hidden_size, torch.float32, 4)
CHUNK = 8
LIMITS = BatchLimits(60, prefill_tokens=16)


class OrderedRing:
    """All other stages: messages come home in their order, and each has been seen. One comes a step
    of `clock` after the one before, or after it was sent if none is under way."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.step_clock = clock or VirtualClock(0.0)
        self.under_way: deque[Message] = deque()
        self.sent: list[Message] = []
        self.sent_s: list[float] = []
        self.depths: list[int] = []
        self.came_s = 0.0  # when the last message came home
        self.traffic = Traffic()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.sent_s.append(self.step_clock.now())
        if message.kind is Kind.FREE:
            return
        if message.kind is Kind.HIDDEN:
            assert message.payload is not None
            last = message.payload[:, -1:]
            homes = {IN_PROMPT: None, ENDS_PROMPT: last, WANTED: last, VERIFY: message.payload}
            home = homes[message.status]
            kind = Kind.VOID if home is None else Kind.HIDDEN
            message = replace(message, kind=kind, payload=home)
        if not self.under_way:
            self.came_s = self.step_clock.now()
        self.under_way.append(message)

    def has_arrived(self, seconds: float) -> bool:
        return self.came_s + self.step_clock.step_s <= self.step_clock.now() + seconds

    def receive(self) -> Message:
        self.depths.append(len(self.under_way))
        self.came_s += self.step_clock.step_s
        self.step_clock.wait_until(self.came_s)
        return self.under_way.popleft()

    def close(self) -> None:
        """There is nothing to wait for."""


def serve(
    requests: Sequence[Request] | Arrivals,
    num_lanes: int,
    lane_size: int,
    gamma: int = 0,
    clock: VirtualClock | None = None,
    make_speculation: Callable[[ModelRunner], RingSpeculation] | None = None,
    observe: Observer = ignore_step,
) -> OrderedRing:
    model = SleepingModel(TINY, Shard(), range(1), True, 0.0, torch.zeros(1), EmulatedTime())
    stage = Stage(make_runner(model, num_lanes * lane_size, 60), is_last=False)
    ring = OrderedRing(clock)
    runner = stage.runner
    speculation = None
    if gamma:
        drafter = NgramDrafter(runner.num_rows, gamma, runner.device)
        speculation = RingSpeculation(runner, drafter, gamma)
    if make_speculation is not None:
        speculation = make_speculation(runner)
    place = Ends(ring, ring), num_lanes, lane_size, LIMITS, CHUNK, ring.step_clock
    pipeline = RecurrentPipeline(stage, *place, speculation)
    pipeline.serve(requests, observe)
    assert not any(stage.runner.cache.blocks) and not ring.under_way
    return ring


def test_a_message_of_every_lane_is_under_way_until_no_prompt_waits() -> None:
    requests = make_requests([(5,) * 20] * 10, 6)
    ring = serve(requests, num_lanes=3, lane_size=1)
    assert all(request.output_ids == [1] * 6 for request in requests)
    # Prompts of 20 tokens: a step of two chunks and one of a chunk; then 5 tokens are decoded.
    assert len(ring.depths) == 10 * (3 + 5)
    ending = next(i for i, depth in enumerate(ring.depths) if depth < 3)
    assert ending >= 9 * (3 + 5) - 3, "before its last prompt a lane is never idle"
    assert max(ring.depths) <= most_under_way(3, 1, LIMITS, CHUNK)


def test_a_freed_row_is_taken_by_the_lanes_next_step() -> None:
    """The lane of the sample that ends first admits the prompt that waits, at once."""
    requests = make_requests([(5,) * 4] * 5, [2, 9, 9, 9, 3])
    ring = serve(requests, num_lanes=2, lane_size=2)
    freed = next(i for i, message in enumerate(ring.sent) if message.kind is Kind.FREE)
    assert ring.sent[freed].words == (0,)
    following = [message for message in ring.sent[freed + 1 :] if message.words < (2,)]
    assert following[0].words == (0,) and following[0].payload is not None
    assert following[0].payload.shape[1] == 4, "a prompt of 4 tokens"
    assert following[1].words == (1,), "the other sample of the lane decodes beside it"
    assert sorted(w for m in ring.sent if m.kind is Kind.FREE for w in m.words) == [0, 0, 1, 2, 3]


def test_a_ring_drains_and_begins_again_with_the_next_request() -> None:
    clock = VirtualClock()
    arrivals = [0.0, 50.0, 100.0]
    requests = make_requests([(5,) * 4] * 3, 6)
    for request, arrived_s in zip(requests, arrivals, strict=True):
        request.arrived_s = arrived_s
    ring = serve([requests[i] for i in (2, 0, 1)], num_lanes=2, lane_size=1, clock=clock)
    assert all(request.output_ids == [1] * 6 for request in requests)
    assert [request.arrived_s for request in requests] == arrivals
    assert set(ring.depths) == {1}, "one after the other"
    # A message takes a second, and each request has 6.
    assert [r.token_times_s for r in requests] == [
        [at + 1.0 + i for i in range(6)] for at in arrivals
    ]
    freed = [m.words for m in ring.sent if m.kind is Kind.FREE]
    assert freed == [(0,)] * 3, "the first lane is free"


def test_a_request_that_arrives_takes_an_idle_lane_or_a_free_row() -> None:
    requests = make_requests([(5,) * 4] * 4, 12)
    for request, arrived_s in zip(requests, [0.0, 2.5, 4.5, 4.75], strict=True):
        request.arrived_s = arrived_s
    ring = serve(requests, num_lanes=2, lane_size=2, clock=VirtualClock())
    assert all(request.output_ids == [1] * 12 for request in requests)
    prompts = [
        (place, m.words)
        for place, m in enumerate(ring.sent)
        if m.payload is not None and m.payload.shape[1] == 4
    ]
    # A message comes home each second. The second request begins the idle lane when it arrives,
    # while the third message is under way. The last two have arrived with the fifth, which is of
    # the first lane: it takes one of them beside its other row, and the second lane the other.
    assert prompts == [(0, (0,)), (3, (2,)), (6, (1,)), (8, (3,))], "rows 0 and 1 are a lane"
    assert [ring.sent_s[place] for place, _ in prompts] == [0.0, 2.5, 5.0, 6.0]


def test_one_sample_alone_takes_turns() -> None:
    ring = serve(make_requests([(5,) * 4] * 2, 3), num_lanes=1, lane_size=1)
    assert set(ring.depths) == {1} and len(ring.depths) == 2 * 3


@pytest.mark.usefixtures("lookups_of_ones")
def test_a_message_says_how_many_tokens_its_rows_keep() -> None:
    """The emulated model continues every prompt with ones, which the drafter proposes. Of the two
    samples of the lane one ends, and another takes its row, while the other still runs."""
    requests = make_requests([(5,) * 4, (5,) * 6, (5,) * 9], [3, 9, 2])
    ring = serve(requests, num_lanes=1, lane_size=2, gamma=3)
    assert [request.output_ids for request in requests] == [[1] * 3, [1] * 9, [1] * 2]
    assert [(m.status, m.words) for m in ring.sent if m.kind is Kind.HIDDEN and m.status] == [
        (ENDS_PROMPT, (0,)),
        (ENDS_PROMPT, (1,)),
        (VERIFY, (0, 1, 4, 6)),
        (ENDS_PROMPT, (0,)),
        (VERIFY, (1, 10)),
        (VERIFY, (0, 9)),
    ]
    drafts = [m.payload for m in ring.sent if m.status == VERIFY]
    assert all(payload is not None and payload.shape[1] == 1 + 3 for payload in drafts)


class ScriptedDrafter(Drafter):
    """Proposes a random number of tokens for each row: some ones, which are right, and then fives.
    The padding is of ones. Counts what a message must be counted as."""

    has_probabilities = False

    def __init__(self) -> None:
        self.random = Random(0)
        self.counts = list[int]()
        self.expected = DraftCounts()
        self.judged: list[tuple[int, int]] = []  # drafted and accepted tokens of rows

    @classmethod
    def build(cls, setup: DraftSetup) -> "ScriptedDrafter":
        raise NotImplementedError

    def plan(self, requests: Sequence[Request], gamma: int, *args: object) -> DraftPlan:
        self.counts = [self.random.randint(0, gamma) for _ in requests]
        return DraftPlan(self.counts, self.counts)

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        num_right = [self.random.choice((0, n, self.random.randint(0, n))) for n in self.counts]
        ids = torch.ones(len(self.counts), shape.gamma, dtype=torch.int64)
        for row, right, count in zip(ids, num_right, self.counts, strict=True):
            row[right:count] = 5
        self.expected.num_messages += 1
        self.expected.num_rounds += len(self.counts)
        self.judged += zip(self.counts, num_right, strict=True)
        return Proposal(ids)


@pytest.mark.parametrize("lanes", [(1, 3), (2, 2)])
def test_a_ring_counts_what_was_proposed_and_accepted_of_each_row(lanes: tuple[int, int]) -> None:
    """Rows of a message have different numbers of drafts, and their padding would be right."""
    drafter = ScriptedDrafter()
    made = list[RingSpeculation]()

    def speculate(runner: ModelRunner) -> RingSpeculation:
        made.append(RingSpeculation(runner, drafter, 4))
        return made[-1]

    requests = make_requests([(5,) * n for n in (4, 6, 9, 3, 5)], [30, 9, 20, 1, 25])
    seen = PassObserver()
    serve(requests, *lanes, make_speculation=speculate, observe=seen.observe)
    assert all(r.output_ids == [1] * r.sampling.max_new_tokens for r in requests)
    counts = replace(made[0].counts, draft_s=0.0)
    assert counts == drafter.expected and counts.num_rounds > counts.num_messages > 10
    judged = [
        (verification.drafted, verification.accepted) for verification in seen.verifications.every
    ]
    assert sorted(judged) == sorted(pair for pair in drafter.judged if pair[0])
    assert 0 < seen.verifications.num_accepted < seen.verifications.num_drafted


PROMPTS = random_prompts([5, 40, 1, 33, 9, 21], TINY.vocab_size)
NEW = [20, 9, 20, 1, 14, 6]
NUM_DRAFTS = 3
MAX_TOKENS = 80


def alone(eos: tuple[int, ...] = ()) -> list[list[int]]:
    """The tokens of one process without drafts."""
    runner = make_runner(tiny_transformer(), 6, MAX_TOKENS)
    requests = make_requests(PROMPTS, NEW, eos)
    engine = Engine(runner, 16)
    engine.prefill(requests)
    decoded = decode(engine, "autoregressive", Setup(runner, DecodingSection(), KVSection()))
    return [list(request.output_ids) for request in decoded]


@pytest.mark.parametrize("lanes", [(1, 1), (3, 1), (1, 3)])
def test_an_end_token_among_accepted_drafts_ends_the_sample(lanes: tuple[int, int]) -> None:
    """The target itself drafts, so that all its drafts are accepted."""
    unended = alone()
    place = next(i for i in range(1, 3) if unended[0][i] not in unended[0][:i])
    end = (unended[0][place],)
    expected = alone(end)
    requests = make_requests(PROMPTS, NEW, end)
    draft = make_draft(tiny_transformer(), KVSection("full", -1), lanes[0] * lanes[1], MAX_TOKENS)
    counts = serve_with_drafts(
        tiny_transformer(), requests, lanes, MAX_TOKENS, NUM_DRAFTS, "model", draft
    )
    assert [request.output_ids for request in requests] == expected
    assert len(expected[0]) == place + 1 and counts.num_accepted == counts.num_drafted > 0
