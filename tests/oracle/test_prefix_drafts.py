"""After a hit of the prefix cache a draft is what it is after a prefill of the same text: every
drafter and policy proposes the same tokens at every position, of the same logits, reads the same
positions, and has as many accepted, on random conversations that fork, whose blocks are evicted, or
go to host memory and come back."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import VirtualClock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_in_flight import EOS, MODEL, OBSERVED
from test_prefix_cache import draft_for, lone_output
from test_stale_kv import spoiled
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import NAMED, DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.engine.scheduler import StepCounts
from magicdec.kv import prefix_cache
from magicdec.kv.cache import BatchRows
from magicdec.kv.prefix_cache import PrefixCache
from magicdec.names import EAGLE, NGRAM_AND
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import Digest, DraftLog
from magicdec.runner.request import Request, StepOutput
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.draft_length import FixedLength
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy

GAMMA = 3
MOST_NEW = 9
FULL = KVSection("full")
STREAMING = KVSection("streaming_llm", 12, 4)
DRAFTS = {
    "window": ("self", STREAMING),
    "snapkv": ("self", KVSection("snapkv", 12, window_size=5, reselect_every=3)),
    "verified": ("self", KVSection("verified", 20, 2, recent_window=2)),
    "retrieval": ("self", KVSection("retrieval", 20, 2, recent_window=2)),
    "model": ("model", FULL),
    "model snapkv": ("model", KVSection("snapkv", 12, window_size=5)),
    "model rolls": ("model", STREAMING),
    "sinks of two blocks": ("model", KVSection("streaming_llm", 17, 11)),
    "a budget below a block": ("model", KVSection("streaming_llm", 5, 2)),
    "no sinks": ("model", KVSection("streaming_llm", 9, 0)),
    "head": ("eagle", FULL),
    "head rolls": ("eagle", STREAMING),
    "lookup": ("ngram", FULL),
    "lookup and model": ("ngram+model", STREAMING),
    "lookup and head": ("ngram+eagle", FULL),
}


@pytest.fixture(autouse=True)
def few_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small here."""
    monkeypatch.setattr(prefix_cache, "LEAST_COPIED", 1)


@dataclass(frozen=True)
class Steps:
    """Of one request, by step: what was drafted and read, and how many of these were accepted."""

    drafts: list[Digest] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list, compare=False)  # of each draft token


@dataclass
class Served:
    """What was served in a pass."""

    outputs: list[list[int]]
    steps: dict[int, Steps]
    counts: StepCounts
    computed_by_draft: int = 0
    evicted_by_draft: int = 0
    came_back: int = 0
    came_back_to_draft: int = 0


