"""Requests that join and leave a running batch emit the tokens of their lone runs.

Random schedules run on a virtual clock: arrivals, lengths, prefill budgets and
pools of blocks that force preemption, under every drafter and policy, with draft lengths that
change from step to step and are calibrated while others run, and chains that stop by themselves.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from conftest import (
    decode,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    that_drafts,
    tiny_transformer,
)
from draft_heads import is_head, made_head, state_layers
from fake_clock import VirtualClock
from recorder import StandInRecorder
from tiers import covering

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import (
    BESIDE_TARGET,
    DecodingSection,
    KVSection,
    SamplingSection,
    model_drafter_of,
)
from magicdec.engine.engine import Engine
from magicdec.kv.layer_caches import WindowRoom
from magicdec.model.draft_head import DraftHead
from magicdec.names import EAGLE, HEADS
from magicdec.runner.forward_batch import EnqueuedForward
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Batch, Request, RequestStatus
from magicdec.runner.step_plan import BatchLimits, StepPlan
from magicdec.speculation.draft_length import DraftLength, Measure
from magicdec.speculation.forecast import Acceptance
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy

MOST_DRAFTS = 4
MOST_NEW = 20
EOS = 7
OBSERVED = 16  # tokens that policies run again at most
FEW = 3
SEEDS = 30
MAX_TOKENS = 40 + MOST_NEW + MOST_DRAFTS
PROMPTS = random_prompts([1, 2, 3, 5, 8, 13, 16, 21, 33, 40], 97)
SAMPLINGS = (
    SamplingSection(),
    SamplingSection(repetition_penalty=1.3),
    SamplingSection(temperature=0.8, top_p=0.9),
)
CASES = [
    (None, KVSection("full")),
    ("ngram", KVSection("full")),
    ("self", KVSection("full")),
    ("self", KVSection("streaming_llm", 12, 4)),
    ("self", KVSection("snapkv", 12, window_size=5)),
    ("self", KVSection("snapkv", 12, window_size=5, reselect_every=3)),
    ("self", KVSection("verified", 20, 2, recent_window=2)),
    ("self", KVSection("retrieval", 20, 2, recent_window=2)),
    ("model", KVSection("full")),
    ("model", KVSection("streaming_llm", 12, 4)),
    ("model", KVSection("snapkv", 12, window_size=5)),
    ("ngram+self", KVSection("streaming_llm", 12, 4)),
    ("ngram+self", KVSection("snapkv", 12, window_size=5)),
    ("ngram+self", KVSection("verified", 20, 2, recent_window=2)),
    ("ngram+model", KVSection("full")),
    ("ngram+model", KVSection("streaming_llm", 12, 4)),
    ("eagle", KVSection("full")),
    ("eagle", KVSection("streaming_llm", 12, 4)),
    ("ngram+eagle", KVSection("full")),
    ("self", KVSection("quantised")),
]
# Every drafter, every policy, and a mixed drafter beside each of its two kinds of cache.
FEW_CASES = {0, 1, 3, 5, 6, 7, 8, 9, 12, 16, 19}
EACH_CASE = [
    case if index in FEW_CASES else pytest.param(*case, marks=pytest.mark.wide)
    for index, case in enumerate(CASES)
]
LONE = tiny_transformer(seed=1)
MODEL = tiny_transformer(seed=1)
PACKED = pack(tiny_transformer(seed=1))
lone_outputs: dict[tuple[object, ...], list[int]] = {}


class RandomLength(DraftLength):
    """Draft lengths from 0 to `max_gamma` in any order, in some steps another for each row. Now and
    then, steps are measured when requests join, which changes nothing."""

    max_gamma = MOST_DRAFTS
    choices = range(MOST_DRAFTS + 1)

    def __init__(self, random: Random, per_row: bool = True) -> None:
        self.random = random
        self.per_row = per_row
        self.acceptance = Acceptance(MOST_DRAFTS)

    def begin(self, batch: Batch, measure: Measure) -> None:
        if self.random.random() < 0.15:
            measure(batch)

    def forget_times(self) -> None:
        """Nothing was measured."""

    def lengths(self, batch: Batch) -> list[int]:
        lengths = [self.random.choice((0, 0, *self.choices)) for _ in batch.requests]
        is_ragged = self.per_row and self.random.random() < 0.4
        return lengths if is_ragged else lengths[:1] * len(lengths)


@dataclass(frozen=True)
class Schedule:
    requests: list[Request]
    runner: ModelRunner
    limits: BatchLimits
    chunk: int

    @property
    def values(self) -> dict[str, Any]:
        """What the draw has chosen."""
        prompts = [len(request.prompt_ids) for request in self.requests]
        return {
            "attention": type(self.runner.backend).__name__,
            "rows": self.runner.num_rows,
            "has pool": self.limits.num_blocks is not None,
            "chunk": self.chunk,
            "prefill": self.limits.prefill_tokens,
            "requests": len(prompts),
            "is long": max(prompts) > 16,
        }


def draw_backend(random: Random) -> AttentionBackend:
    return random.choice((GroupedBackend(), GroupedBackend(), NativeBackend(), SDPABackend(8)))


def draw_schedule(
    random: Random, drafter: str | None, backend: AttentionBackend, is_native: bool
) -> Schedule:
    """With `is_native`, a forward is one native call, which computes what several rows do at once.
    Blocks hold 8 tokens (64 under native attention); the smallest pool has just the blocks of
    the largest request."""
    # Speculation keeps the distribution of sampled tokens, not the tokens.
    samplings = SAMPLINGS if drafter is None else SAMPLINGS[:2]
    spread = random.choice((0.0, 2.0, 10.0))
    requests = []
    prompts = random.choice((PROMPTS, PROMPTS[:6], PROMPTS[:6]))
    for number in range(random.randint(3, 6)):
        sampling = random.choice(samplings)
        new = random.choice((1, 9, MOST_NEW, MOST_NEW))
        (request,) = make_requests([random.choice(prompts)], new, (EOS,), sampling)
        request = replace(request, request_id=number)
        request.arrived_s = random.uniform(0, spread)
        requests.append(request)
    num_rows = random.randint(2, 4)
    blocks = {}
    step_tokens = 1 if drafter is None else 1 + MOST_DRAFTS
    if random.random() < 0.75:
        size = backend.block_size(8)
        needed = [len(r.prompt_ids) + r.sampling.max_new_tokens + step_tokens for r in requests]
        blocks = {"block_tokens": 8, "num_blocks": -(-max(needed) // size) + random.randint(0, 1)}
    # So that a copy of K and V has just the room that the longest output needs.
    following = MOST_NEW + step_tokens - 1
    runner = make_runner(PACKED if is_native else MODEL, num_rows, MAX_TOKENS, backend, following)
    executor = Executor(PACKED, runner.group) if is_native else None
    prefill_tokens = random.choice((None, 1, 6, 16))
    chunk = random.choice((3, 8, 64))
    room = WindowRoom(2 * step_tokens + OBSERVED, max(chunk, step_tokens + 2))
    runner = replace(runner, executor=executor, window_room=room, **blocks)
    block_size, num_blocks = runner.caches.limits
    limits = BatchLimits(
        MAX_TOKENS, block_size, num_blocks if blocks else None, step_tokens, prefill_tokens
    )
    return Schedule(requests, runner, limits, chunk)


def lone_output(request: Request) -> list[int]:
    """The tokens that the request emits alone, by autoregressive decoding of a static batch."""
    key = request.prompt_ids, request.sampling
    if key not in lone_outputs:
        runner = make_runner(LONE, 1, MAX_TOKENS)
        alone = Request(0, request.prompt_ids, request.sampling)
        engine = Engine(runner, 64)
        engine.prefill([alone])
        setup = Setup(runner, DecodingSection(), KVSection("full"))
        lone_outputs[key] = decode(engine, "autoregressive", setup)[0].output_ids
    return lone_outputs[key]


@cache
def head(drafter: str = EAGLE) -> DraftHead:
    """Of which some drafts are accepted."""
    requests = make_requests(PROMPTS, MOST_NEW, (EOS,))
    texts = [[*request.prompt_ids, *lone_output(request)] for request in requests]
    return made_head(tiny_transformer(seed=1), texts, drafter=drafter)


def serve(
    schedule: Schedule, drafter: str | None, kv: KVSection, random: Random, records: bool = False
) -> Counter[str]:
    """Serve the requests, and check each step's books. Returns how often things happened."""
    runner = schedule.runner
    seen = Counter[str]()
    draft = None
    if drafter is not None and model_drafter_of(drafter) in BESIDE_TARGET:
        has_head = is_head(drafter)
        draft = make_draft(
            head(model_drafter_of(drafter) or "") if has_head else MODEL,
            kv,
            runner.num_rows,
            MAX_TOKENS,
            chunk=8,
            max_drafts=MOST_DRAFTS,
            max_following=runner.max_following,
        )
        if has_head:
            layers = state_layers(drafter, runner.model.config)
            runner.observers.append(HiddenStates.of(runner, layers))
    keep_queries(draft.runner if draft is not None and draft.runner else runner, kv)
    can_stop = drafter in ("self", "model", *HEADS) and not records
    pa = 0.2 if can_stop and random.random() < 0.5 else None
    decoding = DecodingSection("speculative", drafter or "self", MOST_DRAFTS, pa=pa)
    setup = Setup(
        runner,
        decoding,
        kv,
        draft=draft,
        draft_length=RandomLength(random, not records),
        recorder=StandInRecorder() if records else Eager(),
        is_in_flight=True,
    )
    strategy = make_strategy("speculative" if drafter else "autoregressive", setup)
    engine = Engine(runner, schedule.chunk, schedule.limits, VirtualClock())
    scheduler = engine.scheduler
    execute = engine.execute
    forward = None if runner.executor is None else runner.executor.forward

    def counted(parts: Sequence[EnqueuedForward], *args: Any) -> Any:
        assert forward is not None, "it is native"
        chunks = sum(part.num_outputs == 0 for part in parts)
        seen["chunks carried"] += min(chunks, len(parts) - 1)
        seen["verified together"] += len(parts) - chunks > 1
        return forward(parts, *args)

    if runner.executor is not None:
        runner.executor.forward = counted  # type: ignore[method-assign]

    def checked(plan: StepPlan, *args: object) -> None:
        held = [len(blocks) for blocks in runner.cache.blocks]
        seen["preempted"] += len(plan.preempted)
        seen["joined"] += len(plan.admitted) if plan.decoding else 0
        seen["both"] += bool(plan.parts and plan.decoding)
        budget = schedule.limits.prefill_tokens
        assert budget is None or sum(p.stop - p.start for p in plan.parts) <= budget
        execute(plan, *args)
        if schedule.limits.num_blocks is not None:
            held = [len(blocks) for blocks in runner.cache.blocks]
            assert held == scheduler.blocks.held and sum(held) <= schedule.limits.num_blocks

    engine.execute = checked  # type: ignore[method-assign,assignment]
    engine.serve(strategy, schedule.requests)
    assert not any(runner.cache.blocks), "every block is free again"
    assert {r.status for r in schedule.requests} == {RequestStatus.FINISHED}
    assert all(r.arrived_s <= r.first_token_s <= r.finished_s for r in schedule.requests)
    return seen


