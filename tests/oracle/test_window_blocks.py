"""Layers with a window hold no block that no token can see any more, and the tokens stay those of a
cache that keeps everything. What rows give back, and what they have not yet written, is full of
NaN here (`test_stale_kv.spoiled`)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import test_in_flight
import torch
from conftest import (
    TINY,
    decode_both,
    load,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    save_checkpoint,
    that_drafts,
    tiny_transformer,
)
from recorder import StandInRecorder
from serving_command import prepare_as
from several_ranks import generate_alone
from test_in_flight import check_seeds, learn_lone_outputs
from test_stale_kv import spoiled
from two_stages import SecondStage

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.channels.message import Ends
from magicdec.distributed.groups import Group
from magicdec.kv import layer_caches
from magicdec.kv.cache import EVICTED, KVCache
from magicdec.kv.layer_caches import WindowRoom, storages_of
from magicdec.kv.layout import TILE
from magicdec.model.config import LayerKind
from magicdec.model.transformer import Transformer
from magicdec.output.console import Silent
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.request import Request
from magicdec.runner.step_plan import BatchLimits
from magicdec.setup.loading import LoadedModels
from magicdec.setup.loading import make_runner as loaded_runner
from magicdec.speculation.ngram import NgramDrafter
from magicdec.systems.flover.system import Flover
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.observer import PassObserver
from magicdec.systems.system import System
from magicdec.systems.system import make_requests as requests_to_serve

KINDS = {
    "some": (LayerKind(9), LayerKind()),
    "two": (LayerKind(21), LayerKind(9), LayerKind()),
    "all": (LayerKind(12),) * 2,
}
NUM_NEW = 12
GAMMA = 3
CHUNK = 16
OBSERVED = 5
SECTIONS = [
    ("self", KVSection("full")),
    ("self", KVSection("streaming_llm", 17, 0)),
    ("self", KVSection("snapkv", 16, window_size=OBSERVED, reselect_every=5)),
    ("self", KVSection("verified", 40, 4, recent_window=2)),
    ("self", KVSection("retrieval", 40, 4, recent_window=2)),
    ("self", KVSection("quantised")),
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
    runner = that_drafts(make_runner(model, *size, backend), kv)
    if name == "native steps":
        executor = Executor(pack(model), runner.group)
    runner = replace(runner, executor=executor, window_room=room)
    draft = None
    if drafter == "model":
        draft = make_draft(model_of(kinds), kv, *size, type(backend)(), CHUNK)
        assert draft.runner is not None
        draft = replace(draft, runner=replace(draft.runner, window_room=room))
    requests = make_requests(random_prompts(lengths, 97), NUM_NEW)
    recorder = StandInRecorder() if records else None
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


@contextmanager
def blocks_given_back() -> Iterator[Counter[KVCache]]:
    """How many blocks each cache has given back before the end of their row."""
    evict = KVCache.evict
    given_back = Counter[KVCache]()

    def counted(cache: KVCache, row: int, first: int, last: int) -> None:
        given_back[cache] += last - first
        evict(cache, row, first, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "evict", counted)
        yield given_back


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
    with small_blocks(4), spoiled(), blocks_given_back() as given_back:
        check_seeds(seeds, drafter, kv, records=records)
    assert given_back.total() > 0


FLAGS = (
    "--dtype",
    "float32",
    "--attention",
    "grouped",
    "--native_steps",
    "off",
    "--ignore_eos",
    "--threads",
    "1",
    "--prefill_chunk",
    str(CHUNK),
    "--num_requests",
    "5",
    "--prefix_len",
    "uniform:120:200",
    "--gen_len",
    "uniform:8:30",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a window at both ends, so that both stages of a ring have one."""
    kinds = LayerKind(21), LayerKind(), LayerKind(21)
    sizes = {"num_layers": 3, "layer_kinds": kinds, "vocab_size": 2051}
    config = replace(TINY, architecture="MinistralForCausalLM", **sizes)
    return save_checkpoint(tiny_transformer(config), tmp_path_factory.mktemp("windows"))