@st.composite
def conversations(draw: st.DrawFn) -> list[Request]:
    """Texts that begin with one of two, and go on from any one before, or from a part of it."""
    random = Random(draw(st.integers(0, 10**6)))

    def text(most: int) -> tuple[int, ...]:
        return tuple(random.choices(range(3, TINY.vocab_size), k=draw(st.integers(1, most))))

    texts = [text(40), text(40)]
    requests = list[Request]()
    for number in range(draw(st.integers(4, 5))):
        before = draw(st.sampled_from(texts[-4:]))
        before = before[: draw(st.sampled_from((len(before), len(before), len(before) // 2)))]
        prompt = (*before, *text(20))
        (request,) = make_requests([prompt], draw(st.sampled_from((1, 5, MOST_NEW))), (EOS,))
        requests.append(replace(request, request_id=number))
        texts.append((*prompt, *lone_output(request)))
    return requests


def two_in_turns() -> list[Request]:
    """Two conversations that take turns, so that the blocks of one leave while the other goes on.
    Questions are short, so that drafts read what was there before. At last one goes on from its
    second turn, and another text begins as it does and ends soon."""
    random = Random(0)

    def text(count: int) -> tuple[int, ...]:
        return tuple(random.choices(range(3, TINY.vocab_size), k=count))

    begin, other = text(29), text(29)
    prompts = list[tuple[int, ...]]()

    def ask(*before: tuple[int, ...]) -> tuple[int, ...]:
        prompts.append((*chain(*before), *text(4)))
        (request,) = make_requests([prompts[-1]], MOST_NEW)
        return (*prompts[-1], *lone_output(request))

    first = ask(begin)
    lone = ask(other)
    second = ask(first)
    ask(lone)
    ask(second)
    ask(second)
    prompts.append((*begin[:9], *text(1)))
    requests = make_requests(prompts, MOST_NEW)
    return [replace(request, request_id=number) for number, request in enumerate(requests)]


@dataclass(frozen=True)
class Sizes:
    """Rows, chunks and pools. With `spare` None there is room for all texts."""

    num_rows: int
    prefill_tokens: int | None
    gap: float  # between two arrivals
    spare: int | None  # blocks of 8 tokens beside those that rows can need
    host_tokens: int  # of blocks that go to host memory


def sizes(num_rows: int | None) -> st.SearchStrategy[Sizes]:
    return st.builds(
        Sizes,
        st.integers(1, 3) if num_rows is None else st.just(num_rows),
        st.sampled_from((None, 6, 16)),
        st.sampled_from((0.0, 3.0, 100.0)) if num_rows is None else st.just(0.0),
        st.sampled_from((0, 3, None)),
        st.sampled_from((1000, 30, 0)),
    )


def serve(
    asked: Sequence[Request], sizes: Sizes, drafter: str, kv: KVSection, shares: bool
) -> Served:
    """Serve the requests with a fixed number of drafts a step."""
    requests = [
        replace(request, output_ids=[], token_times_s=[], arrived_s=number * sizes.gap)
        for number, request in enumerate(asked)
    ]
    most = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests) + 1 + GAMMA
    runner = make_runner(MODEL, sizes.num_rows, most, SDPABackend(8), MOST_NEW + GAMMA + OBSERVED)
    needed = sizes.num_rows * -(-most // 8)
    room = 30 * sizes.num_rows if sizes.spare is None else sizes.spare
    if shares:
        runner = replace(
            runner,
            block_tokens=8,
            num_blocks=needed + room,
            shares_prefixes=True,
            host_tokens=sizes.host_tokens,
        )
    log = DraftLog()
    runner.set_observer(DraftLog, log)
    draft = own = None
    if drafter.removeprefix(NGRAM_AND) in NAMED:
        # A budget below a block is passed within one.
        draft = draft_for(runner, drafter, kv, most, shares, chunk=8 if kv.budget > 8 else 2)
        own = draft.runner
        assert own is not None, "this rank drafts"
        if shares:
            draft = replace(draft, runner=with_pool(own, room, sizes.host_tokens))
            own = draft.runner
            assert own is not None
        own.set_observer(DraftLog, log)
    keep_queries(own or runner, kv)
    setup = Setup(
        runner,
        DecodingSection("speculative", drafter, GAMMA),
        kv,
        draft=draft,
        draft_length=FixedLength(GAMMA),
        recorder=Eager(),
        is_in_flight=True,
    )
    strategy = make_strategy("speculative", setup)
    limits = BatchLimits(most, *runner.caches.limits, 1 + GAMMA, sizes.prefill_tokens)
    engine = Engine(runner, 64, limits, VirtualClock())
    served = Served([], defaultdict(Steps), StepCounts())
    if own is not None and own.caches.prefixes is not None:
        count_evictions(own.caches.prefixes, served)

    watch_logits(own or runner, engine, served)

    def observe(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        assert output.digests is not None, "a log is kept"
        accepted = output.num_accepted or [0] * len(request_ids)
        digests = output.digests or [("", 0)] * len(request_ids)
        for request_id, digest, count in zip(request_ids, digests, accepted, strict=True):
            served.steps[request_id].drafts.append(digest)
            served.steps[request_id].accepted.append(count)

    engine.serve(strategy, requests, observe, served.counts.watch)
    served.outputs += [request.output_ids for request in requests]
    served.came_back = came_back(runner)
    served.came_back_to_draft = 0 if own is None else came_back(own)
    served.computed_by_draft = 0 if own is None else own.counts.num_tokens
    return served


def watch_logits(runner: ModelRunner, engine: Engine, served: Served) -> None:
    """Keep the logits of drafts, but those that are read from a copy of the cache."""
    forward = runner.forward

    def watched(batch: ForwardBatch) -> Tensor:
        out = forward(batch)
        if batch.is_draft and batch.num_outputs == 1:
            rows = BatchRows.of(batch.rows, runner.device).numbers
            for row, logits in zip(rows, out[:, -1], strict=True):
                request = engine.scheduler.rows[row]
                assert request is not None, "it drafts"
                served.steps[request.request_id].logits.append(logits.clone())
        return out

    runner.forward = watched  # type: ignore[method-assign]


def with_pool(runner: ModelRunner, room: int, host_tokens: int) -> ModelRunner:
    """The runner of a draft, with so many blocks beside those that its rows can need."""
    num_blocks = runner.num_rows * -(-runner.max_tokens // runner.cache.shape.block_size) + room
    return replace(runner, num_blocks=num_blocks, host_tokens=host_tokens)


def came_back(runner: ModelRunner) -> int:
    """Blocks that were copied from host memory, a source once for each copy."""
    moves = runner.caches.moves
    assert moves.num_out or not moves.num_in, "they have gone there before"
    return moves.num_in


def count_evictions(prefixes: PrefixCache, served: Served) -> None:
    evict = prefixes.evict

    def counted(count: int) -> list[int]:
        blocks = evict(count)
        served.evicted_by_draft += len(blocks)
        return blocks

    prefixes.evict = counted  # type: ignore[method-assign]


@pytest.mark.narrow(8)
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(("drafter", "kv"), DRAFTS.values(), ids=DRAFTS)
def test_drafts_after_a_hit_are_those_after_a_prefill(drafter: str, kv: KVSection) -> None:
    """Lookups learn from what others have accepted before: one request after the other."""
    seen = Counter[str]()
    num_rows = 1 if drafter.startswith("ngram") else None
    num_examples = 4 if drafter.endswith(EAGLE) else 2  # fewer miss a planted fault of heads

    @settings(max_examples=num_examples)
    @example(two_in_turns(), Sizes(1, None, 0.0, 0, 1000))
    @given(conversations(), sizes(num_rows))
    def check(asked: list[Request], drawn: Sizes) -> None:
        cold = serve(asked, drawn, drafter, kv, shares=False)
        with spoiled():
            warm = serve(asked, drawn, drafter, kv, shares=True)
        expected = [lone_output(request) for request in asked]
        assert cold.outputs == warm.outputs == expected
        if warm.counts.num_preemptions:  # a request that joins again drafts elsewhere
            return
        assert warm.steps == cold.steps
        for number, steps in warm.steps.items():
            pairs = zip(steps.logits, cold.steps[number].logits, strict=True)
            seen["logits"] += len(steps.logits)
            assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs)
        seen["found"] += warm.counts.num_found
        seen["accepted"] += sum(sum(steps.accepted) for steps in warm.steps.values())
        seen["saved"] += cold.computed_by_draft - warm.computed_by_draft
        seen["came back"] += warm.came_back
        seen["came back to a draft"] += warm.came_back_to_draft
        seen["evicted"] += warm.evicted_by_draft
        seen["compared"] += 1

    check()
    assert seen["found"] > 0 and seen["compared"] > 1 and seen["came back"] > 0, seen
    assert seen["logits"] > 0 or "snapkv" in kv.policy or drafter == "ngram", seen
    assert seen["accepted"] > 0 or (drafter, kv) != ("model", FULL), seen
    if drafter.removeprefix(NGRAM_AND) in NAMED:
        assert seen["saved"] > 0 and seen["evicted"] > 0, seen
        assert seen["came back to a draft"] > 0, seen