def drawn_schedule(
    random: Random, drafter: str | None, records: bool = False, is_native: bool = False
) -> Schedule:
    backend = draw_backend(random)
    if records:
        backend = SDPABackend(8)
    if is_native:
        backend = NativeBackend()
    return draw_schedule(random, drafter, backend, is_native)


def learn_lone_outputs(seeds: Sequence[int], drafter: str | None, is_native: bool) -> None:
    """What `check_seeds` expects, and the head that it drafts with, are known from now on."""
    for seed in seeds:
        for request in drawn_schedule(Random(seed), drafter, is_native=is_native).requests:
            lone_output(request)
    if drafter is not None and is_head(drafter):
        head(model_drafter_of(drafter) or "")


def check_seeds(
    seeds: Sequence[int],
    drafter: str | None,
    kv: KVSection,
    records: bool = False,
    is_native: bool = False,
) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        random = Random(seed)
        schedule = drawn_schedule(random, drafter, records, is_native)
        schedule = replace(schedule, runner=that_drafts(schedule.runner, kv))
        seen += serve(schedule, drafter, kv, random, records)
        for request in schedule.requests:
            expected = lone_output(request)
            assert request.output_ids == expected, (seed, request.request_id)
    return seen


@cache
def drawn(is_drafting: bool) -> list[dict[str, Any]]:
    """What the draw chooses for each seed, which depends on the drafter only so far."""
    found = []
    for seed in range(SEEDS):
        random = Random(seed)
        drafter = "self" if is_drafting else None
        found.append(draw_schedule(random, drafter, draw_backend(random), False).values)
    return found