def requests_of(system: System) -> list[Request]:
    """Those that the system is to serve."""
    prompts = system.run.workload.prompts
    shapes = system.options.shapes
    return requests_to_serve(prompts, shapes, 0.0, SamplingSection())


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.usefixtures("lookups_of_ones")
def test_a_ring_emits_the_tokens_of_lone_runs(gamma: int, checkpoint: Path, tmp_path: Path) -> None:
    """Two stages in this process, with the caches that their ranks plan, in blocks of their size.
    Drafts are wrong, so that every step truncates its rows."""
    torch.set_num_threads(1)  # as the command would
    drafts = ["--draft", "ngram", "--gamma", str(gamma)] if gamma else []
    words = ["--model", str(checkpoint), *FLAGS, "--n_samples", "4", "--B", "2", *drafts]
    words += ["--modes", "ring+draft" if gamma else "ring"]
    (ring,) = prepare_as("serve", tmp_path, *words, world_size=2).systems
    plans = [ring.model_plans(ring.passes[0], rank)[0] for rank in range(2)]
    expected = generate_alone(load(checkpoint), requests_of(ring), plans[0].tokens)
    models = LoadedModels(torch.device("cpu"), Silent())
    with spoiled(), blocks_given_back() as given_back:
        runners = [loaded_runner(plan, ring.run.source, Group((0,), 0), models) for plan in plans]
        first, last = (Stage(runner, runner.model.is_last) for runner in runners)
        ends = SecondStage(last)
        speculation = None
        if gamma:
            drafter = NgramDrafter(first.runner.num_rows, gamma, first.runner.device)
            speculation = RingSpeculation(first.runner, drafter, gamma)
        limits = BatchLimits(plans[0].tokens, prefill_tokens=2 * CHUNK, step_tokens=1 + gamma)
        place = Ends(ends, ends), 2, 2, limits, CHUNK
        requests = requests_of(ring)
        RecurrentPipeline(first, *place, speculation=speculation).serve(requests)
    assert outputs(requests) == expected
    for runner in runners:
        narrow = runner.caches.distinct[-1]
        assert narrow.shape.block_size == layer_caches.WINDOW_BLOCK and given_back[narrow] > 0


@pytest.mark.narrow(2)
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--draft self --gamma 3 --kv_policy full",
        "--draft self --gamma 3 --kv_policy snapkv --budget 32 --window_size 5 --reselect_every 5",
        "--draft self --gamma 3 --kv_policy verified --budget 80",
    ],
    ids=["no drafts", "full", "snapkv", "verified"],
)
def test_requests_in_flight_go_back_no_further_than_is_planned(
    words: str, checkpoint: Path, tmp_path: Path
) -> None:
    """In blocks so small that one token more than the plan has room for would be lost. What is
    given back is not `spoiled` here: copies of SnapKV read past the ends of rows, and forget it."""
    torch.set_num_threads(1)
    mode = "inflight+draft" if words else "inflight"
    flags = ["--model", str(checkpoint), *FLAGS, "--B", "2", "--modes", mode, *words.split()]
    with small_blocks(1), blocks_given_back() as given_back:
        (batching,) = prepare_as("serve", tmp_path, *flags).systems
        assert isinstance(batching, Flover)
        (serving_pass,) = batching.passes
        batching.open(serving_pass, torch.device("cpu"), Silent())
        requests = requests_of(batching)
        batching.serve(serving_pass, requests, PassObserver())
    assert batching.runner is not None and given_back.total() > 0
    assert outputs(requests) == generate_alone(load(checkpoint), requests_of(batching), 256)


def test_going_back_further_than_was_said_is_an_error() -> None:
    with small_blocks(8):
        runner = make_runner(model_of("some"), 1, 200)
        runner = replace(runner, window_room=WindowRoom(10, 16))
    runner.allocate(0)
    for chunk in torch.tensor(random_prompts([160], 97)).split(16, dim=1):
        runner.forward(ForwardBatch(chunk, [0]))
    runner.truncate([0], [150])
    runner.forward(ForwardBatch(torch.tensor([[5]]), [0]))
    runner.truncate([0], [120])
    with pytest.raises(AssertionError, match="row 0 went back to 120 tokens"):
        runner.forward(ForwardBatch(torch.tensor([[5]]), [0]))
    runner.release(0)
    assert not any(cache.blocks[0] or cache.first_held[0] for cache in runner.caches.distinct)


def test_a_text_that_is_hardly_longer_than_the_window_is_kept() -> None:
    room = WindowRoom(30, 64)
    size = 64
    block_size = lambda tokens: -(-tokens // size) * size  # noqa: E731
    whole, small, large = storages_of([None, 40, 900], room, 3, 1000, block_size)
    assert whole == large and (whole.block_size, whole.num_blocks, whole.held) == (1024, 3, None)
    assert (small.block_size, small.num_blocks, small.held) == (64, 3 * 4, 40)
    pool = storages_of([None, 40], room, 3, 1000, block_size, 128, 5)
    assert [(storage.num_blocks, storage.held) for storage in pool] == [(5, None), (5, None)]
