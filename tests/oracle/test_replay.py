"""Steps that are recorded once and replayed, as with CUDA graphs, against steps that the host
starts. They emit the same tokens, whichever rows end at whichever step, also if requests are
sampled or have penalties, and accept as many drafts in each step.

Sampled rows run in float64, because sums of other shapes round differently, and a random number may
fall between the two results. A draft model with SnapKV is an exception: when replayed, it computes
the newest token of the prompt again, which then sees only the chosen tokens, so other drafts are
drawn. The sampled rows then emit other tokens of the same distribution, which is tested below;
greedy rows emit the same tokens.

Triton's kernels for attention have grids and splits of the longest possible row, and the lengths at
the time of the replay. Steps with its elementwise kernels emit the tokens of torch's operators.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from chi_squared import ACCEPTED
from conftest import (
    TINY,
    decode,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    served_pairs,
    that_drafts,
    tiny_transformer,
)
from draft_heads import is_head, made_head, state_layers
from launches import dispatched
from recorder import HostTouched, StandInRecorder
from test_lossless import SMALL
from test_sampled_speculation import SECTION, emitted, exact_distribution, p_of
from test_varying_gamma import Scripted

from magicdec.attention import triton
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.sections import (
    BESIDE_TARGET,
    DecodingSection,
    KVSection,
    SamplingSection,
    model_drafter_of,
)
from magicdec.engine.engine import Engine
from magicdec.kv import kernel_view
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.model.config import LayerKind
from magicdec.model.elementwise import triton as elementwise
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise
from magicdec.model.linear import triton as linear
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Batch, Request, StepOutput
from magicdec.runner.sampling.model_tokens import CountedAcceptance
from magicdec.runner.sampling.sampling import make_params
from magicdec.speculation.draft_length import DraftLength, Measure
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.steps.recorder import CudaGraphs, Eager
from magicdec.speculation.steps.recorder import Recorder as AnyRecorder
from magicdec.speculation.steps.strategy import Setup, make_strategy

PAIRS = sorted(served_pairs(), key=str)
MIXED = [
    ("ngram+self", "streaming_llm"),
    ("ngram+self", "snapkv"),
    ("ngram+model", "full"),
    ("ngram+eagle", "full"),
]
PROMPTS = [60, 1, 30, 80, 20]
NUM_NEW = [16, 9, 24, 3, 13]  # rows end at different steps; the third row is the last
MOST = 31  # drafts: those of a lookup
SCRIPT = (3, 0, 0, 0, 0, 0, 0, 2, 5, 0, 1)  # with long pauses of drafting
GREEDY = SamplingSection()
WARM = SamplingSection(temperature=0.9)
FILTERED = SamplingSection(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=4)
PENALISED = SamplingSection(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5)
GREEDY_PENALISED = SamplingSection(repetition_penalty=1.2, presence_penalty=-0.5)
KINDS = {
    "greedy": [GREEDY] * 5,
    "temperature": [WARM] * 5,
    "filters": [FILTERED] * 5,
    "penalties": [PENALISED] * 5,
    "greedy with penalties": [GREEDY_PENALISED, GREEDY, GREEDY_PENALISED, GREEDY, GREEDY],
    # The last rows to end are greedy: a greedy batch in steps that were recorded with sampling.
    "mixed": [WARM, FILTERED, GREEDY, PENALISED, GREEDY_PENALISED],
}
ALIKE = [kind for kind in KINDS if kind not in ("greedy", "mixed")]  # all rows are sampled alike


class OneAlone(Scripted):
    """The measurement also measures one row alone, while the others are not active."""

    def begin(self, batch: Batch, measure: Measure) -> None:
        measure(Batch(batch.requests[1:2]))
        super().begin(batch, measure)


def section_of(policy: str | None) -> KVSection:
    return KVSection("full") if policy in (None, "full") else KVSection(policy, 48, 4, 8)


def started(
    kind: str = "greedy",
    sliding_window: int | None = None,
    block_size: int = 16,
    device: str = "cpu",
    kv: KVSection = KVSection("full"),
) -> tuple[Engine, list[Request]]:
    """An engine that has prefilled the prompts, and its snapshots. Its backend reads what drafts
    under `kv` do."""
    config = replace(TINY, layer_kinds=(LayerKind(sliding_window),))
    dtype = torch.float32 if kind == "greedy" else torch.float64
    model = tiny_transformer(config, dtype=dtype)
    size = max(PROMPTS) + max(NUM_NEW) + MOST
    runner = make_runner(model.to(device), len(PROMPTS), size, SDPABackend(block_size))
    engine = Engine(that_drafts(runner, kv), 64)
    prompts = random_prompts(PROMPTS, TINY.vocab_size)
    rows = zip(prompts, NUM_NEW, KINDS[kind], strict=True)
    requests = [Request(i, p, make_params(s, n, (), i)) for i, (p, n, s) in enumerate(rows)]
    return engine, engine.prefill(requests)


def draft_for(kv: KVSection, runner: ModelRunner, drafter: str = "model") -> DraftModel:
    dtype = next(runner.model.parameters()).dtype
    if is_head(drafter):
        head = made_head(runner.model, drafter=drafter).to(runner.device)
        head.target_ids = head.target_ids.to(runner.device)
        layers = state_layers(drafter, runner.model.config)
        runner.observers.append(HiddenStates.of(runner, layers))
        return make_draft(head, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))
    model = tiny_transformer(SMALL, seed=1, dtype=dtype).to(runner.device)
    return make_draft(model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))


def run(
    engine: Engine,
    snapshots: Sequence[Request],
    drafter: str | None,
    kv: KVSection,
    gamma: int | str,
    recorder: AnyRecorder | None,
    length: DraftLength | None = None,
    pa: float | None = None,
) -> tuple[list[list[int]], list[list[int]], ForwardCounts]:
    """The emitted tokens, the accepted drafts of each step, and the counts of the target's
    forwards."""
    runner = engine.runner
    engine.rewind(snapshots)
    name = "autoregressive" if drafter is None else "speculative"
    draft = None
    if drafter and model_drafter_of(drafter) in BESIDE_TARGET:
        draft = draft_for(kv, runner, drafter)
    section = DecodingSection(name, drafter, gamma, pa=pa)
    setup = Setup(
        runner, section, kv, draft=draft, draft_length=length, recorder=recorder or Eager()
    )
    accepted: list[list[int]] = []
    before = runner.counts.copy()
    finished = decode(
        engine, name, setup, lambda ids, out, s: accepted.append(out.num_accepted or [])
    )
    return [list(r.output_ids) for r in finished], accepted, runner.counts.minus(before)


Result = tuple[list[list[int]], list[list[int]], ForwardCounts]


def check_same(pair: tuple[str | None, str | None], kind: str, eager: Result, ours: Result) -> None:
    is_resampled = kind != "greedy" and pair == ("model", "snapkv")
    assert is_resampled or ours[:2] == eager[:2]
    assert [len(tokens) for tokens in ours[0]] == NUM_NEW
    for sampling, expected, found in zip(KINDS[kind], eager[0], ours[0], strict=True):
        assert found == expected or (is_resampled and sampling.temperature > 0)


@pytest.mark.narrow(8)
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    ("drafter", "policy", "kind"),
    [
        case
        for i, pair in enumerate([(None, None), *PAIRS, *MIXED])
        for case in (
            (*pair, ("greedy", "mixed")[i % 2]),
            pytest.param(*pair, ("mixed", "greedy")[i % 2], marks=pytest.mark.wide),
            pytest.param(*pair, ALIKE[i % len(ALIKE)], marks=pytest.mark.wide),
        )
    ],
    ids=str,
)
def test_replayed_steps_emit_the_same_tokens(
    drafter: str | None, policy: str | None, kind: str
) -> None:
    kv = section_of(policy)
    engine, snapshots = started(kind, kv=kv)
    recorder = StandInRecorder()
    eager = run(engine, snapshots, drafter, kv, 4, None)
    ours = run(engine, snapshots, drafter, kv, 4, recorder)
    check_same((drafter, policy), kind, eager, ours)
    _, accepted, read = ours
    counts = eager[2]
    assert recorder.recorded and recorder.replayed >= len(accepted)
    if accepted == eager[1]:
        assert read.num_forwards == counts.num_forwards
        assert read.kv_tokens_read == counts.kv_tokens_read
        assert read.kv_bytes_read == counts.kv_bytes_read
    if drafter == "self" and policy != "full":  # a view of the target's own cache
        counts_of_rows = [count for step in accepted for count in step]
        assert 0 < sum(counts_of_rows) < 4 * len(counts_of_rows), (
            "drafts were accepted and rejected"
        )


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["mixed", "greedy with penalties"])
@pytest.mark.parametrize(("drafter", "policy"), [(None, None), *PAIRS], ids=str)
def test_graphs_on_a_gpu_sample_the_same_tokens(
    drafter: str | None, policy: str | None, kind: str
) -> None:
    kv = section_of(policy)
    engine, snapshots = started(kind, device="cuda", kv=kv)
    graphs = CudaGraphs(torch.device("cuda"))
    eager = run(engine, snapshots, drafter, kv, 4, None)
    check_same((drafter, policy), kind, eager, run(engine, snapshots, drafter, kv, 4, graphs))


@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.narrow(4)
@pytest.mark.parametrize(
    ("drafter", "policy", "kind"),
    [
        *((*pair, kind) for pair in [*PAIRS, *MIXED] for kind in ("greedy", "mixed")),
        *(
            pytest.param(*pair, "greedy with penalties", marks=pytest.mark.wide)
            for pair in dict(PAIRS).items()  # a pair of each drafter
        ),
    ],
    ids=str,
)
def test_replayed_steps_of_any_draft_lengths_emit_the_same_tokens(
    drafter: str, policy: str | None, kind: str
) -> None:
    """Some steps draft nothing. The measurement of `--gamma auto` comes first, of one row and of
    all."""
    kv = section_of(policy)
    engine, snapshots = started(kind, kv=kv)
    recorder = StandInRecorder()
    eager, ours = (
        run(engine, snapshots, drafter, kv, "auto", used, OneAlone(SCRIPT))
        for used in (None, recorder)
    )
    check_same((drafter, policy), kind, eager, ours)
    if kind == "greedy":
        assert ours[0] == run(engine, snapshots, None, kv, 4, None)[0]
    # Lookups of 1, 2, 4, 8, 16 and 31 tokens, or none; a model drafts up to 5. A draft model begins
    # with one token or with two.
    # A head begins with one token, with two or with nine.
    counts = {"ngram": 7 + 6, "ngram+self": 9 + 8 + 5, "ngram+model": 9 + 8 + 2 * 5}
    counts |= dict.fromkeys(["ngram+eagle", "ngram+mtp"], 9 + 8 + 3 * 5)
    drafts = {"model": 2, "eagle": 3, "mtp": 3}.get(drafter, 1)
    if drafter in BESIDE_TARGET and policy == "streaming_llm":  # not captured
        drafts = 0
    assert recorder.recorded == counts.get(drafter, 1 + (1 + drafts) * 5)


@pytest.mark.parametrize("policy", ["full", pytest.param("streaming_llm", marks=pytest.mark.wide)])
def test_a_replayed_draft_of_a_larger_vocabulary_samples_the_same_tokens(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models share the history of emitted tokens."""
    larger = replace(SMALL, vocab_size=131)
    monkeypatch.setattr(sys.modules[__name__], "SMALL", larger)
    engine, snapshots = started("mixed")
    eager = run(engine, snapshots, "model", section_of(policy), 4, None)
    ours = run(engine, snapshots, "model", section_of(policy), 4, StandInRecorder())
    assert ours[:2] == eager[:2]