@cache
def other_seeds(case: int) -> list[int]:
    """Seeds beside the first few for that one of `CASES`: those with which all cases together have
    every pair of a case and a value that occurs, and every pair of two values."""
    every = list(product(range(len(CASES)), range(SEEDS)))
    values = [
        drawn(CASES[number][0] is not None)[seed] | {"case": number} for number, seed in every
    ]
    chosen = [every[index] for index in covering(values, 2)]
    return sorted(seed for number, seed in chosen if number == case and seed >= FEW)


@pytest.mark.narrow(7)
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    "is_few", [True, pytest.param(False, marks=pytest.mark.wide)], ids=["some", "many"]
)
@pytest.mark.parametrize(("drafter", "kv"), EACH_CASE, ids=str)
def test_each_request_emits_the_tokens_of_its_lone_run(
    drafter: str | None, kv: KVSection, is_few: bool
) -> None:
    seen = check_seeds(
        range(FEW) if is_few else other_seeds(CASES.index((drafter, kv))), drafter, kv
    )
    if is_few:
        assert min(seen[what] for what in ("preempted", "joined", "both")) > 0, seen


@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(("drafter", "kv"), EACH_CASE, ids=str)
def test_rows_that_share_a_forward_emit_the_tokens_of_their_lone_runs(
    drafter: str | None, kv: KVSection
) -> None:
    """A forward takes a chunk of a prompt beside others, and rows with different numbers of drafts;
    a policy that watches attention watches rows of one number."""
    seen = check_seeds(range(100, 103), drafter, kv, is_native=True)
    assert seen["joined"] > 0 and seen["chunks carried"] > 0, seen
    is_watched = kv.policy in ("verified", "retrieval")
    assert (seen["verified together"] > 0) == (drafter is not None and not is_watched), seen


@pytest.mark.parametrize(
    "policy", ["streaming_llm", pytest.param("snapkv", marks=pytest.mark.wide)]
)
def test_captured_steps_are_those_of_the_rows_that_run(policy: str) -> None:
    # In these schedules, rows get the blocks of a request that has left.
    check_seeds([9, 11], "self", KVSection(policy, 12, 4, window_size=5), records=True)


@pytest.mark.usefixtures("trusted_lookups")
def test_captured_steps_of_lookups_and_a_model() -> None:
    check_seeds([9, 11], "ngram+self", KVSection("streaming_llm", 12, 4), records=True)
