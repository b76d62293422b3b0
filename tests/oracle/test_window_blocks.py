"""Layers with a window hold no block that no token can see any more, and the tokens stay those of a
cache that keeps everything. What rows give back, and what they have not yet written, is full of
NaN here (`test_stale_kv.spoiled`)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import test_in_flight
import torch
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from recorder import Recorder
from test_in_flight import check_seeds, learn_lone_outputs
from test_stale_kv import spoiled

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection
from magicdec.kv import layer_caches
from magicdec.kv.cache import EVICTED
from magicdec.kv.layer_caches import LayerCaches, WindowRoom, storages_of
from magicdec.kv.layout import TILE
from magicdec.model.config import LayerKind
from magicdec.model.transformer import Transformer
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor

KINDS = {
    "some": (LayerKind(9), LayerKind()),
    "two": (LayerKind(21), LayerKind(9), LayerKind()),
    "all": (LayerKind(12),) * 2,
}
NUM_NEW, GAMMA, CHUNK, OBSERVED = 12, 3, 16, 5
SECTIONS = [
    ("self", KVSection("full")),
    ("self", KVSection("streaming_llm", 17, 0)),
    ("self", KVSection("snapkv", 16, window_size=OBSERVED, reselect_every=5)),
    ("self", KVSection("verified", 40, 4, recent_window=2)),
    ("self", KVSection("retrieval", 40, 4, recent_window=2)),
    ("model", KVSection("full")),
    ("model", KVSection("snapkv", 16, window_size=OBSERVED)),
]
IDS = [f"{drafter}-{kv.policy}" for drafter, kv in SECTIONS]
LENGTHS = {"grouped": (120, 24, 71), "sdpa": (120, 24, 71), "native steps": (330, 40, 231)}
# The rerun of `verified`, and what a draft's cache may lack.
ROOM = WindowRoom(NUM_NEW + GAMMA + 16 + 2, CHUNK)


@contextmanager
def small_blocks(num_tokens: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_caches, "WINDOW_BLOCK", num_tokens)
        yield


def model_of(kinds: str, seed: int = 0) -> Transformer:
    return tiny_transformer(
        replace(TINY, num_layers=len(KINDS[kinds]), layer_kinds=KINDS[kinds]), seed
    )


def decoded(
    kinds: str, name: str, drafter: str, kv: KVSection, room: WindowRoom | None, records: bool
) -> tuple[object, ModelRunner]:
    """The tokens of both passes over a ragged batch and what each step accepted, and the runner."""
    model = model_of(kinds)
    backends: dict[str, type[AttentionBackend]] = {"grouped": GroupedBackend}
    backends |= {"sdpa": SDPABackend, "native steps": NativeBackend}
    backend = SDPABackend(8) if name == "sdpa" else backends[name]()
    lengths = LENGTHS[name]
    size = len(lengths), max(lengths) + NUM_NEW + GAMMA
    executor = None
    runner = make_runner(model, *size, backend)
    if name == "native steps":
        executor = Executor(pack(model), runner.group)
    runner = replace(runner, executor=executor, window_room=room)
    draft = None
    if drafter == "model":
        draft = make_draft(model_of(kinds), kv, *size, type(backend)(), CHUNK)
        assert draft.runner is not None
        draft = replace(draft, runner=replace(draft.runner, window_room=room))
    requests = make_requests(random_prompts(lengths, 97), NUM_NEW)
    recorder = Recorder() if records else None
    return decode_both(runner, requests, kv, GAMMA, CHUNK, drafter, draft, recorder), runner


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("name", ["grouped", "sdpa", "captured", "native steps"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("drafter", "kv"), SECTIONS, ids=IDS)
def test_a_batch_emits_what_it_emits_with_every_token(
    drafter: str, kv: KVSection, kinds: str, name: str
) -> None:
    """Passes go back to the prompts' ends, a policy runs the newest tokens again, and steps may be
    captured."""
    records = name == "captured"
    name = "sdpa" if records else name
    expected, whole = decoded(kinds, name, drafter, kv, None, False)
    with small_blocks(TILE if name == "native steps" else 8), spoiled():
        found, runner = decoded(kinds, name, drafter, kv, ROOM, records)
    assert found == expected
    assert set(whole.caches.held) == {None}
    assert runner.caches.num_bytes < whole.caches.num_bytes
    check_held(runner, max(LENGTHS[name]))


def check_held(runner: ModelRunner, length: int) -> None:
    """A row that has had `length` tokens holds no more than the window and the room need."""
    for cache, window in zip(runner.caches.distinct, runner.caches.held, strict=True):
        held = [len(blocks) - blocks.count(EVICTED) for blocks in cache.blocks]
        size = cache.shape.block_size
        if window is None:
            assert max(held) * size >= length
        else:
            assert max(held) * size <= window + ROOM.rewound + ROOM.new + 2 * size


@pytest.fixture(params=["some", "all"])
def windowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`test_in_flight` serves longer texts with a model of these layers from now on."""
    kinds: str = request.param
    monkeypatch.setattr(test_in_flight, "LONE", model_of(kinds, seed=1))
    monkeypatch.setattr(test_in_flight, "MODEL", model_of(kinds, seed=1))
    monkeypatch.setattr(test_in_flight, "PACKED", pack(model_of(kinds, seed=1)))
    monkeypatch.setattr(test_in_flight, "lone_outputs", {})
    monkeypatch.setattr(test_in_flight, "PROMPTS", random_prompts([90, 2, 120, 5, 64, 33], 97))
    monkeypatch.setattr(test_in_flight, "MAX_TOKENS", 120 + 20 + 4)
    return kinds


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize(
    ("drafter", "kv", "records"),
    [
        (None, KVSection("full"), False),
        ("self", KVSection("streaming_llm", 12, 4), False),
        ("self", KVSection("snapkv", 12, window_size=5, reselect_every=3), False),
        ("model", KVSection("full"), False),
        (None, KVSection("full"), True),
    ],
    ids=["none", "streaming_llm", "snapkv", "model", "captured"],
)
def test_requests_in_flight(
    drafter: str | None,
    kv: KVSection,
    records: bool,
    windowed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are preempted, rows are taken over, and blocks of one row become another's."""
    seeds = [6]  # whose windows and pools are small
    learn_lone_outputs(seeds, drafter, False)
    seen = Counter[str]()
    make_room = LayerCaches.make_room

    def counted(caches: LayerCaches, rows: list[int], num_new: int) -> None:
        make_room(caches, rows, num_new)
        for cache, window in zip(caches.distinct, caches.held, strict=True):
            seen["given back"] += window is not None and any(cache.first_held)

    monkeypatch.setattr(LayerCaches, "make_room", counted)
    with small_blocks(4), spoiled():
        check_seeds(seeds, drafter, kv, records=records)
    assert seen["given back"] > 0


def test_going_back_further_than_was_said_is_an_error() -> None:
    with small_blocks(8):
        runner = make_runner(model_of("some"), 1, 200)
        runner = replace(runner, window_room=WindowRoom(10, 16))
    runner.allocate(0)
    for chunk in torch.tensor(random_prompts([160], 97)).split(16, dim=1):
        runner.forward(chunk, [0])
    runner.truncate([0], [150])
    runner.forward(torch.tensor([[5]]), [0])
    runner.truncate([0], [120])
    with pytest.raises(AssertionError, match="row 0 went back to 120 tokens"):
        runner.forward(torch.tensor([[5]]), [0])
    runner.release(0)
    assert not any(cache.blocks[0] or cache.first_held[0] for cache in runner.caches.distinct)


def test_a_text_that_is_hardly_longer_than_the_window_is_kept() -> None:
    room, size = WindowRoom(30, 64), 64
    block_size = lambda tokens: -(-tokens // size) * size  # noqa: E731
    whole, small, large = storages_of([None, 40, 900], room, 3, 1000, block_size)
    assert whole == large and (whole.block_size, whole.num_blocks, whole.held) == (1024, 3, None)
    assert (small.block_size, small.num_blocks, small.held) == (64, 3 * 4, 40)
    pool = storages_of([None, 40], room, 3, 1000, block_size, 128, 5)
    assert [(each.num_blocks, each.held) for each in pool] == [(5, None), (5, None)]
