"""Pipelined speculation of `magicdec serve`: what is refused before any rank starts, in one line;
which rank does what, also of a draft model on several ranks; and the metrics of spans."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_requests
from serving_command import prepare_as

from magicdec.bench.recording import MeasuredParts, describe_requests
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.layout import PipelineLayout, make_layout
from magicdec.output.console import make_progress
from magicdec.records.computing import Beside, pass_metrics
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import GroupRecord
from magicdec.runner.request import Moves, Request
from magicdec.setup.loading import LoadedModels, make_draft
from magicdec.systems.modes import Pass
from magicdec.systems.pipeinfer.details import Observed, speculation_metrics
from magicdec.systems.pipeinfer.scheduler import Counts
from magicdec.systems.pipeinfer.system import PipeInfer
from magicdec.systems.stages.spans import Span, SpanKind

EMULATED = ("--emulate_stage_ms", "20", "--emulate_acceptance", "0.5", "--modes", "pipeinfer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer_split", "0.5,0.5/1.0"], "--layer_split 0.5,0.5/1.0 names 3 ranks, but 2 were"),
        (["--layer_split", "1.0/0.6,0.4"], "1.0/0.6,0.4: behind the slash is head, or 1.0"),
        (["--layer_split", "1.0/0.9"], "1.0/0.9: behind the slash is head, or 1.0"),
        (["--layer_split", "auto", *EMULATED], "--layer_split auto: with --emulate_stage_ms 20.0"),
        (["--draft", "model:nowhere"], "--draft 'nowhere' is not known"),
        (["--draft", "model:random:llama-68m"], "--model demo of 2048; a draft needs its"),
        (["--draft", "self", "--kv_policy", "verified"], "choose from full, streaming_llm, snap"),
        (["--draft", "self", "--budget", "9"], "--budget 9 must be larger than --num_sink_tok"),
        (["--draft", "self", "--kv_policy", "full", "--budget", "9"], "reads the whole cache"),
        (["--modes", "pipeline", "--budget", "99"], "autoregressive decoding drafts nothing"),
        (["--sampling_seed", "5"], "--sampling_seed does nothing here: --temperature 0 is greedy"),
    ],
)
def test_refuses_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        prepare_as("pipeline", tmp_path, "--num_requests", "2", *words, world_size=2)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("split", "sizes", "draft_rank", "stages"),
    [
        (None, [3, 3], 0, [0, 1]),
        ("0.1,0.4,0.5/1.0", [1, 2, 3, 0], 3, [0, 1, 2]),
        ("0,1.0/head", [0, 6], 0, [1]),
        ("0,2,4/1", [0, 2, 4, 0], 3, [1, 2]),
        ("6/1.0", [6, 0], 1, [0]),
        ("auto/1.0", [3, 3, 0], 2, [0, 1]),
        ("1.0", [6, 6], 0, [0]),
        ("2,4/head", [2, 2, 4, 4], 0, [0, 2]),
        ("0,auto:2/1.0", [0, 3, 3, 3, 3, 0], 5, [1, 3]),
    ],
)
def test_every_rank_has_its_part(
    split: str | None, sizes: list[int], draft_rank: int, stages: list[int]
) -> None:
    layout = make_layout(split, len(sizes), 6)
    assert [len(layers) for layers in layout.layers] == sizes
    assert layout.draft_rank == draft_rank and layout.stages == stages
    held = [layer for stage in layout.stages for layer in layout.layers[stage]]
    assert held == list(range(6))
    assert layout.with_layers([layout.layers[stage] for stage in layout.stages]) == layout


def test_ranks_of_a_stage_follow_each_other() -> None:
    layout = make_layout("0,2,4/1.0", 6, 6)
    assert (layout.stages, layout.tensor_parallel) == ([1, 3], 2)
    assert [layout.group_of(rank) for rank in (0, 1, 4, 5)] == [(0,), (1, 2), (3, 4), (5,)]
    names = [layout.describe(rank) for rank in range(6)]
    assert names == [
        "head",
        "stage 0 shard 0",
        "stage 0 shard 1",
        "stage 1 shard 0",
        "stage 1 shard 1",
        "draft",
    ]
    with pytest.raises(ValueError, match="names 3 ranks, but 4 were started; start 3, or equally"):
        make_layout("3,3/1.0", 4, 6)


def test_stages_of_several_ranks_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"5,1, stages of 5 ranks: .*heads"):
        prepare_as("pipeline", tmp_path, "--layer_split", "5,1", world_size=10)
    with pytest.raises(ValueError, match=r"auto:1/1.0: stages of 2 ranks are timed together, but"):
        prepare_as("pipeline", tmp_path, "--layer_split", "auto:1/1.0", world_size=3)
    with pytest.raises(ValueError, match=r"auto:1/1.0: stages of 2 ranks are timed"):
        prepare_as("recurrent", tmp_path, "--layer_split", "auto:1/1.0", world_size=3)


def finished(times_s: list[float]) -> Request:
    (request,) = make_requests([(9,)], len(times_s))
    for token, time_s in enumerate(times_s, 1):
        request.append([token], time_s)
    return request


LAYOUT = PipelineLayout((range(2), range(2, 4)), 0)


def observed() -> Observed:
    """A prompt, run 1, and run 2, which is stopped in the second stage. The time that counts is
    from 1 s to 3 s."""
    head = [
        Span(SpanKind.PROMPT, 0, 0.0, 0.0, 1),
        Span(SpanKind.STAGE, 0, 0.0, 0.4, 2),
        Span(SpanKind.RESULT, 0, 1.0, 1.0),
        Span(SpanKind.LAUNCH, 1, 1.0, 1.0, 1),
        Span(SpanKind.STAGE, 1, 1.0, 1.5, 2),
        Span(SpanKind.DRAFT, 0, 1.0, 1.75),
        Span(SpanKind.LAUNCH, 2, 1.75, 1.75, 1),
        Span(SpanKind.STAGE, 2, 1.75, 2.25, 2),
        Span(SpanKind.RESULT, 1, 2.25, 2.25),
        Span(SpanKind.RESULT, 2, 3.0, 3.0, 1),
    ]
    stage = [
        Span(SpanKind.STAGE, 0, 0.5, 0.9, 2),
        Span(SpanKind.STAGE, 1, 1.75, 2.0, 2),
        Span(SpanKind.STAGE, 2, 2.5, 2.75, 1),
    ]
    return Observed(LAYOUT, [head, stage], 1.0, 3.0)


def test_metrics_follow_from_the_spans() -> None:
    counts = Counts(runs=3, speculative_runs=1, invalid_runs=1, num_drafted=1)
    use = speculation_metrics(observed(), counts, has_drafts=True)
    assert (use.layers_computed, use.layers_skipped) == (2 * 3 + 2 * 2 + 1, 1)
    assert (use.skipped_before, use.skipped_inside) == (0, 1)
    assert use.mean_in_flight == pytest.approx((1.25 + 1.25) / 2) and use.most_in_flight == 2
    assert use.busy == pytest.approx([1.25 / 2, 0.5 / 2]), "its draft and its stage overlap"
    assert use.idle_s == pytest.approx([0.75, 1.5]) and use.draft_busy == pytest.approx(0.375)
    assert use.draft_rank == 0
    assert use.stage_ms == pytest.approx([500, 250]) and use.draft_ms == pytest.approx(750)
    assert use.link_ms == pytest.approx(250)


def test_the_speed_of_a_request_is_from_its_first_token_on() -> None:
    requests = [finished([1.0, 2.0, 2.0, 3.0]), finished([4.0, 5.0, 6.0, 10.0])]
    moves = {number: Moves([0.0]) for number in range(2)}
    metrics = metrics_of(requests[:1], moves)
    assert metrics.request_tokens_per_s == 1.5 and metrics.mean_ttft_ms == 1000
    assert metrics.mean_itl_ms == 1000 and metrics.duration_s == 3.0
    metrics = metrics_of(requests, moves)  # one after the other
    assert metrics.request_tokens_per_s == 1.0 and metrics.output_throughput == 0.8


def metrics_of(requests: list[Request], moves: dict[int, Moves]) -> PassMetrics:
    group = GroupRecord(
        num_requests=len(requests), step_ms=[], draft_ms=[], verify_ms=[], decode_ms=[], threads=[1]
    )
    parts = MeasuredParts(describe_requests(requests, moves, requests[0].arrived_s), [group])
    gaps_ms = [gap for request in requests for gap in request.gaps_ms()]
    return pass_metrics(parts, Beside(is_drafting=False, gaps_ms=gaps_ms))


def crowded() -> Observed:
    """A prompt, run 1, run 2 of three rows, which is stopped in the second stage, and run 3, the
    only one that finds this stage idle. The third rank drafts."""
    head = [
        Span(SpanKind.PROMPT, 0, 0.0, 0.0, 1),
        Span(SpanKind.RESULT, 0, 4.0, 4.0),
        Span(SpanKind.LAUNCH, 1, 1.0, 1.0, 1),
        Span(SpanKind.RESULT, 1, 6.0, 6.0),
        Span(SpanKind.LAUNCH, 2, 2.0, 2.0, 3),
        Span(SpanKind.RESULT, 2, 8.0, 8.0, 1),
        Span(SpanKind.LAUNCH, 3, 8.0, 8.0, 1),
        Span(SpanKind.RESULT, 3, 9.5, 9.5),
    ]
    times_s = [[(0.0, 1.0), (1.0, 2.0), (2.0, 3.5), (8.0, 8.5)]]
    times_s += [[(1.5, 4.0), (4.0, 6.0), (6.0, 7.0), (8.75, 9.25)]]
    stages = [
        [Span(SpanKind.STAGE, run, *times, 2) for run, times in enumerate(stage_times)]
        for stage_times in times_s
    ]
    stages[1][2] = replace(stages[1][2], value=1)
    drafts = [Span(SpanKind.DRAFT, 0, 1.0, 1.5)]
    layout = PipelineLayout((range(2), range(2, 4), range(0)), 2)
    return Observed(layout, [[*head, *stages[0]], stages[1], drafts], 0.0, 10.0)


def test_means_are_of_whole_runs_and_of_links_to_idle_stages() -> None:
    use = speculation_metrics(crowded(), Counts(), has_drafts=True)
    assert use.stage_ms == [1e3 * (1.0 + 1.5 + 0.5) / 3, 1e3 * (2.0 + 0.5) / 2]
    assert use.link_ms == 250
    assert use.mean_in_flight == (4.0 + 5.0 + 6.0 + 1.5) / 10 and use.most_in_flight == 3
    assert use.idle_s == [10 - 4.0, 10 - 6.0, 10 - 0.5]


def test_the_speed_of_a_prompt_does_not_count_its_waiting() -> None:
    """The first request is in its lane from 0.5 s to 1 s before its first token, the second from
    3 s to 4 s."""
    requests = make_requests([(9, 8, 7), (6, 5)], 2)
    for request, times_s in zip(requests, ([1.0, 3.0], [4.0, 5.0]), strict=True):
        for time_s in times_s:
            request.append([1], time_s)
    moves = {0: Moves([0.5]), 1: Moves([3.0])}
    metrics = metrics_of(requests, moves)
    assert metrics.request_prefill_tokens_per_s == (3 / 0.5 + 2 / 1.0) / 2
    assert metrics.mean_ttft_ms == 2500.0, "which counts it"


SYNC = Pass.named("pipeline+draft")


def prepared(tmp_path: Path, *words: str, rank: int = 0, world_size: int = 3) -> PipeInfer:
    words = "--num_requests", "2", *words
    serving = prepare_as("pipeline", tmp_path, *words, rank=rank, world_size=world_size)
    system = serving.system_of(SYNC)
    assert isinstance(system, PipeInfer)
    return system


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_the_plan_of_the_draft_is_what_its_rank_holds(policy: str, tmp_path: Path) -> None:
    words = ("--layer_split", "1.0/1.0", "--linear", "torch", "--kv_policy", policy)
    system = prepared(tmp_path, *words, "--dtype", "float32", world_size=2)
    drafting = system.drafting
    plans = [system.plan(SYNC, [rank]) for rank in range(2)]
    assert drafting is not None and plans[0].draft_weights == 0
    group = Group((1,), 0)
    loaded = LoadedModels(torch.device("cpu"), make_progress(False))
    draft = make_draft(drafting, ParallelGroups(1, 2, group, draft=group), loaded)
    assert draft is not None and draft.runner is not None
    held = sum(p.numel() * p.element_size() for p in draft.runner.model.parameters())
    assert (plans[1].weights, plans[1].draft_weights) == (0, held)
    assert (plans[1].kv, plans[1].draft_kv) == (0, draft.runner.cache.num_bytes)
