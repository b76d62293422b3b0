"""Requests whose texts begin alike share the blocks of what they share, and emit the tokens that
they emit alone: conversations of several turns, which fork, are cancelled and preempted, and whose
blocks are evicted, with and without drafts."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from random import Random

import pytest
import torch
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
from hypothesis import given
from hypothesis import strategies as st
from test_in_flight import (
    EOS,
    LONE,
    MODEL,
    MOST_DRAFTS,
    OBSERVED,
    PACKED,
    RandomLength,
    draw_backend,
    head,
)
from test_stale_kv import spoiled
from test_window_blocks import model_of

from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import (
    BESIDE_TARGET,
    DecodingSection,
    KVSection,
    model_drafter_of,
)
from magicdec.engine.engine import Engine
from magicdec.engine.scheduler import StepCounts
from magicdec.kv import prefix_cache
from magicdec.kv.prefix_cache import PrefixCache
from magicdec.model.transformer import Transformer
from magicdec.names import MTP
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.draft_log import DraftLog
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.prefill import prefill
from magicdec.runner.request import Request, RequestStatus, StepOutput
from magicdec.runner.step_plan import BatchLimits, PrefillChunk, StepPlan
from magicdec.speculation import model_drafter
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.rolling_runner import RollingRunner
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy

MOST_NEW = 9
FULL = KVSection("full")
DRAFTS = [
    (None, FULL),
    ("self", KVSection("streaming_llm", 12, 4)),
    ("self", KVSection("snapkv", 12, window_size=5, reselect_every=3)),
    ("self", KVSection("verified", 20, 2, recent_window=2)),
    ("self", KVSection("retrieval", 20, 2, recent_window=2)),
    ("model", FULL),
    ("model", KVSection("snapkv", 12, window_size=5)),
    ("model", KVSection("streaming_llm", 12, 4)),
    ("eagle", FULL),
    ("eagle", KVSection("streaming_llm", 12, 4)),
    ("self", KVSection("quantised")),
]
IDS = ["none", "streaming_llm", "snapkv", "verified", "retrieval", "model", "model snapkv", "rolls"]
IDS += ["head", "head rolls", "quantised"]
lone_outputs: dict[tuple[object, ...], list[int]] = {}


@pytest.fixture(autouse=True)
def few_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small here."""
    monkeypatch.setattr(prefix_cache, "LEAST_COPIED", 1)


def lone_output(request: Request) -> list[int]:
    """The tokens that the request emits alone, by autoregressive decoding of a static batch."""
    key = request.prompt_ids, request.sampling
    if key not in lone_outputs:
        runner = make_runner(LONE, 1, len(request.prompt_ids) + MOST_NEW)
        alone = Request(0, request.prompt_ids, request.sampling)
        engine = Engine(runner, 64)
        engine.prefill([alone])
        setup = Setup(runner, DecodingSection(), KVSection("full"))
        lone_outputs[key] = decode(engine, "autoregressive", setup)[0].output_ids
    return lone_outputs[key]


@dataclass(frozen=True)
class Talk:
    """Requests in the order of their turns, and the most tokens that one needs."""

    requests: list[Request]
    most_tokens: int


