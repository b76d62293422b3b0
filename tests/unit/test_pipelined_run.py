"""Pipelined speculation in threads: lossless with every drafter, asynchronous, and cancellation
saves exactly the layers that it should."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from threading import Event

import pytest
import torch
from conftest import (
    TINY,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from several_ranks import generate_alone
from threaded_pipeline import FakeStage, ServedInThreads, divide, serve

from magicdec.config.sections import KVSection, SamplingSection
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.request import Request
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.setup.loading import make_backend
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import (
    DraftRequest,
    LookupPathDrafter,
    ModelPathDrafter,
    PathDrafter,
    candidate_of,
    pack_candidate,
)
from magicdec.systems.pipeinfer.run_stage import SLOTS, CancelBoard, Canceller, RunStage
from magicdec.systems.pipeinfer.scripted_drafter import ScriptedPathDrafter
from magicdec.systems.stages.spans import Span, SpanKind

LENGTHS = [5, 40, 1, 33]
NEW = [20, 9, 20, 14]
MAX_TOKENS = 90
CHUNK = 16
PATIENCE_S = 60.0
GREEDY = SamplingSection()
SAMPLED = SamplingSection(temperature=0.9, top_p=0.95, seed=4)
PENALISED = SamplingSection(repetition_penalty=1.3, presence_penalty=0.5)
SAMPLED_PENALISED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5)


@cache
def target() -> Transformer:
    return tiny_transformer(replace(TINY, num_layers=5))


@cache
def similar() -> Transformer:
    """The target with other numbers here and there: it is often right, and often wrong."""
    draft = tiny_transformer(replace(TINY, num_layers=5))
    generator = torch.Generator()
    generator.manual_seed(0)
    for p in draft.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * 0.02 * p.std())
    return draft


def requests(sampling: SamplingSection = GREEDY) -> list[Request]:
    """Two end tokens end some of them early."""
    return make_requests(random_prompts(LENGTHS, 97), NEW, (11, 40), sampling, is_coupled=True)


@cache
def one_process(sampling: SamplingSection = GREEDY) -> list[list[int]]:
    return generate_alone(target(), requests(sampling), MAX_TOKENS)


def scripted(is_right: bool) -> ScriptedPathDrafter:
    return ScriptedPathDrafter(one_process(), LENGTHS, [[is_right] * 40] * len(LENGTHS), 0.9)


KV = {
    "full": KVSection("full"),
    "streaming_llm": KVSection("streaming_llm", 12, 2),
    "snapkv": KVSection("snapkv", 12, window_size=4),
}


def model_drafter(
    model: Transformer, policy: str, lanes: int, sampling: SamplingSection = GREEDY
) -> ModelPathDrafter:
    draft = make_draft(model, KV[policy], lanes, MAX_TOKENS, max_drafts=max(NEW))
    return ModelPathDrafter(draft, KV[policy], TINY.vocab_size, CoupledSampling(sampling))


def make_drafter(name: str, lanes: int) -> PathDrafter:
    kind, _, policy = name.partition(" ")
    if kind in ("model", "self"):
        return model_drafter(similar() if kind == "model" else target(), policy, lanes)
    return LookupPathDrafter() if name == "lookup" else scripted(name == "right")


@pytest.mark.narrow("values")
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    "drafter",
    [
        "model full",
        "model streaming_llm",
        "self streaming_llm",
        "self snapkv",
        "lookup",
        "right",
        "wrong",
    ],
)
@pytest.mark.parametrize(
    ("mode", "lanes"), [("pipeline", 3), ("pipeline+draft", 1), ("pipeinfer", 1), ("pipeinfer", 3)]
)
def test_the_tokens_are_those_of_one_process(mode: str, lanes: int, drafter: str) -> None:
    served = requests()
    parts = [RunStage(make_runner(part, lanes, MAX_TOKENS)) for part in divide(target(), 3)]
    options = Options(mode=mode, gamma=3, pa=0.1, lanes=lanes)
    found = serve(parts, make_drafter(drafter, lanes), options, served, CHUNK)
    assert [request.output_ids for request in served] == one_process()
    counts = found.scheduler.counts
    if mode != "pipeinfer":  # in which a busy machine may leave no time to draft
        assert (counts.num_drafted > 0) == (mode == "pipeline+draft")
    if drafter == "right" and mode == "pipeinfer":
        assert counts.num_accepted == counts.num_drafted and not counts.invalid_runs
    for stage, part in zip(found.stages, parts, strict=True):
        assert len(stage) == counts.runs and max(s.value for s in stage) == part.num_layers


def least_margin(request: Request) -> float:
    """By how much the largest logit exceeds the second, at the output token where this is least."""
    text = [*request.prompt_ids, *request.output_ids]
    runner = make_runner(target(), 1, MAX_TOKENS)
    runner.allocate(0)
    logits = runner.forward(ForwardBatch(torch.tensor([text[:-1]]), [0]))[
        0, len(request.prompt_ids) - 1 :
    ]
    largest = logits.topk(2, dim=-1).values
    return float((largest[:, 0] - largest[:, 1]).min())


@pytest.mark.parametrize("policy", KV)
def test_self_speculation_is_right_as_far_as_it_reads_what_the_target_reads(policy: str) -> None:
    """No end token, after which the target's tokens are not known."""
    served = make_requests(random_prompts(LENGTHS, 97), NEW)
    parts = [RunStage(make_runner(part, 2, MAX_TOKENS)) for part in divide(target(), 2)]
    options = Options(mode="pipeline+draft", gamma=3, pa=0.0, lanes=2)
    found = serve(parts, make_drafter(f"self {policy}", 2), options, served, CHUNK)
    counts = found.scheduler.counts
    assert counts.num_drafted > counts.num_accepted > 0 or policy == "full"
    assert (counts.num_accepted == counts.num_drafted) == (policy == "full")
    # A difference of two logits of about 5, each with the rounding of float32 in five layers.
    assert counts.least_margin == pytest.approx(min(map(least_margin, served)), abs=2e-5)


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("mode", "drafter"),
    [
        ("pipeline", "lookup"),
        ("pipeline+draft", "similar"),
        ("pipeline+draft", "target"),
        ("pipeinfer", "lookup"),
        ("pipeinfer", "similar"),
        ("pipeinfer", "target"),
    ],
)
@pytest.mark.parametrize("section", [SAMPLED, PENALISED, SAMPLED_PENALISED])
def test_sampled_tokens_are_those_of_one_process(
    section: SamplingSection, mode: str, drafter: str
) -> None:
    """The same noise chooses them, whatever is drafted, and the last stage and the drafter know the
    text that penalties depend on. If the target drafts for itself, every candidate is right."""
    served = requests(section)
    sampling = CoupledSampling(section)
    options = Options(mode=mode, gamma=3, pa=0.05, lanes=2)
    parts = [RunStage(make_runner(part, 2, MAX_TOKENS), sampling) for part in divide(target(), 2)]
    drafts: PathDrafter = LookupPathDrafter()
    if drafter != "lookup":
        model = target() if drafter == "target" else similar()
        drafts = model_drafter(model, "full", 2, section)
    found = serve(parts, drafts, options, served, CHUNK)
    assert [request.output_ids for request in served] == one_process(section) != one_process()
    counts = found.scheduler.counts
    if drafter != "lookup" and mode == "pipeline+draft":
        assert counts.num_accepted > 10
    if drafter == "target":
        assert counts.num_accepted == counts.num_drafted and not counts.invalid_runs


