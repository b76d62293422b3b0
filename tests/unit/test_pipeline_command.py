"""`magicdec pipeline`: what is refused before any rank starts, in one line; which rank does what;
the metrics of spans; and what the simulator makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_requests

from magicdec.cli.serving.pipeline import parse
from magicdec.distributed.groups import Launch
from magicdec.pipeline.tracing import Span, What, trace_events
from magicdec.pipelined_run.head import Drafted
from magicdec.pipelined_run.layout import Layout, make_layout
from magicdec.pipelined_run.measured.measure import (
    machine_of,
    places_of,
    predict_tokens_per_s,
)
from magicdec.pipelined_run.measured.metrics import Observed, pipeline_use, speculation_metrics
from magicdec.pipelined_run.prepare import prepare
from magicdec.pipelined_speculation.options import Counts, Options
from magicdec.request import Request
from magicdec.serving.metrics import Moves

FLAGS = ("--prefix_len", "100", "--gen_len", "8", "--num_requests", "2", "--device", "cpu")
EMULATED = ("--emulate_stage_ms", "20", "--emulate_acceptance", "0.5", "--modes", "async")


def prepared(tmp_path: Path, *words: str, world_size: int = 2) -> Any:
    launch = Launch(0, world_size, 0, world_size)
    asked = parse([*FLAGS, "--out", str(tmp_path / "r.jsonl"), *words], launch)
    return prepare(asked.config, asked.options, launch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer_split", "0.5,0.5/1.0"], "--layer_split 0.5,0.5/1.0 names 3 ranks, but 2 were"),
        (["--layer_split", "1.0/0.6,0.4"], "ranks compute every layer together; give 0.5,0.5"),
        (["--layer_split", "1.0/3,3"], "behind the slash is head, or equal shares of the draft"),
        (["--layer_split", "mdi_llm"], "mdi_llm: mdi_llm divides the layers of a ring"),
        (["--layer_split", "mdi_llm:1/1.0"], "--layer_split mdi_llm:1/1.0: mdi_llm divides the"),
        (["--layer_split", "1.0/tail"], "1.0/tail: behind the slash is head, or equal shares"),
        (["--layer_split", "1.0/0.9"], "compute every layer together; give 1.0"),
        (["--layer_split", "1.0/0.5,0.5"], "1.0/0.5,0.5 names 3 ranks, but 2 were started"),
        (["--layer_split", "0.5,0.4/head"], "--layer_split 0.5,0.4 adds up to 0.9"),
        (["--layer_split", "6,0/head"], "--layer_split 6,0 leaves stage 1 without a layer"),
        (["--layer_split", "auto/2.0"], "--layer_split auto/2.0: behind the slash is head"),
        (["--layer_split", "auto:2/1.0"], "--layer_split auto:2/1.0 names 3 ranks, but 2 were"),
        (["--layer_split", "auto", *EMULATED], "--layer_split auto: with --emulate_stage_ms 20.0"),
        (["--layer_split", "3,3", "--machine", "m.json"], "--machine m.json does nothing here"),
        (["--layer_split", "auto/1.0", "--machine", "m.json"], "it is for --layer_split auto with"),
        (
            ["--modes", "async", "fast"],
            "--modes fast is not known; choose from sequential,",
        ),
        (["--draft", "other"], "--draft other is not known; choose from self, model:NAME, ngram"),
        (["--draft", "model:nowhere"], "--draft 'nowhere' is not known"),
        (["--draft", "model:random:llama-68m"], "--model demo of 2048; a draft needs its"),
        (["--draft", "self", "--kv_policy", "verified"], "choose from full, streaming_llm, snap"),
        (["--draft", "self", "--budget", "9"], "--budget 9 must be larger than --num_sink_tok"),
        (["--draft", "ngram", "--budget", "99"], "prompt lookup reads no KV cache; leave it out"),
        (["--draft", "self", "--kv_policy", "full", "--budget", "9"], "reads the whole cache"),
        (
            ["--modes", "sequential"],
            "--modes sequential needs no stages; add one of iterative",
        ),
        (["--modes", "iterative", "--budget", "9"], "--modes iterative drafts nothing; leave it"),
        ([*EMULATED, "--draft_dtype", "int8"], "--emulate_acceptance drafts; leave it out"),
        (["--logit_bias", "1"], "--logit_bias"),
        (["--top_k", "5"], "--top_k 5 does nothing at --temperature 0"),
        (["--sampling_seed", "5"], "--sampling_seed does nothing here: --temperature 0 is greedy"),
        ([*EMULATED, "--temperature", "1"], "--temperature 1 does nothing with --emulate_stage_ms"),
        ([*EMULATED, "--repetition_penalty", "1.1"], "--repetition_penalty 1.1 does nothing with"),
        (["--emulate_stage_ms", "20"], "give --emulate_acceptance"),
        (
            [*EMULATED[:-2], "--modes", "sequential", "sync"],
            "stages that sleep emit no tokens to comp",
        ),
        ([*EMULATED[2:]], "--emulate_acceptance needs the tokens of sequential; add it to --modes"),
        (["--emulate_draft_ms", "4"], "--emulate_draft_ms is for --emulate_acceptance"),
        (["--plot", "plot.txt"], "--plot plot.txt: the name must end in .png or .svg or .pdf"),
    ],
)
def test_refuses_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        prepared(tmp_path, *words)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("split", "sizes", "draft_ranks", "hops"),
    [
        (None, [3, 3], (0,), [(0, 1), (1, 0)]),
        ("0.1,0.4,0.5/1.0", [1, 2, 3, 0], (3,), [(0, 1), (1, 2), (2, 0)]),
        ("0,1.0/head", [0, 6], (0,), [(0, 1), (1, 0)]),
        ("0,2,4/1", [0, 2, 4, 0], (3,), [(0, 1), (1, 2), (2, 0)]),
        ("1.0/head", [6], (0,), []),
        ("6/1.0", [6, 0], (1,), []),
        ("0.5,0.5/0.5,0.5", [3, 3, 0, 0], (2, 3), [(0, 1), (1, 0)]),
        ("0,6/.33,.33,.33", [0, 6, 0, 0, 0], (2, 3, 4), [(0, 1), (1, 0)]),
        ("auto", [2, 2, 2], (0,), [(0, 1), (1, 2), (2, 0)]),
        ("auto/1.0", [3, 3, 0], (2,), [(0, 1), (1, 0)]),
        ("auto/0.5,0.5", [3, 3, 0, 0], (2, 3), [(0, 1), (1, 0)]),
        ("0,auto:2/head", [0, 3, 3], (0,), [(0, 1), (1, 2), (2, 0)]),
        ("1.0", [6, 6], (0,), []),
        ("2,4/head", [2, 2, 4, 4], (0,), [(0, 2), (2, 0)]),
        ("0,auto:2/0.5,0.5", [0, 3, 3, 3, 3, 0, 0], (5, 6), [(0, 1), (1, 3), (3, 0)]),
    ],
)
def test_every_rank_has_its_part(
    split: str | None, sizes: list[int], draft_ranks: tuple[int, ...], hops: list[tuple[int, int]]
) -> None:
    layout = make_layout(split, len(sizes), 6)
    assert [len(layers) for layers in layout.layers] == sizes
    assert layout.draft_ranks == draft_ranks and layout.hops == hops
    held = [layer for stage in layout.stages for layer in layout.layers[stage]]
    assert held == list(range(6))
    assert layout.with_layers([layout.layers[stage] for stage in layout.stages]) == layout


def test_ranks_of_a_stage_follow_each_other() -> None:
    layout = make_layout("0,2,4/1.0", 6, 6)
    assert (layout.stages, layout.tensor_parallel) == ([1, 3], 2)
    assert layout.groups == [(0,), (1, 2), (3, 4), (5,)]
    names = [layout.describe(rank) for rank in range(6)]
    assert names == [
        *("head", "stage 0 shard 0", "stage 0 shard 1", "stage 1 shard 0", "stage 1 shard 1"),
        "draft",
    ]
    with pytest.raises(ValueError, match="names 3 ranks, but 4 were started; start 3, or equally"):
        make_layout("3,3/1.0", 4, 6)


def test_stages_of_several_ranks_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"5,1, stages of 5 ranks: .*heads"):
        prepared(tmp_path, "--layer_split", "5,1", world_size=10)
    with pytest.raises(ValueError, match=r"auto:1/1.0: stages of 2 ranks are timed together, but"):
        prepared(tmp_path, "--layer_split", "auto:1/1.0", world_size=3)


def finished(times_s: list[float]) -> Request:
    (request,) = make_requests([(9,)], len(times_s))
    for token, time_s in enumerate(times_s, 1):
        request.append([token], time_s)
    return request


LAYOUT = Layout((range(2), range(2, 4)), (0,))


def observed() -> Observed:
    """A prompt, run 1, and run 2, which is stopped in the second stage. The time that counts is
    from 1 s to 3 s."""
    head = [
        Span(What.PROMPT, 0, 0.0, 0.0, 1),
        Span(What.STAGE, 0, 0.0, 0.4, 2),
        Span(What.RESULT, 0, 1.0, 1.0),
        Span(What.LAUNCH, 1, 1.0, 1.0, 1),
        Span(What.STAGE, 1, 1.0, 1.5, 2),
        Span(What.DRAFT, 0, 1.0, 1.75),
        Span(What.LAUNCH, 2, 1.75, 1.75, 1),
        Span(What.STAGE, 2, 1.75, 2.25, 2),
        Span(What.RESULT, 1, 2.25, 2.25),
        Span(What.RESULT, 2, 3.0, 3.0, 1),
    ]
    stage = [
        Span(What.STAGE, 0, 0.5, 0.9, 2),
        Span(What.STAGE, 1, 1.75, 2.0, 2),
        Span(What.STAGE, 2, 2.5, 2.75, 1),
    ]
    return Observed(LAYOUT, [head, stage], 1.0, 3.0)


def test_metrics_follow_from_the_spans() -> None:
    counts = Counts(runs=3, speculative_runs=1, invalid_runs=1, drafted=1)
    use = pipeline_use(observed(), counts, has_drafts=True)
    assert (use.layers_computed, use.layers_skipped) == (2 * 3 + 2 * 2 + 1, 1)
    assert (use.skipped_before, use.skipped_inside) == (0, 1)
    assert use.mean_in_flight == pytest.approx((1.25 + 1.25) / 2) and use.most_in_flight == 2
    assert use.busy == pytest.approx([1.25 / 2, 0.5 / 2]), "its draft and its stage overlap"
    assert use.idle_s == pytest.approx([0.75, 1.5]) and use.draft_busy == pytest.approx(0.375)
    assert (use.draft_rank, use.draft_ranks) == (0, [0])
    assert use.stage_ms == pytest.approx([500, 250]) and use.draft_ms == pytest.approx(750)
    assert use.link_ms == pytest.approx(250) and use.acceptance_rate == 0
    requests = [finished([1.0, 2.0, 2.0, 3.0]), finished([4.0, 5.0, 6.0, 10.0])]
    moves = {0: Moves([0.0])}
    metrics = speculation_metrics(requests[:1], moves, use, None)
    assert metrics.request_tokens_per_s == 1.5 and metrics.mean_ttft_ms == 1000
    assert metrics.mean_itl_ms == 1000 and metrics.makespan_s == 3.0
    metrics = speculation_metrics(requests, moves, use, None)  # one after the other
    assert metrics.request_tokens_per_s == 1.0 and metrics.output_throughput == 0.8


def crowded() -> Observed:
    """A prompt, run 1, run 2 of three rows, which is stopped in the second stage, and run 3, the
    only one that finds this stage idle. The third rank drafts."""
    head = [
        Span(What.PROMPT, 0, 0.0, 0.0, 1), Span(What.RESULT, 0, 4.0, 4.0),
        Span(What.LAUNCH, 1, 1.0, 1.0, 1), Span(What.RESULT, 1, 6.0, 6.0),
        Span(What.LAUNCH, 2, 2.0, 2.0, 3), Span(What.RESULT, 2, 8.0, 8.0, 1),
        Span(What.LAUNCH, 3, 8.0, 8.0, 1), Span(What.RESULT, 3, 9.5, 9.5),
    ]  # fmt: skip
    times_s = [[(0.0, 1.0), (1.0, 2.0), (2.0, 3.5), (8.0, 8.5)]]
    times_s += [[(1.5, 4.0), (4.0, 6.0), (6.0, 7.0), (8.75, 9.25)]]
    stages = [
        [Span(What.STAGE, run, *times, 2) for run, times in enumerate(each)] for each in times_s
    ]
    stages[1][2] = replace(stages[1][2], value=1)
    drafts = [Span(What.DRAFT, 0, 1.0, 1.5)]
    layout = Layout((range(2), range(2, 4), range(0)), (2,))
    return Observed(layout, [[*head, *stages[0]], stages[1], drafts], 0.0, 10.0)


def test_means_are_of_whole_runs_and_of_links_to_idle_stages() -> None:
    use = pipeline_use(crowded(), Counts(), has_drafts=True)
    assert use.stage_ms == [1e3 * (1.0 + 1.5 + 0.5) / 3, 1e3 * (2.0 + 0.5) / 2]
    assert use.link_ms == 250
    assert use.mean_in_flight == (4.0 + 5.0 + 6.0 + 1.5) / 10 and use.most_in_flight == 3
    assert use.idle_s == [10 - 4.0, 10 - 6.0, 10 - 0.5]


def test_further_rows_and_a_draft_elsewhere_take_longer() -> None:
    """Two further rows take twice as long in the first stage; of the second nothing is known."""
    seen = crowded()
    machine = machine_of(seen, pipeline_use(seen, Counts(), has_drafts=True), delay_s=0.125)
    assert machine is not None and machine.stage_s == (0.75, 1.25)
    assert machine.row_cost == ((1.5 / 0.75 - 1) / 2 + 0.0) / 2
    assert (machine.draft_s, machine.cancel_s) == (0.5 + 2 * 0.25, 0.125)


def test_the_speed_of_a_prompt_does_not_count_its_waiting() -> None:
    """The first request is in its lane from 0.5 s to 1 s before its first token, the second from
    3 s to 4 s."""
    requests = make_requests([(9, 8, 7), (6, 5)], 2)
    for request, times_s in zip(requests, ([1.0, 3.0], [4.0, 5.0]), strict=True):
        for time_s in times_s:
            request.append([1], time_s)
    moves = {0: Moves([0.5]), 1: Moves([3.0])}
    metrics = speculation_metrics(requests, moves, None, None)
    assert metrics.prefill_tokens_per_s == (3 / 0.5 + 2 / 1.0) / 2
    assert metrics.mean_ttft_ms == 2500.0, "which counts it"


def test_the_simulator_gets_what_was_measured() -> None:
    seen = observed()
    use = pipeline_use(seen, Counts(), has_drafts=True)
    machine = machine_of(seen, use, delay_s=None)
    assert machine is not None
    assert machine.stage_s == pytest.approx((0.5, 0.25)) and machine.layers == 2
    assert machine.link_s == machine.cancel_s == pytest.approx(0.25)
    assert machine.draft_s == pytest.approx(0.75) and machine.row_cost == 0
    request = finished([float(i) for i in range(1, 9)])
    options = Options(mode="iterative")
    for requests in ([request], [request, request]):
        found = predict_tokens_per_s(requests, [], machine, options, 0)
        assert found == pytest.approx(1 / 1.25)
    drafted = [Drafted(0, place, (), ((place + 1, 0.9),)) for place in range(1, 8)]
    right = predict_tokens_per_s([request], drafted, machine, Options(gamma=1), 0)
    assert right is not None and right > 1 / 1.25, "right drafts are faster"
    several = [request, finished([1.0, 2.0])]
    assert predict_tokens_per_s(several, [], machine, options, 0) is None


def test_what_was_drafted_is_replayed_at_its_place() -> None:
    request = finished([1.0, 2.0, 3.0])  # the tokens 1, 2, 3
    drafted = [
        Drafted(0, 1, (), ((7, 0.6), (2, 0.3))),
        Drafted(0, 1, (2,), ((3, 0.5),)),
        Drafted(0, 1, (7,), ((9, 0.5),)),  # after a wrong token
        Drafted(1, 1, (), ((2, 0.9),)),  # of another request
    ]
    places = places_of(0, request, drafted, seed=0)
    assert places[1:] == [(1, (0.6, 0.3)), (0, (0.5,))]
    assert places[0] in places[1:], "nothing is known of the first token"


def test_a_trace_has_an_event_for_each_span() -> None:
    events = trace_events({"async": observed().by_rank}, ["rank 0: head, stage 0", "rank 1"])
    assert [e["args"] for e in events[:2]] == [
        {"name": "rank 0: head, stage 0"},
        {"name": "rank 1"},
    ]
    event = next(e for e in events if e["name"] == "stage 1" and e["pid"] == 1)
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 1.75e6, 0.25e6)
    assert event["args"] == {"value": 2} and event["cat"] == "async"
    assert len(events) == 2 + 10 + 3
