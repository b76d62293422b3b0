"""The modes in which the engine serves: when requests join its batch, every one of them on one tiny
model, the memory of its KV cache, and a trace and rates through all of `magicdec inflight`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import TINY, Launch, make_runner
from fake_clock import VirtualClock
from test_serving_metrics import serving_metrics

from magicdec.bench.measure import MeasuredPasses
from magicdec.bench.prepare import check_here, prepare
from magicdec.bench.showing import tables
from magicdec.bench.timeline import spans_of
from magicdec.cli.serve import COMMANDS, RecordFile, ServeCommand
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.distributed.groups import Group
from magicdec.distributed.groups import Launch as Ranks
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.engine import Engine
from magicdec.engine.scheduler import StepCounts
from magicdec.hardware.timing import GroupClock
from magicdec.names import BASELINE
from magicdec.output.console import Silent
from magicdec.output.writing import to_json
from magicdec.records.describe import verdict_of
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.runner.request import Request, RequestStatus, SamplingParams
from magicdec.setup.memory_check import MemoryBudget, needed
from magicdec.setup.memory_plan import Models
from magicdec.speculation.steps import build, recorder
from magicdec.speculation.steps.strategy import Setup, make_strategy
from magicdec.systems.flover.system import BATCHINGS, Flover
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.system import make_requests

LENGTHS = [(5, 9), (40, 3), (1, 30), (17, 1), (33, 12), (8, 20), (24, 5)]
ARRIVALS_MS = [0, 2, 3, 30, 31, 90, 200]  # a step of the virtual clock takes 1 ms
MODES = ["sequential", "static", "dynamic", "inflight"]
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1)


def batches(
    name: str,
    arrived_s: Sequence[float],
    num_rows: int,
    window_s: float,
    concurrency: int | None = None,
) -> list[object]:
    """(start, requests) of each batch, if every batch takes 10 s."""
    clock = VirtualClock()
    starts = list[object]()
    requests = [Request(i, (1,), SamplingParams(1), arrived_s=at) for i, at in enumerate(arrived_s)]

    def serve(batch: Sequence[Request] | Arrivals) -> None:
        clock.wait_until(next(iter(batch)).arrived_s)
        starts.append((clock.now(), [request.request_id for request in batch]))
        clock.wait_until(clock.now() + 10)

    arrivals = Arrivals(requests, concurrency)
    BATCHINGS[name](serve, arrivals, clock, num_rows, window_s)
    return starts


def test_each_batching_gives_the_engine_its_batches() -> None:
    arrivals = [0.0, 1.0, 3.0, 4.0, 40.0]
    assert batches("sequential", arrivals, 2, 5.0) == [
        (0, [0]),
        (10, [1]),
        (20, [2]),
        (30, [3]),
        (40, [4]),
    ]
    assert batches("static", arrivals, 2, 5.0) == [(1, [0, 1]), (11, [2, 3]), (40, [4])]
    assert batches("static", arrivals, 3, 5.0) == [(3, [0, 1, 2]), (40, [3, 4])]
    assert batches("inflight", arrivals, 2, 5.0) == [(0, [0, 1, 2, 3, 4])]


def test_a_dynamic_batch_begins_when_it_is_full_or_its_window_ends() -> None:
    arrivals = [0.0, 1.0, 3.0, 4.0, 40.0]
    assert batches("dynamic", arrivals, 2, 5.0) == [(1, [0, 1]), (11, [2, 3]), (45, [4])]
    assert batches("dynamic", arrivals, 3, 2.0) == [(2, [0, 1]), (12, [2, 3]), (42, [4])]
    assert batches("dynamic", arrivals, 2, 0.0) == [(0, [0]), (10, [1, 2]), (20, [3]), (40, [4])]


def parse(*words: object) -> ServeCommand:
    return COMMANDS["inflight"].parse(list(map(str, words)), ALONE)


def make_batching(checkpoint: Path, folder: Path, num_rows: int, *flags: object) -> Flover:
    """Open, with the requests above and a clock whose steps take 1 ms."""
    trace = folder / "trace.jsonl"
    lines = [
        {"arrival_ms": at_ms, "prompt_len": prompt, "output_len": output}
        for at_ms, (prompt, output) in zip(ARRIVALS_MS, LENGTHS, strict=True)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    experiment = parse(
        "--model",
        checkpoint,
        "--dtype",
        "float32",
        "--threads",
        1,
        "--device",
        "cpu",
        "--arrival",
        f"trace:{trace}",
        "--B",
        num_rows,
        "--window_ms",
        20,
        *flags,
    )
    (batching,) = prepare(experiment.config, experiment.options, ALONE).systems
    assert isinstance(batching, Flover)
    batching.open(Pass.named("inflight"), CPU, Silent())
    batching.clock = GroupClock(VirtualClock(1e-3), Group((0,), 0), CPU)
    return batching


def serve(batching: Flover, mode: str) -> tuple[list[Request], StepCounts]:
    batching.clock = GroupClock(VirtualClock(1e-3), Group((0,), 0), CPU)
    observer = PassObserver(StepCounts(batching.now))
    prompts = batching.run.workload.prompts
    shapes = batching.options.shapes
    requests = make_requests(prompts, shapes, batching.now(), SamplingSection())
    batching.serve(Pass.named(mode), requests, observer)
    return requests, observer.counts


def lone_outputs(batching: Flover) -> list[list[int]]:
    """The tokens of each request in a static batch of its own."""
    assert batching.runner is not None
    runner = make_runner(batching.runner.model, 1, 64)
    outputs = []
    prompts = batching.run.workload.prompts
    shapes = batching.options.shapes
    for prompt, shape in zip(prompts, shapes, strict=True):
        request = Request(0, prompt[: shape.prompt_len], SamplingParams(shape.output_len))
        engine = Engine(runner, 64)
        engine.prefill([request])
        strategy = make_strategy(BASELINE, Setup(runner, DecodingSection(), KVSection("full")))
        engine.begin(strategy)
        outputs.append(engine.decode(strategy)[0].output_ids)
    return outputs


def test_every_mode_serves_the_tokens_of_lone_runs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    batching = make_batching(tiny_checkpoint, tmp_path, 3, "--prefill_tokens", 16)
    assert batching.runner is not None
    expected = lone_outputs(batching)
    metrics = dict[str, PassMetrics]()
    for mode in MODES:
        requests, counts = serve(batching, mode)
        assert [r.output_ids for r in requests] == expected, mode
        assert {r.status for r in requests} == {RequestStatus.FINISHED}
        assert all(len(r.token_times_s) == len(r.output_ids) for r in requests)
        assert not any(batching.runner.cache.blocks), "every block is free again"
        metrics[mode] = serving_metrics(requests, counts)
    in_flight = {mode: serving.mean_in_flight or 0.0 for mode, serving in metrics.items()}
    assert in_flight.pop("sequential") == 1 < min(in_flight.values())
    assert metrics["inflight"].mean_ttft_ms == min(
        metric.mean_ttft_ms for metric in metrics.values()
    )
    # Static batches wait for their last request, which arrives at 200 ms.
    assert metrics["static"].duration_s >= metrics["inflight"].duration_s >= 0.2


def test_steps_that_are_counted_are_those_of_the_clock(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """In one row, every step of the clock is one of the engine."""
    _, counts = serve(make_batching(tiny_checkpoint, tmp_path, 1), "sequential")
    # The prompt and the first token are one step, and each token after it another.
    assert counts.num_steps == sum(output for _, output in LENGTHS)
    assert counts.num_in_flight == counts.num_steps


def refusal(*words: object) -> str:
    experiment = parse(*words)
    with pytest.raises(ValueError) as refused:
        prepare(experiment.config, experiment.options, ALONE)
    return str(refused.value)


def test_what_the_model_cannot_hold_is_refused_with_the_numbers(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    place = "--model", tiny_checkpoint
    message = refusal(*place, "--prefix_len", 1000, "--gen_len", 30)
    assert "--prefix_len 1000 + --gen_len 30 = 1030 exceeds the 1024 positions" in message
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_ms": 9, "prompt_len": 1000, "output_len": 30}\n')
    message = refusal(*place, "--arrival", f"trace:{trace}")
    text = "line 1: prompt_len 1000 + output_len 30 = 1030 exceeds the 1024 positions of --model"
    assert message.startswith(f"--arrival trace: {trace}, {text}")
    message = refusal(*place, "--num_requests", 20_000, "--prefix_len", 100, "--arrival", "burst")
    assert "20000 are needed (--num_requests)" in message
    lengths = "--prefix_len", 512, "--gen_len", 32
    message = refusal(*place, *lengths, "--cache_tokens", 547, "--draft", "self", "--budget", 65)
    assert "--cache_tokens 547 is too small; the longest request takes 548 tokens" in message


def test_the_memory_plan_counts_the_blocks_of_the_cache(tiny_checkpoint: Path) -> None:
    """Beside the sizes that the runner allocates."""
    sizes = "--prefix_len", 600, "--gen_len", 32, "--B", 8, "--block_tokens", 64
    place = "--model", tiny_checkpoint, "--dtype", "float32", "--attention", "native"
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    serving_pass = Pass.named("inflight")
    for limit, num_tokens in ((), 8 * 640), (("--cache_tokens", 700), 704):
        experiment = parse(*place, *sizes, "--modes", "inflight", *limit)
        prepared = prepare(experiment.config, experiment.options, ALONE)
        (batching,) = prepared.systems
        plan = batching.plan(serving_pass, (0,))
        full = needed(batching.run.config, Models(batching.run.source.config, None), ALONE)
        assert plan.kv == num_tokens * per_token and replace(plan, kv=0) == replace(full, kv=0)
        assert prepared.memory.startswith(f"{plan.describe()} on this host; ")
        room = MemoryBudget((0,), "on this host", plan.total - 1)
        with pytest.raises(ValueError, match=r"--modes inflight needs .* GB are free"):
            check_here([batching], room)
    assert plan.kv < full.kv
    batching.settings = replace(batching.settings, cache_tokens=None)  # type: ignore[attr-defined]
    whole = batching.plan(serving_pass, (0,))
    free = whole.total - whole.kv + 5056 * per_token + 7
    with pytest.raises(ValueError, match="--cache_tokens 5056 would fit"):
        check_here([batching], MemoryBudget((0,), "on this host", free))


def measured(experiment: ServeCommand) -> MeasuredPasses:
    """What the command measures, without a process of its own."""
    prepared = prepare(experiment.config, experiment.options, ALONE)
    return experiment.measure(prepared, RecordFile(Path(experiment.config.output.results)))


def test_a_trace_is_served_and_recorded(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """All of the command but its process, with a pool of blocks that is too small for three
    requests, so that one is preempted."""
    trace = tmp_path / "trace.jsonl"
    out = tmp_path / "new" / "serving.jsonl"
    lines = [{"arrival_ms": 5.0 + i, "prompt_len": 40 - i, "output_len": 60} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    experiment = parse(
        "--model",
        str(tiny_checkpoint),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--arrival",
        f"trace:{trace}",
        "--B",
        "3",
        "--prefill_tokens",
        "32",
        "--block_tokens",
        "16",
        "--cache_tokens",
        "160",
        "--window_ms",
        "3",
        "--prefix_cache",
        "--draft",
        "self",
        "--budget",
        "20",
        "--num_sink_tokens",
        "4",
        "--gamma",
        "3",
        "--goodput",
        "ttft:100000",
        "e2el:0.001",
        "--out",
        str(out),
    )
    records = measured(experiment).records
    names = [*MODES, "inflight+draft"]
    assert out.read_text() == "".join(to_json(record) + "\n" for record in records)
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.name for record in records] == names
    for record in read:
        assert (record["kind"], record["schema_version"]) == ("pass", 4)
        assert (record["status"], record["num_differing"]) == ("verified", 0)
        assert record["reference"] == "sequential" and record["metrics"]["request_goodput"] == 0
        assert [r["prompt_len"] for r in record["requests"]] == [40, 39, 38, 37]
        assert [r["output_len"] for r in record["requests"]] == [60] * 4
        ends = [r["finished_ms"] for r in record["requests"]]
        assert record["metrics"]["duration_s"] == pytest.approx(max(ends) / 1e3)
        workload = record["config"]["workload"]
        assert workload["num_requests"] == 4 and workload["gen_len"] is None
    preempted = {
        record.name: record.metrics.num_preemptions for record in records if record.metrics
    }
    assert preempted["sequential"] == 0 < preempted["inflight"]
    for record in records:  # the prompts have nothing in common, but with what comes back
        assert record.metrics is not None and record.metrics.prefix_hit_rate is not None
        assert record.metrics.prefix_hit_rate == 0 or record.metrics.num_preemptions > 0
    for record in records:
        left = sum(len(request.preempted_ms) for request in record.requests)
        assert record.metrics is not None and left == record.metrics.num_preemptions
        for request in record.requests:
            assert len(request.joined_ms) == len(request.preempted_ms) + 1
            spans = spans_of(request)
            total_ms = 1e3 * sum(length for _, _, length in spans)
            assert total_ms == pytest.approx(request.finished_ms - request.arrival_ms)
    assert [record["config"]["decoding"]["drafter"] for record in read] == [None] * 4 + ["self"]
    assert read[-1]["config"]["kv"]["budget"] == 20 and "kv" not in read[3]["config"]
    check_table(records)


def check_table(records: list[PassRecord]) -> None:
    summary, *parts = [t for t in tables(records) if "by the length of the text" not in t.title]
    assert [row[0] for row in summary.rows] == [record.name for record in records]
    shown = [column.label for table in parts for column in table.headings[1:]]
    assert shown == [record.name for record in records]
    for table in parts:
        rows = {label: cells for label, *cells in table.body}
        assert len(rows) == len(table.body), "labels are distinct"
        assert {len(cells) for cells in rows.values()} == {len(table.columns) - 1}
        assert rows["in flight, mean"][0] and rows["step median, ms"][0]
    assert {label: cells for label, *cells in parts[0].body}["in flight, mean"][0] == "1.00"
    for record, compared in (
        (records[0], f"verified, its {records[0].correctness.num_tokens} tokens are the reference"),
        (records[3], "verified, all 4 requests have the "),
    ):
        assert verdict_of(record).startswith(compared)
        assert " steps judged again, all right" in verdict_of(record)


def test_every_rank_count_serves_the_same_tokens(
    launch: Launch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Two ranks, a dynamic batching whose batches depend on the clock, sampling, and a standalone
    draft on one of the ranks, whose tokens are of the same distribution only."""
    out = tmp_path / "out.jsonl"
    done = launch(
        "inflight_benchmark.py",
        "--model",
        tiny_checkpoint,
        "--num_requests",
        4,
        "--prefix_len",
        20,
        "--gen_len",
        "uniform:2:9",
        "--arrival",
        "poisson:5",
        "--modes",
        "sequential",
        "dynamic",
        "inflight",
        "inflight+draft",
        "--window_ms",
        4,
        "--dtype",
        "float32",
        "--out",
        out,
        "--temperature",
        0.8,
        "--top_p",
        0.9,
        "--draft",
        f"model:{tiny_checkpoint}",
        "--budget",
        20,
        "--num_sink_tokens",
        4,
        "--draft_ranks",
        1,
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "all 4 requests have the tokens" not in done.stdout, "only --verbose says it of each"
    assert "tokens are not compared, because drafts are sampled" in done.stdout
    records = [json.loads(line) for line in out.read_text().splitlines()]
    threads = [group["threads"] for record in records for group in record["groups"]]
    assert len(threads) == 4 and len(threads[0]) == 2
    assert all(thread == threads[0] for thread in threads)
    assert [r["num_differing"] for r in records] == [0, 0, 0, None]
    assert [r["environment"]["world_size"] for r in records] == [2] * 4
    assert records[3]["config"]["draft"]["rank_group"] == [1]
    assert records[0]["config"]["sampling"]["temperature"] == 0.8


@pytest.mark.parametrize(
    ("graphs", "gamma", "is_kept"),
    [("on", 3, True), ("on", "auto", False), ("off", 3, False)],
)
def test_the_measured_pass_replays_what_its_warm_up_captured(
    graphs: str, gamma: int | str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy that learns its draft length from times begins again."""
    monkeypatch.setattr(recorder, "CudaGraphs", lambda device: object())
    monkeypatch.setattr(build, "make_strategy", lambda name, setup: [name])
    decoding = SimpleNamespace(
        strategy="speculative",
        cuda_graphs=graphs,
        drafts_itself=False,
        gamma=gamma,
    )
    system = object.__new__(Flover)
    runner = SimpleNamespace(device=None, set_observer=lambda kind, observer: None)
    system.runner = cast(Any, runner)
    config = SimpleNamespace(decoding=decoding, kv=None, sampling=SimpleNamespace(temperature=1.0))
    system.run = cast(Any, SimpleNamespace(config=config, corpus=()))
    drafting = Pass("inflight", True)
    plain = Pass("inflight", False)
    warm_up, _ = system._strategy(drafting)
    assert (system._strategy(drafting)[0] is warm_up) == is_kept
    assert system._strategy(plain) == ([BASELINE], None)
    assert system._strategy(drafting)[0] is not warm_up