@pytest.mark.wide
def test_replayed_steps_keep_the_targets_distribution() -> None:
    """This is tested for the steps that need not sample the same tokens as steps that the host
    starts."""
    kv = KVSection("snapkv", 4, window_size=2)
    counts = emitted("speculative", "model", kv, 3, StandInRecorder())
    assert p_of(counts, exact_distribution(SECTION)) > ACCEPTED


@pytest.mark.parametrize(
    "kv", [KVSection("full"), KVSection("snapkv", 250, window_size=8)], ids=str
)
def test_a_full_replayed_draft_is_accepted_after_any_pause(kv: KVSection) -> None:
    """The draft has the target's own weights, so all its drafts are accepted, however many tokens
    it had to catch up with."""
    engine, snapshots = started()
    runner = engine.runner
    draft = make_draft(runner.model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))
    engine.rewind(snapshots)
    setup = Setup(
        runner,
        DecodingSection("speculative", "model", "auto"),
        kv,
        draft=draft,
        draft_length=Scripted(SCRIPT),
        recorder=StandInRecorder(),
    )
    steps: list[tuple[int, list[int]]] = []
    decode(
        engine,
        "speculative",
        setup,
        lambda ids, out, s: steps.append((out.draft_width, out.num_accepted or [])),
    )
    assert {n for n, _ in steps} == set(SCRIPT)
    assert all(accepted == [n] * len(accepted) for n, accepted in steps)