def draw_talk(
    random: Random, long: bool, lone: Callable[[Request], list[int]] = lone_output
) -> Talk:
    """Some conversations that begin with one of two texts. Each goes on from any turn before, with
    the answer that a request has alone, or with less of it."""
    size = 70 if long else 20
    beginnings = [[random.randrange(3, 97) for _ in range(random.randint(1, size))] for _ in "ab"]
    texts = [tuple(beginning) for beginning in beginnings]
    requests = list[Request]()
    for number in range(random.randint(5, 8)):
        before = random.choice(texts[-4:])
        new_text = tuple(random.randrange(3, 97) for _ in range(random.randint(1, size // 2)))
        (request,) = make_requests([(*before, *new_text)], random.choice((1, 5, MOST_NEW)), (EOS,))
        request = replace(request, request_id=number)
        request.arrived_s = number * random.choice((0.0, 0.5, 3.0))
        requests.append(request)
        answer = lone(request)
        texts.append((*request.prompt_ids, *answer[: random.choice((len(answer), 2))]))
    most = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    return Talk(requests, most + 1 + MOST_DRAFTS)


def draw_runner(random: Random, talk: Talk, is_native: bool) -> ModelRunner:
    """Of a pool that has room for the longest text and little more, or for several."""
    backend = NativeBackend() if is_native else draw_backend(random)
    size = backend.block_size(8)
    least = -(-talk.most_tokens // size)
    num_blocks = least + random.choice((0, 1, 2, 2 * least))
    runner = make_runner(
        PACKED if is_native else MODEL,
        random.randint(1, 3),
        talk.most_tokens,
        backend,
        MOST_NEW + MOST_DRAFTS + OBSERVED,
    )
    executor = Executor(PACKED, runner.group) if is_native else None
    pool = {"block_tokens": 8, "num_blocks": num_blocks}
    return replace(runner, executor=executor, shares_prefixes=True, **pool)


@cache
def similar(is_native: bool) -> Transformer:
    """The target with other numbers here and there: it is often right, and often wrong."""
    draft = tiny_transformer(seed=1)
    generator = torch.Generator().manual_seed(0)
    for p in draft.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * 0.02 * p.std())
    return pack(draft) if is_native else draft


def draft_for(
    runner: ModelRunner,
    drafter: str,
    kv: KVSection,
    most_tokens: int,
    shares: bool = True,
    chunk: int = 8,
) -> DraftModel:
    """A draft model or head beside `runner`, whose rows share blocks."""
    is_native = runner.executor is not None
    has_head = is_head(drafter)
    model = head() if has_head else similar(is_native)
    if model_drafter_of(drafter) == MTP:  # of this target
        model = made_head(runner.model, drafter=drafter)
    draft = make_draft(
        model,
        kv,
        runner.num_rows,
        most_tokens,
        NativeBackend() if is_native and not has_head else None,
        chunk=chunk,
        max_drafts=MOST_DRAFTS,
        max_following=MOST_NEW + MOST_DRAFTS + OBSERVED,
        shares_prefixes=shares,
    )
    if has_head:
        layers = state_layers(drafter, runner.model.config)
        runner.observers.append(HiddenStates.of(runner, layers))
    if draft.is_rolling or draft.runner is None or has_head or not is_native:
        return draft
    own = replace(draft.runner, executor=Executor(model, runner.group))
    return replace(draft, runner=own)


@dataclass
class Ledger:
    """What was looked for and found each time that a request joined, again after a preemption, and
    what is prefilled of it: its text without what it shares."""

    counts: StepCounts = field(default_factory=StepCounts)
    looked_up: Counter[int] = field(default_factory=Counter)
    found: Counter[int] = field(default_factory=Counter)
    lacking: dict[Request, int] = field(default_factory=dict)

    def watch(self, plan: StepPlan) -> None:
        self.counts.watch(plan)
        shared = dict(plan.shared or ())
        for request, row in plan.admitted:
            text = (*request.prompt_ids, *request.output_ids)
            size = len(text) - bool(request.output_ids)  # the newest token is computed as it comes
            path = (
                [token for node in shared[row].path for token in node.tokens]
                if row in shared
                else []
            )
            copied = shared[row].num_copied if row in shared else 0
            assert tuple(path) == text[: len(path)]
            self.looked_up[request.request_id] += size
            self.found[request.request_id] += len(path) + copied
            self.lacking[request] = size - len(path) - copied
        for part in plan.parts:
            self.lacking[part.request] -= part.stop - part.start
        for request in () if plan.decoding is None else plan.decoding.requests:
            assert self.lacking[request] == 0, "it has all of its text"

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            moves = self.counts.moves[request.request_id]
            assert moves.num_looked_up == self.looked_up[request.request_id]
            assert moves.num_found == self.found[request.request_id]
        assert self.counts.num_looked_up == self.looked_up.total()
        assert self.counts.num_found == self.found.total()


def serve(
    random: Random,
    talk: Talk,
    runner: ModelRunner,
    drafter: str | None,
    kv: KVSection,
    shares: bool = True,
    outputs: list[tuple[Sequence[int], StepOutput]] | None = None,
) -> Counter[str]:
    """Serve a talk, of which some requests are cancelled, and keep what its steps emit in
    `outputs`. Returns how often things happened."""
    seen = Counter[str]()
    draft = own = None
    if drafter is not None and model_drafter_of(drafter) in BESIDE_TARGET:
        draft = draft_for(runner, drafter, kv, talk.most_tokens, shares)
        own = draft.runner
        assert own is not None, "this rank drafts"
        own.set_observer(DraftLog, runner.observer(DraftLog))
    keep_queries(draft.runner if draft is not None and draft.runner else runner, kv)
    setup = Setup(
        runner,
        DecodingSection("speculative", drafter or "self", MOST_DRAFTS),
        kv,
        draft=draft,
        draft_length=RandomLength(random),
        recorder=Eager(),
        is_in_flight=True,
    )
    strategy = make_strategy("speculative" if drafter else "autoregressive", setup)
    limits = BatchLimits(
        talk.most_tokens, *runner.caches.limits, 1 + MOST_DRAFTS, random.choice((None, 6, 16))
    )
    engine = Engine(runner, random.choice((3, 8, 64)), limits, VirtualClock())
    prefixes = runner.caches.prefixes
    assert prefixes is not None
    cancelled = set(random.sample(talk.requests, random.choice((0, 0, 1))))
    evict = prefixes.evict

    def counted(count: int) -> list[int]:
        blocks = evict(count)
        seen["evicted"] += len(blocks)
        return blocks

    prefixes.evict = counted  # type: ignore[method-assign]
    scheduler = engine.scheduler
    decide = scheduler.schedule

    def schedule() -> StepPlan | None:
        """What the scheduler counts is what the cache has."""
        assert scheduler.blocks.free() == runner.cache.num_free + len(prefixes)
        return decide()

    scheduler.schedule = schedule  # type: ignore[method-assign]

    ledger = Ledger()

    def watch(plan: StepPlan) -> None:
        ledger.watch(plan)
        seen["steps"] += 1
        seen["preempted"] += len(plan.preempted)
        shared = [beginning for _, beginning in plan.shared or ()]
        seen["shared"] += sum(len(beginning.path) for beginning in shared)
        seen["copied"] += sum(beginning.num_copied for beginning in shared)
        for request in scheduler.running:
            if request in cancelled and (len(request.output_ids) > 1 or random.random() < 0.5):
                scheduler.cancel(request)
        found = [node for beginning in shared for node in beginning.path]
        found += [beginning.source for beginning in shared if beginning.source is not None]
        check_books(runner, {node.block for node in found})
        if own is not None and own.shares_prefixes:
            check_books(own)

    def observe(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        if outputs is not None:
            outputs.append((request_ids, output))

    engine.serve(strategy, talk.requests, observe, watch)
    ledger.check(talk.requests)
    for used in (runner, own):
        if used is not None and used.shares_prefixes:
            check_books(used)
            assert not any(used.cache.blocks), "no row is left"
    if own is not None:
        seen["computed by the draft"] = own.counts.num_tokens
    seen["cancelled"] = sum(r.status is RequestStatus.CANCELLED for r in talk.requests)
    return seen


def check_books(runner: ModelRunner, found: Collection[int] = ()) -> None:
    """Each block of the pool is free, kept for a text, or in rows, or was found for one."""
    cache = runner.cache
    prefixes = runner.caches.prefixes
    assert prefixes is not None
    in_rows = {block for blocks in cache.blocks for block in blocks} | set(found)
    if isinstance(runner, RollingRunner):
        in_rows |= {block for blocks in runner._own_blocks for block in blocks}
    idle = {node.block for node in prefixes._idle}
    free = set(cache._free)
    assert len(free) == len(cache._free) and len(idle) == len(prefixes)
    assert len(free) + len(idle) + len(in_rows) == cache.shape.num_blocks
    assert free | idle | in_rows == set(range(cache.shape.num_blocks))
    check_tree(prefixes)


def check_tree(prefixes: PrefixCache) -> None:
    """No child of a node is the beginning of another, which would be found in its place."""
    nodes = [prefixes._root]
    while nodes:
        node = nodes.pop()
        nodes += node.after.values()
        for one, other in combinations([child.tokens for child in node.after.values()], 2):
            size = min(len(one), len(other))
            assert one[:size] != other[:size], (one, other)


def check(seeds: range, drafter: str | None, kv: KVSection, is_native: bool) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        random = Random(seed)
        talk = draw_talk(random, long=is_native)
        runner = draw_runner(random, talk, is_native)
        with spoiled():
            seen += serve(random, talk, that_drafts(replace(runner), kv), drafter, kv)
        for request in talk.requests:
            expected = lone_output(request)
            if request.status is RequestStatus.CANCELLED:
                expected = expected[: len(request.output_ids)]
            assert request.output_ids == expected, (seed, request.request_id)
    return seen


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native steps"])
@pytest.mark.parametrize(("drafter", "kv"), DRAFTS, ids=IDS)
def test_turns_emit_what_they_emit_alone(
    drafter: str | None, kv: KVSection, is_native: bool
) -> None:
    seen = check(range(4), drafter, kv, is_native)
    assert seen["shared"] > 0 and seen["copied"] > 0, seen
    assert is_native or seen["evicted"] > 0, seen
    assert is_native or drafter is not None or seen["preempted"] > 0, seen


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native steps"])
@pytest.mark.parametrize("kv", [FULL, DRAFTS[6][1]], ids=["full", "snapkv"])
def test_a_draft_model_that_shares_drafts_what_it_drafts_alone(
    kv: KVSection, is_native: bool
) -> None:
    """The same tokens, read at the same positions, of which as many are accepted. Less is
    computed."""
    computed = Counter[bool]()
    num_drafted = num_accepted = 0
    for seed in range(3):
        steps = list[list[tuple[Sequence[int], StepOutput]]]()
        for shares in (False, True):
            random = Random(seed)
            talk = draw_talk(random, long=is_native)
            runner = draw_runner(random, talk, is_native)
            runner.set_observer(DraftLog, DraftLog())
            outputs = list[tuple[Sequence[int], StepOutput]]()
            with spoiled():
                seen = serve(random, talk, runner, "model", kv, shares, outputs)
            steps.append(outputs)
            computed[shares] += seen["computed by the draft"]
        assert steps[0] == steps[1], seed
        for _, output in steps[1]:
            num_drafted += sum(output.num_drafted or ())
            num_accepted += sum(output.num_accepted or ())
    assert 0 < num_accepted < num_drafted
    assert computed[True] < computed[False], computed


def test_a_draft_model_prefills_what_it_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every turn of a conversation, and of one that forks: its text without the longest
    beginning of it that a row of the draft model has left."""
    beginning, *questions = random_prompts([30, 7, 9, 5, 6], 97, seed=5)
    runner = make_runner(MODEL, 1, 160, SDPABackend(8))
    runner = replace(runner, block_tokens=8, num_blocks=60, shares_prefixes=True)
    draft = draft_for(runner, "model", FULL, 160)
    own = draft.runner
    assert own is not None
    left = list[tuple[int, ...]]()
    parts = list[PrefillChunk]()
    computed = list[int]()
    release = own.release

    def note(row: int, text: Sequence[int] = ()) -> None:
        left.append(tuple(text[: own.cache.lengths[row]]))
        release(row, text)

    def noted(runner: ModelRunner, given: Sequence[PrefillChunk], chunk: int) -> StepOutput:
        before = runner.counts.num_tokens
        output = prefill(runner, given, chunk)
        parts.extend(given)
        computed.append(runner.counts.num_tokens - before)
        return output

    monkeypatch.setattr(own, "release", note)
    monkeypatch.setattr(model_drafter, "prefill", noted)
    setup = Setup(
        runner,
        DecodingSection("speculative", "model", MOST_DRAFTS),
        FULL,
        draft=draft,
        recorder=Eager(),
        is_in_flight=True,
    )
    strategy = make_strategy("speculative", setup)
    limits = BatchLimits(160, *runner.caches.limits, 1 + MOST_DRAFTS)
    engine = Engine(runner, 64, limits, VirtualClock())
    prompt = beginning
    for number, question in enumerate(questions):
        (request,) = make_requests([(*prompt, *question)], MOST_NEW)
        request = replace(request, request_id=number)
        known = [*left]
        engine.serve(strategy, [request])
        text = request.prompt_ids  # the first token that follows is the target's
        shared = max((common(text[:-1], earlier) for earlier in known), default=0)
        assert (parts[-1].start, parts[-1].stop) == (shared, len(text))
        assert computed[-1] == len(text) - shared
        assert number == 0 or shared >= len(prompt) - 2, "but for the newest tokens"
        if number != 2:  # the last question goes on from the turn before
            prompt = (*request.prompt_ids, *request.output_ids)
    assert len(parts) == len(questions)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1),
        min(len(one), len(other)),
    )


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native steps"])
@pytest.mark.parametrize(("drafter", "kv"), [DRAFTS[0], DRAFTS[2]], ids=["none", "snapkv"])
def test_caches_of_all_windows_give_the_same_blocks(
    drafter: str | None, kv: KVSection, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sys.modules[__name__]
    for name in ("LONE", "MODEL", "PACKED"):
        model = model_of("some", seed=1)
        monkeypatch.setattr(own, name, pack(model) if name == "PACKED" else model)
    monkeypatch.setattr(own, "lone_outputs", {})
    seen = check(range(3), drafter, kv, is_native)
    assert seen["shared"] > 0, seen


def test_a_prompt_that_was_cancelled_leaves_what_it_has_computed() -> None:
    (prompt,) = random_prompts([80], 97, seed=3)
    runner = make_runner(MODEL, 1, 100, SDPABackend(8))
    with spoiled():
        runner = replace(runner, block_tokens=8, num_blocks=12, shares_prefixes=True)
        limits = BatchLimits(100, *runner.caches.limits, prefill_tokens=20)
        engine = Engine(runner, 64, limits, VirtualClock())
        strategy = make_strategy("autoregressive", Setup(runner, DecodingSection(), FULL))
        first, second = (
            replace(request, request_id=number)
            for number, request in enumerate(make_requests([prompt] * 2, 5, (EOS,)))
        )
        plans = list[StepPlan]()

        def watch(plan: StepPlan) -> None:
            plans.append(plan)
            if len(plans) == 2:
                engine.scheduler.cancel(first)

        engine.serve(strategy, [first, second], watch=watch)
    assert first.status is RequestStatus.CANCELLED and second.output_ids == lone_output(second)
    assert sum(sum(plan.shared_tokens.values()) for plan in plans) == 40


@pytest.mark.parametrize("num_blocks", [12, 9], ids=["for both beginnings", "with none to spare"])
def test_blocks_that_several_rows_hold_count_once(num_blocks: int) -> None:
    """Two texts that have 5 of their 7 blocks in common, so that they take 9."""
    (beginning,) = random_prompts([40], 97, seed=3)
    ends = random_prompts([7, 7], 97, seed=4)
    runner = make_runner(MODEL, 2, 64, SDPABackend(8))
    with spoiled():
        runner = replace(runner, block_tokens=8, num_blocks=num_blocks, shares_prefixes=True)
        engine = Engine(runner, 64, BatchLimits(64, *runner.caches.limits), VirtualClock())
        strategy = make_strategy("autoregressive", Setup(runner, DecodingSection(), FULL))
        first, second = make_requests([(*beginning, *end) for end in ends], MOST_NEW)
        second.arrived_s = 0.5
        plans = list[StepPlan]()
        engine.serve(strategy, [first, second], watch=plans.append)
    assert not any(plan.preempted for plan in plans)
    assert any(plan.decoding and len(plan.decoding.requests) == 2 for plan in plans)
    assert sum(sum(plan.shared_tokens.values()) for plan in plans) == 40
    for request in (first, second):
        assert request.output_ids == lone_output(request)


@given(st.data())
def test_a_path_is_what_was_kept_of_a_text(data: st.DataObject) -> None:
    """Beside a list of the texts that rows have left, as long as nothing is evicted."""
    cache = PrefixCache(2)
    size = 2
    text = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    rows: dict[int, list[int]] = {}
    known = set[tuple[int, ...]]()
    blocks = iter(range(10**6))
    held: dict[int, list[int]] = {}
    contents: dict[int, list[int]] = {}  # the tokens in each block

    def prefixes(tokens: Sequence[int], step: int) -> set[tuple[int, ...]]:
        return {tuple(tokens[:end]) for end in range(step, len(tokens) + 1, step)}

    for _ in range(data.draw(st.integers(1, 25))):
        leaving = data.draw(st.sets(st.integers(0, 2)))
        staying = [path for row, path in cache._paths.items() if row not in leaving]
        distinct = {node for path in staying for node in path}
        assert cache.num_repeated(leaving) == sum(map(len, staying)) - len(distinct)
        row = data.draw(st.integers(0, 2))
        if row in rows:
            tokens = rows.pop(row)
            kept = cache.leave(row, tokens, held[row])
            assert len(kept) >= len(prefixes(tokens, size) - known)
            known |= prefixes(tokens, 1)
            continue
        tokens = data.draw(text)
        found = cache.find(tokens)
        expected = {end for end in range(1, len(tokens)) if tuple(tokens[:end]) in known}
        assert found.num_tokens == max(expected, default=0)
        shared = [node.block for node in found.path]
        there = [token for block in shared for token in contents[block]]
        if found.source is not None:
            there += contents[found.source.block][: found.num_copied]
        assert there == tokens[: found.num_tokens]
        cache.adopt(row, found)
        check_tree(cache)
        if found.source is not None:
            cache.copied(row)
        new = [next(blocks) for _ in range(-(-len(tokens) // size) - len(shared))]
        held[row] = shared + new
        for at, block in enumerate(held[row]):
            contents[block] = tokens[at * size : (at + 1) * size]
        rows[row] = tokens
        if data.draw(st.booleans()):
            cache.keep(row, tokens, held[row])
            known |= {prefix for end in prefixes(tokens, size) for prefix in prefixes(end, 1)}


def test_the_oldest_goes_first_and_a_beginning_after_what_follows_it() -> None:
    cache = PrefixCache(1)
    cache.adopt(0, cache.find([1, 2, 3]))
    assert cache.leave(0, [1, 2, 3], [10, 11, 12]) == {10, 11, 12}
    cache.adopt(0, cache.find([5, 6]))
    assert cache.leave(0, [5, 6], [13, 14]) == {13, 14}
    found = cache.find([1, 2, 9])
    cache.adopt(1, found)
    assert [node.block for node in found.path] == [10, 11]
    assert cache.evict(2) == [12, 14], "the rest of the first text is the oldest"
    assert cache.leave(1, [1, 2, 9], [10, 11, 15]) == {10, 11, 15}
    assert cache.evict(9) == [13, 15, 11, 10] and not len(cache)


def test_host_memory_keeps_what_left_last() -> None:
    """Two places: the end of the first text is forgotten, and its beginning comes back."""
    cache = PrefixCache(1, num_places=2)
    cache.adopt(0, cache.find([1, 2, 3]))
    assert cache.leave(0, [1, 2, 3], [10, 11, 12]) == {10, 11, 12}
    assert cache.evict(3) == [12, 11, 10]
    assert cache.take_moved() == [(12, 1), (11, 0), (10, 1)]
    found = cache.find([1, 2, 3, 4])
    assert (found.num_tokens, found.num_from_host, found.num_needed(2)) == (2, 2, 2)
    cache.adopt(1, found)
    for node, block in zip(found.path, (20, 21), strict=True):
        cache.come_back(node, block)
    assert cache.find([1, 2, 9]).num_from_host == 0
    assert cache.leave(1, [1, 2, 3], [20, 21, 22]) == {20, 21, 22}
    assert cache.evict(1) == [22] and cache.find([1, 2, 3, 4]).num_from_host == 1
    assert sorted(cache.clear()) == [20, 21] and cache.find([1, 2, 9]).num_tokens == 0
    assert cache.evict(1) == [] and sorted(cache._free_places) == [0, 1]


def test_a_block_that_a_row_is_about_to_read_keeps_its_place() -> None:
    cache = PrefixCache(1, num_places=1)
    for row, token in enumerate((1, 2)):
        cache.adopt(row, cache.find([token]))
        cache.leave(row, [token], [10 + row])
    assert cache.evict(1) == [10] and cache.take_moved() == [(10, 0)]
    found = cache.find([1, 3])
    cache.adopt(2, found)
    assert cache.evict(1) == [11] and cache.take_moved() == [], "the other text is forgotten"
    assert found.path[0].place == 0 and cache.find([2, 3]).num_tokens == 0
