"""Texts of models whose layers keep states begin with those of other texts, and emit what they emit
alone: conversations that fork, are cancelled and preempted, whose blocks are evicted and whose
snapshots give way to others."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import decode, make_requests, random_prompts
from fake_clock import VirtualClock
from test_in_flight import MOST_DRAFTS, OBSERVED
from test_prefix_cache import FULL, MOST_NEW, draw_talk, serve
from test_stale_kv import spoiled
from tiny_hybrids import the_model

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.kv.prefix_cache import SnapshotRoom
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.transformer import Transformer
from magicdec.runner.layer_states import StateRoom
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, RequestStatus
from magicdec.runner.step_plan import BatchLimits, PrefillChunk, StepPlan
from magicdec.speculation.steps.strategy import Setup, make_strategy

VOCAB = 97
BLOCK = 8
SEEDS = 6
FEWEST = 16  # that a policy runs again after a snapshot, of 5 drafts
ROOM = StateRoom(MOST_DRAFTS + FEWEST + 6, rerun=5)
DRAFTS = {
    "none": (None, FULL),
    "streaming_llm": ("self", KVSection("streaming_llm", 12, 4)),
    "snapkv": ("self", KVSection("snapkv", 12, window_size=5, reselect_every=3)),
    "verified": ("self", KVSection("verified", 20, 2, recent_window=2)),
    "retrieval": ("self", KVSection("retrieval", 20, 2, recent_window=2)),
    "model": ("model", FULL),
    "lookup": ("ngram", FULL),
    "head": ("mtp", FULL),
}
OBSERVING = ("snapkv", "verified", "retrieval")
lone_outputs: dict[tuple[int, ...], list[int]] = {}


@cache
def hybrid(folder: Path) -> Transformer:
    reference: Any = the_model(VOCAB)
    reference.save_pretrained(folder)
    source = find_model("--model", str(folder))
    cpu = torch.device("cpu")
    return load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return hybrid(tmp_path_factory.mktemp("hybrid"))


def runner_of(model: Transformer, num_rows: int, max_tokens: int) -> ModelRunner:
    place = SDPABackend(BLOCK), Group((0,), 0), num_rows, max_tokens
    return ModelRunner(
        model, *place, max_following=MOST_NEW + MOST_DRAFTS + OBSERVED, state_room=ROOM
    )


def shared_runner(
    model: Transformer,
    num_rows: int,
    max_tokens: int,
    num_blocks: int,
    num_snapshots: int,
    fewest_after: int = 1,
) -> ModelRunner:
    return replace(
        runner_of(model, num_rows, max_tokens),
        block_tokens=BLOCK,
        num_blocks=num_blocks,
        shares_prefixes=True,
        snapshots=SnapshotRoom(num_snapshots, fewest_after),
    )


def lone_output(model: Transformer, request: Request) -> list[int]:
    """The tokens that the request emits alone, by autoregressive decoding of a static batch."""
    key = (*request.prompt_ids, -request.sampling.max_new_tokens)
    if key not in lone_outputs:
        runner = runner_of(model, 1, len(request.prompt_ids) + MOST_NEW)
        engine = Engine(runner, 64)
        engine.prefill([Request(0, request.prompt_ids, request.sampling)])
        setup = Setup(runner, DecodingSection(), FULL)
        lone_outputs[key] = decode(engine, "autoregressive", setup)[0].output_ids
    return lone_outputs[key]


@pytest.mark.parametrize(("drafter", "kv"), DRAFTS.values(), ids=DRAFTS)
def test_turns_emit_what_they_emit_alone(
    drafter: str | None, kv: KVSection, model: Transformer
) -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        random = Random(seed)
        talk = draw_talk(random, False, lambda request: lone_output(model, request))
        least = -(-talk.most_tokens // BLOCK)
        num_blocks = least + random.choice((0, 1, 2, 2 * least))
        num_rows = random.randint(1, 3)
        if seed % 2:  # all at once, in little room: some are preempted
            num_rows = 3
            num_blocks = least + 1
            for request in talk.requests:
                request.arrived_s = 0.0
        num_snapshots = random.choice((2 * num_rows, 40))
        sizes = num_rows, talk.most_tokens, num_blocks, num_snapshots
        runner = shared_runner(model, *sizes, FEWEST if kv.policy in OBSERVING else 1)
        with spoiled():
            seen += serve(random, talk, runner, drafter, kv)
        for request in talk.requests:
            expected = lone_output(model, request)
            if request.status is RequestStatus.CANCELLED:
                expected = expected[: len(request.output_ids)]
            assert request.output_ids == expected, (seed, request.request_id)
        prefixes = runner.caches.prefixes
        assert prefixes is not None
        seen["snapshots"] += len(prefixes._taken)
    assert seen["shared"] > 0 and seen["copied"] > 0 and seen["evicted"] > 0, seen
    assert drafter is not None or seen["preempted"] > 0, seen


def test_what_is_computed_of_a_turn_is_what_no_snapshot_has(model: Transformer) -> None:
    """A question after an answer begins at the answer's end, though that is within a block; one
    that leaves the answer out begins at the prompt's end; one that leaves a text in its middle is
    computed whole, and leaves a snapshot where the texts part, with which the next begins."""
    begin, first, second, third, fourth = random_prompts([43, 6, 7, 5, 9], VOCAB, seed=3)
    runner = shared_runner(model, 1, 160, 60, 10)
    setup = Setup(runner, DecodingSection(), FULL, is_in_flight=True)
    strategy = make_strategy("autoregressive", setup)
    engine = Engine(runner, 64, BatchLimits(160, *runner.caches.limits, 1), VirtualClock())
    starts = list[list[tuple[int, int]]]()

    def ask(*prompt: int) -> Request:
        (request,) = make_requests([prompt], MOST_NEW)
        parts = list[PrefillChunk]()

        def watch(plan: StepPlan) -> None:
            parts.extend(plan.parts)

        engine.serve(strategy, [replace(request, request_id=len(starts))], watch=watch)
        starts.append([(part.start, part.stop) for part in parts])
        request = parts[0].request
        assert request.output_ids == lone_output(model, request)
        return request

    asked = ask(*begin, *first)
    text = (*asked.prompt_ids, *asked.output_ids)
    ask(*text, *second)
    ask(*asked.prompt_ids, *third)
    ask(*begin, *fourth)
    ask(*begin, *third, *fourth)
    size = len(begin)
    prompt = size + len(first)
    assert starts == [
        [(0, prompt)],
        [(len(text) - 1, len(text) + len(second))],
        [(prompt, prompt + len(third))],
        [(0, 40), (40, size + len(fourth))],
        [(40, size + len(third) + len(fourth))],
    ]