def test_replayed_steps_of_measured_draft_lengths_emit_the_same_tokens() -> None:
    """The measurement runs one row alone while the others are not active. Then all rows go on."""
    engine, snapshots = started()
    kv = section_of("streaming_llm")
    recorder = StandInRecorder()
    expected = run(engine, snapshots, None, kv, 4, None)[0]
    assert run(engine, snapshots, "self", kv, "auto", recorder)[0] == expected
    assert recorder.recorded == 1 + 2 * 8


@pytest.mark.narrow(3)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(
    ("policy", "budget", "num_new", "seed"),
    # With these prompts the last step of the first row accepts all drafts.
    [("full", 100, 7, 0), ("snapkv", 100, 7, 0), ("snapkv", 48, 9, 17)],
)
def test_a_row_that_ended_in_its_last_block_writes_into_no_other_row(
    policy: str, budget: int, num_new: int, seed: int, block_size: int
) -> None:
    """An ended row is still computed, so the tokens that it appends need room and positions. The
    last of its blocks may reach beyond the last position of the model's rotary table, and so may a
    small cache whose tokens were chosen from a longer text."""
    runner = make_runner(tiny_transformer(), 2, 60 + num_new + 4, SDPABackend(block_size))
    engine = Engine(runner, 64)
    requests = make_requests(random_prompts([60, 4], TINY.vocab_size, seed), [num_new, 60])
    snapshots = engine.prefill(requests)
    kv = replace(section_of(policy), budget=budget)
    expected = run(engine, snapshots, "self", kv, 4, None)[0]
    assert max(runner.cache.lengths) == runner.max_tokens - 1
    assert run(engine, snapshots, "self", kv, 4, StandInRecorder())[0] == expected