@pytest.mark.parametrize("backend", ["grouped", "sdpa"])
def test_a_draft_model_gives_what_it_gives_anew(backend: str) -> None:
    """Whatever path it was asked for before, and whether it computes a path at once or not."""

    def make() -> ModelPathDrafter:
        kv = KV["full"]
        draft = make_draft(similar(), kv, 2, MAX_TOKENS, make_backend(backend))
        return ModelPathDrafter(draft, kv, TINY.vocab_size)

    drafter = make()
    seen = list[int]()
    forward = drafter.kv.forward
    drafter.kv.forward = lambda *args: seen.append(args[0].numel()) or forward(*args)  # type: ignore
    text = list(random_prompts([50], 97)[0])
    lengths = (20, 20, 20, 21, 24, 50, 50)
    steps = [(5, 6), (5, 6, 7), (5, 9), (text[21], 4), (3,), (), (9, 9)]
    kept = [0, 0]
    for lane in (0, 1):
        seen.clear()
        for end, path in zip(lengths, steps, strict=True):
            asked = DraftRequest(0, lane, kept[lane], tuple(text[kept[lane] : end]), path)
            kept[lane] = end
            mine = drafter.propose(asked, text[:end])
            theirs = make().propose(DraftRequest(0, 0, 0, tuple(text[:end]), path), text[:end])
            assert mine is not None and theirs is not None
            assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-5)
        # Forwards: 5 6; 7; 9; text[20], text[21] and 4; text[22:24] and 3; text[24:50], of which 16
        # tokens are a chunk; and 9 9.
        assert seen == [2, 1, 1, 3, 3, 16, 10, 2]