@pytest.mark.parametrize(
    ("policy", "reselect_every"),
    [
        pytest.param("full", 0, marks=pytest.mark.wide),
        ("streaming_llm", 0),
        pytest.param("snapkv", 0, marks=pytest.mark.wide),
        ("snapkv", 9),
        pytest.param("verified", 0, marks=pytest.mark.wide),
    ],
)
def test_replayed_steps_follow_windows_and_new_choices(policy: str, reselect_every: int) -> None:
    """The texts grow past the sliding window of the model. SnapKV chooses again between replays."""
    engine, snapshots = started(sliding_window=64)
    kv = replace(section_of(policy), reselect_every=reselect_every)
    expected, accepted, counts = run(engine, snapshots, "self", kv, 3, None)
    found, replayed, read = run(engine, snapshots, "self", kv, 3, StandInRecorder())
    assert found == expected and replayed == accepted
    assert (read.kv_tokens_read, read.num_forwards) == (counts.kv_tokens_read, counts.num_forwards)


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "branch": lambda x: bool(x.any()),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "from a list": lambda x: x + torch.tensor([1, 2, 3]),
    "by a list": lambda x: x[[0, 1]],
}


def noted(
    engine: Engine, snapshots: Sequence[Request], drafter: str, recorder: AnyRecorder
) -> tuple[list[list[int]], list[StepOutput]]:
    """The texts and the steps if drafts are judged at every position, and none is kept."""
    engine.rewind(snapshots)
    decoding = DecodingSection("speculative", drafter, 3)
    kv = KVSection("streaming_llm", 24, 4)
    setup = Setup(engine.runner, decoding, kv, recorder=recorder, rule=CountedAcceptance())
    steps: list[StepOutput] = []
    finished = decode(engine, "speculative", setup, lambda ids, out, s: steps.append(out))
    assert {len(tokens) for out in steps for tokens in out.token_ids} == {1}
    return [list(r.output_ids) for r in finished], steps


@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.narrow(3)
@pytest.mark.parametrize("kind", ["greedy", "filters", "penalties"])
@pytest.mark.parametrize("drafter", ["self", "ngram", "ngram+self"])
def test_replayed_steps_have_the_same_probabilities_of_acceptance(drafter: str, kind: str) -> None:
    engine, snapshots = started(kind)
    texts, steps = noted(engine, snapshots, drafter, Eager())
    replayed_texts, replayed = noted(engine, snapshots, drafter, StandInRecorder())
    assert replayed_texts == texts
    for ours, theirs in zip(replayed, steps, strict=True):
        if kind == "greedy":
            assert ours.acceptance is theirs.acceptance is None
            continue
        assert (ours.acceptance is None) == (theirs.acceptance is None) == (not ours.draft_width)
        rows = zip(ours.acceptance or [], theirs.acceptance or [], strict=True)
        assert all(our_row == pytest.approx(row, abs=1e-12) for our_row, row in rows)
        assert [len(row) for row in ours.acceptance or []] == (ours.num_drafted or [])
    assert any(out.draft_width for out in steps)


@pytest.mark.parametrize("name", TOUCHES)
def test_the_recorder_refuses_what_a_graph_refuses(name: str) -> None:
    x = torch.tensor([1, 2, 3])

    def work() -> torch.Tensor:
        TOUCHES[name](x)
        return x

    with pytest.raises(HostTouched), torch.inference_mode():
        StandInRecorder().record(work)


def test_a_replay_reads_the_present_values_of_tensors() -> None:
    """This holds for updates in place and through views. Values of the host stay as they were when
    it was recorded."""
    x = torch.tensor([1, 2, 3])
    total = torch.zeros(1, dtype=torch.int64)
    factor = [2]

    def work() -> torch.Tensor:
        total.add_(x[1:].sum() * factor[0])
        return total * 1

    replay = StandInRecorder().record(work)
    x += 10
    factor[0] = 100
    assert total.item() == 10 and replay().item() == 10 + 2 * 25 and total.item() == 60


class BrokenCapture:
    """Stands in for `torch.cuda.graph`: as there, the end of a capture that an error has broken
    fails too, before the stream is set back."""

    def __init__(self, streams: list[str]) -> None:
        self.streams = streams

    def __call__(self, *args: object) -> BrokenCapture:
        return self

    def __enter__(self) -> None:
        self.streams.append("the capture's")

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("capture_end: the capture was invalidated")


def test_a_failed_capture_says_its_first_error_and_restores_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = ["the program's"]
    for name, value in {
        "Stream": str,
        "CUDAGraph": object,
        "graph_pool_handle": lambda: None,
        "graph": BrokenCapture(streams),
        "current_stream": lambda device: streams[-1],
        "set_stream": streams.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def work() -> torch.Tensor:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    graphs = CudaGraphs(torch.device("cuda"))
    with pytest.raises(RuntimeError) as refused:
        graphs.record(work)
    assert str(refused.value) == "--cuda_graphs on: operation not permitted; choose off"
    assert streams == ["the program's", "the capture's", "the program's"]


class Capture:
    """Stands in for `torch.cuda.graph`: a capture fails if the pool has been used and none of its
    graphs is left, or if garbage could be collected during it, which may free a graph."""

    used = False
    living: ClassVar[weakref.WeakSet[Capture]] = weakref.WeakSet()

    def __call__(self, graph: Capture, *args: object) -> Capture:
        assert not Capture.used or Capture.living, "the pool has ended"
        Capture.used = True
        Capture.living.add(graph)
        return self

    def __enter__(self) -> None:
        assert not gc.isenabled()

    def __exit__(self, *error: object) -> None:
        pass

    def replay(self) -> None:
        pass


def test_graphs_are_captured_after_all_earlier_ones_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next batch captures its steps when those of the last one are freed. On an H200 torch then
    failed with "use_count > 0", and where a graph was freed within a capture, the capture did."""
    for name, value in {
        "Stream": str,
        "CUDAGraph": Capture,
        "graph_pool_handle": lambda: None,
        "graph": Capture(),
        "current_stream": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs = CudaGraphs(torch.device("cpu"))
    for number in range(3):
        replay = graphs.record(lambda number=number: torch.tensor(number))
        assert replay() == number and gc.isenabled()
        assert len(Capture.living) == 2, "this one, and the one that keeps the pool"
        del replay


def test_graphs_of_an_earlier_pass_are_freed_before_others_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps hold what they captured, which holds the steps."""
    monkeypatch.setattr(torch.cuda, "Stream", str)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    earlier = SimpleNamespace(memory=torch.zeros(1))
    earlier.works = [earlier]
    memory = weakref.ref(earlier.memory)
    gc.disable()
    try:
        del earlier
        assert memory() is not None, "a cycle"
        CudaGraphs(torch.device("cuda"))
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv", "verified"])
def test_a_step_on_a_gpu_waits_once(policy: str, graphs: bool) -> None:
    """The host waits for the result of the verification. Drafting, views and truncation do not wait
    for the device."""
    device = torch.device("cuda")
    model = tiny_transformer().to(device)
    runner = make_runner(model, 2, 200, SDPABackend(16))
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([90, 60], TINY.vocab_size), 60))
    recorder = CudaGraphs(device) if graphs else None
    section = DecodingSection("speculative", "self", 3)
    setup = Setup(runner, section, section_of(policy), recorder=recorder or Eager())
    strategy = make_strategy("speculative", setup)
    engine.begin(strategy)
    for _ in range(4):
        plan = engine.scheduler.schedule()
        assert plan is not None and plan.decoding is not None
        batch = plan.decoding
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = strategy.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        engine.scheduler.commit(batch, output, 0.0)
        # The first use of the mode in a process also warns that it is a prototype.
        texts = [f"{w.filename}:{w.lineno}: {w.message}" for w in waits]
        texts = [text for text in texts if "synchronizing" in text and "prototype" not in text]
        assert len(texts) == 1, texts