def gated_round() -> tuple[ServedInThreads, CancelBoard]:
    """Runs 1 (the newest token), 2 and 3 (wrong drafts) are in flight. The middle one of three
    stages stops in run 2 before its layer 2 until the runs are cancelled; run 1 goes home when run
    3 has left the first stage."""
    board = CancelBoard()
    run_3_is_out = Event()

    def at_first(run: int) -> None:
        if run == 3:
            run_3_is_out.set()

    def in_middle(run: int, layer: int) -> None:
        if (run, layer) == (2, 2):
            while not board.is_cancelled(3):
                Event().wait(0.001)

    def at_last(run: int, layer: int) -> None:
        if run == 1:
            assert run_3_is_out.wait(PATIENCE_S)

    parts = [
        FakeStage(4, False, computed=at_first),
        FakeStage(4, False, wait=in_middle),
        FakeStage(4, True, wait=at_last),
    ]
    drafter = ScriptedPathDrafter([[1, 2, 3, 4, 5]], [1], [[False] * 5], 0.9)
    options = Options(gamma=1, max_in_flight=3)
    served = make_requests([(9,)], 5)
    found = serve(parts, drafter, options, served, board=board)
    assert served[0].output_ids == [1, 2, 3, 4, 5]
    return found, board


def test_a_cancelled_run_skips_exactly_the_layers_that_are_left() -> None:
    found, _ = gated_round()
    layers = [{span.run: span.value for span in stage} for stage in found.stages]
    assert [counts[1] for counts in layers] == [4, 4, 4]
    assert [counts[2] for counts in layers] == [4, 2, 0], "stopped in the middle stage; then void"
    assert [counts[3] for counts in layers] == [4, 0, 0], "it waited behind run 2"
    runs = found.scheduler.counts.runs
    assert all(len(counts) == runs for counts in layers), "every run passes every stage"
    assert {s.run for s in found.head if s.what is SpanKind.RESULT and s.value} >= {2, 3}


def overlap(a: Span, b: Span) -> bool:
    return a.begin_s < b.end_s and b.begin_s < a.end_s


def signs(found: ServedInThreads) -> list[bool]:
    """Whether runs were launched before the first result of a run before them, a draft step
    overlaps a stage, and two stages were busy with different runs at one time."""
    decoding = [s for s in found.head if s.what in (SpanKind.LAUNCH, SpanKind.RESULT) and s.run > 0]
    first_result = next(i for i, s in enumerate(decoding) if s.what is SpanKind.RESULT)
    work = [span for stage in found.stages for span in stage]
    pairs = combinations(found.stages, 2)
    return [
        first_result >= 2,
        any(overlap(draft, span) for draft in found.drafts for span in work),
        any(overlap(a, b) for one, other in pairs for a in one for b in other if a.run != b.run),
    ]


@pytest.mark.parametrize(("mode", "expected"), [("pipeinfer", True), ("pipeline+draft", False)])
def test_it_is_asynchronous(mode: str, expected: bool) -> None:
    """The last stage holds the first run until the first stage begins another one, which no time
    decides; where none comes before the first has ended, it gives up."""
    has_next = threading.Event()

    def begin(run: int, layer: int) -> None:
        if run > 1:
            has_next.set()
        time.sleep(0.005)

    def hold(run: int, layer: int) -> None:
        if run == 1:
            has_next.wait(PATIENCE_S if expected else 0.05)

    drafter = ScriptedPathDrafter([list(range(1, 30))], [1], [[True] * 29], 0.9, 0.002)
    waits = [begin, lambda run, layer: time.sleep(0.005), hold]
    parts = [FakeStage(2, number == 2, wait=wait) for number, wait in enumerate(waits)]
    found = serve(parts, drafter, Options(mode=mode, gamma=2), make_requests([(9,)], 29))
    assert signs(found) == [expected] * 3


def test_a_board_knows_what_was_cancelled() -> None:
    board = CancelBoard()
    Canceller(board).cancel([3, 5])
    assert [run for run in range(8) if board.is_cancelled(run)] == [3, 5]
    assert not board.is_cancelled(3 + SLOTS)


def test_messages_arrive_as_they_were_sent() -> None:
    asked = DraftRequest(3, 1, 7, (5, 6), (8, 9))
    message = asked.to_message(12)
    assert message.run == 12 and DraftRequest.from_message(message) == asked
    for path in (None, ()):
        asked = DraftRequest(0, 0, 0, (1,), path)
        assert DraftRequest.from_message(asked.to_message(0)) == asked
    for candidate in ((3, 0.5), None):
        assert candidate_of(pack_candidate(2, candidate)) == candidate
    assert message.words[:2] == (3, 1)


def test_an_error_in_a_thread_ends_the_head() -> None:
    def fail(run: int, layer: int) -> None:
        if run == 2:
            raise RuntimeError("the stage broke")

    parts: Sequence[FakeStage] = [FakeStage(2, False, wait=fail), FakeStage(2, True)]
    drafter = ScriptedPathDrafter([[1, 2, 3]], [1], [[True] * 3], 0.9)
    with pytest.raises(RuntimeError, match="the stage broke"):
        serve(parts, drafter, Options(mode="pipeline"), make_requests([(9,)], 9))