interprets = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="graphs themselves are there, or no triton is installed",
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the attention kernels that were launched, also in a replay."""
    with dispatched(triton.load_kernels("cpu")) as found:
        monkeypatch.setattr(triton, "load_kernels", lambda device: found)
        yield found.made


@pytest.fixture
def all_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The same of all kernels of a forward."""
    others = elementwise, kernel_view, linear
    with dispatched(triton.load_kernels("cpu"), *(m.kernels("cpu") for m in others)) as found:
        monkeypatch.setattr(triton, "load_kernels", lambda device: found)
        for module in others:
            monkeypatch.setattr(module, "kernels", lambda device: found)
        yield found.made


@interprets
@pytest.mark.wide
@pytest.mark.parametrize(("policy", "window"), [("snapkv", None), ("streaming_llm", 18)])
def test_replayed_steps_of_tritons_attention_emit_the_eager_tokens(
    policy: str, window: int | None, launches: list[str]
) -> None:
    """`test_dry_run.py` replays those of other policies."""
    config = replace(
        TINY, num_layers=1, num_heads=4, num_kv_heads=2, layer_kinds=(LayerKind(window),)
    )
    runner = make_runner(tiny_transformer(config), 2, 26 + 4 + 2, TritonBackend(2))
    engine = Engine(runner, 26)
    prompts = random_prompts([26, 1], TINY.vocab_size)
    snapshots = engine.prefill(make_requests(prompts, [3, 4]))
    kv = KVSection(policy, 20, 4, 8)
    recorder = StandInRecorder()
    expected, accepted, counts = run(engine, snapshots, "self", kv, 2, None)
    launches.clear()
    found, replayed, read = run(engine, snapshots, "self", kv, 2, recorder)
    assert (found, replayed) == (expected, accepted)
    assert read.kv_tokens_read == counts.kv_tokens_read
    assert launches.count("attend") > recorder.replayed > 0


@pytest.mark.wide
@interprets
@pytest.mark.parametrize(("drafter", "policy"), [(None, None), ("self", "streaming_llm")], ids=str)
def test_replayed_steps_emit_the_tokens_of_torchs_operators(
    drafter: str | None, policy: str | None, all_launches: list[str]
) -> None:
    launches = all_launches
    runner = make_runner(tiny_transformer(), 3, 20 + 7 + 3, SDPABackend(16))
    engine = Engine(runner, 20)
    requests = make_requests(random_prompts([20, 1, 9], TINY.vocab_size), [4, 7, 5])
    snapshots = engine.prefill(requests)
    recorder = StandInRecorder()
    model = runner.model
    kv = KVSection("full") if policy is None else KVSection(policy, 12, 4)
    expected, accepted, _ = run(engine, snapshots, drafter, kv, 3, None)
    assert type(model.elementwise) is Elementwise and not launches
    model.use(TritonElementwise())
    found, replayed, _ = run(engine, snapshots, drafter, kv, 3, recorder)
    assert (found, replayed) == (expected, accepted)
    assert recorder.replayed >= len(replayed)
    a_forward = 4 * model.config.num_layers + 2
    assert len(launches) % a_forward == 0 and len(launches) > recorder.replayed * a_forward
    assert set(launches) == {"norm_rows", "rotate_heads", "gate_rows", "describe_rows"}
