"""`magicdec inflight`: its flags, the batchings, and every batching on one tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Launch, make_runner, random_prompts, tiny_transformer
from fake_clock import VirtualClock
from magicdec.cli.serving.inflight import Inflight, main, parse
from magicdec.cli.serving.steps import RecordFile
from magicdec.serving.server import Server, load_batching

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.groups import Launch as Ranks
from magicdec.engine import Engine
from magicdec.memory.check import needed
from magicdec.names import BASELINE, BATCHINGS
from magicdec.records.writing import to_json
from magicdec.request import Request, SamplingParams, Status
from magicdec.runner import ModelRunner
from magicdec.scheduling.plan import Limits
from magicdec.serving.metrics import Served, ServingMetrics, serving_metrics
from magicdec.serving.options import Pass
from magicdec.serving.prepare import check_memory, plan_of, prepare
from magicdec.serving.record import ServingRecord, differing
from magicdec.serving.showing import draw_rates, draw_timeline, spans_of, tables, verdict
from magicdec.setup.prepare import Known, find
from magicdec.tables import print_tables
from magicdec.workload.request_shapes import RequestShape

LENGTHS = [(5, 9), (40, 3), (1, 30), (17, 1), (33, 12), (8, 20), (24, 5)]
ARRIVALS_MS = [0, 2, 3, 30, 31, 90, 200]  # a step of the virtual clock takes 1 ms
SHAPES = [RequestShape(float(t), p, n) for t, (p, n) in zip(ARRIVALS_MS, LENGTHS, strict=True)]
PROMPTS = random_prompts([40] * len(SHAPES), TINY.vocab_size)
MAX_TOKENS = 64
ALONE = Ranks(0, 1, 0, 1)


def batches(name: str, arrivals: Sequence[float], num_rows: int, window_s: float) -> list[object]:
    """(start, requests) of each batch, if every batch takes 10 s."""
    clock, found = VirtualClock(), list[object]()
    requests = [Request(i, (1,), SamplingParams(1), arrived_s=at) for i, at in enumerate(arrivals)]

    def serve(batch: Sequence[Request]) -> None:
        clock.wait_until(batch[0].arrived_s)
        found.append((clock.now(), [request.request_id for request in batch]))
        clock.wait_until(clock.now() + 10)

    load_batching(name)(serve, requests, clock, num_rows, window_s)
    return found


def test_each_batching_gives_the_engine_its_batches() -> None:
    arrivals = [0.0, 1.0, 3.0, 4.0, 40.0]
    assert batches("sequential", arrivals, 2, 5.0) == [
        (0, [0]), (10, [1]), (20, [2]), (30, [3]), (40, [4]),
    ]  # fmt: skip
    assert batches("static", arrivals, 2, 5.0) == [(1, [0, 1]), (11, [2, 3]), (40, [4])]
    assert batches("static", arrivals, 3, 5.0) == [(3, [0, 1, 2]), (40, [3, 4])]
    assert batches("inflight", arrivals, 2, 5.0) == [(0, [0, 1, 2, 3, 4])]


def test_a_dynamic_batch_begins_when_it_is_full_or_its_window_ends() -> None:
    arrivals = [0.0, 1.0, 3.0, 4.0, 40.0]
    assert batches("dynamic", arrivals, 2, 5.0) == [(1, [0, 1]), (11, [2, 3]), (45, [4])]
    assert batches("dynamic", arrivals, 3, 2.0) == [(2, [0, 1]), (12, [2, 3]), (42, [4])]
    assert batches("dynamic", arrivals, 2, 0.0) == [(0, [0]), (10, [1, 2]), (20, [3]), (40, [4])]


def make_server(num_rows: int, **limits: int) -> tuple[ModelRunner, Server]:
    runner = make_runner(tiny_transformer(seed=1), num_rows, MAX_TOKENS)
    shape = runner.cache.shape
    setup = Setup(runner, DecodingSection(), KVSection("full"), is_in_flight=True)
    server = Server(
        runner, Limits(MAX_TOKENS, shape.block_size, shape.num_blocks, **limits), 16,
        lambda each: make_strategy(BASELINE, setup), PROMPTS, SHAPES, window_s=0.02,
        make_clock=lambda: VirtualClock(1e-3),
    )  # fmt: skip
    return runner, server


def lone_outputs() -> list[list[int]]:
    """The tokens of each request in a static batch of its own."""
    runner, found = make_runner(tiny_transformer(seed=1), 1, MAX_TOKENS), []
    for prompt, shape in zip(PROMPTS, SHAPES, strict=True):
        request = Request(0, prompt[: shape.prompt_len], SamplingParams(shape.output_len))
        engine = Engine(runner, 64)
        engine.prefill([request])
        strategy = make_strategy(BASELINE, Setup(runner, DecodingSection(), KVSection("full")))
        engine.begin(strategy)
        found.append(engine.decode(strategy)[0].output_ids)
    return found


def test_every_batching_serves_the_tokens_of_lone_runs() -> None:
    runner, server = make_server(num_rows=3, prefill_tokens=16)
    server.warm_up(Pass("sequential"))
    expected, served = lone_outputs(), dict[str, Served]()
    for mode in BATCHINGS:
        served[mode] = server.serve(Pass(mode))
        assert [r.output_ids for r in served[mode].requests] == expected, mode
        assert {r.status for r in served[mode].requests} == {Status.FINISHED}
        assert all(len(r.token_times_s) == len(r.output_ids) for r in served[mode].requests)
        assert not any(runner.cache.blocks), "every block is free again"
    found = {mode: serving_metrics(one.requests, one.counts) for mode, one in served.items()}
    assert found["sequential"].mean_in_flight == 1
    assert min(found[mode].mean_in_flight for mode in BATCHINGS if mode != "sequential") > 1
    assert found["inflight"].mean_ttft_ms == min(one.mean_ttft_ms for one in found.values())
    # Static batches wait for their last request, which arrives at 200 ms.
    assert found["static"].makespan_s >= found["inflight"].makespan_s >= 0.2


def test_steps_that_are_counted_are_those_of_the_clock() -> None:
    """A burst in one row: every step of the clock is one of the engine."""
    _, server = make_server(num_rows=1)
    one = server.serve(Pass("sequential"))
    # The prompt and the first token are one step, and each token after it another.
    assert one.counts.num_steps == sum(output for _, output in LENGTHS)
    assert one.counts.num_in_flight == one.counts.num_steps


def test_other_tokens_are_found() -> None:
    _, server = make_server(num_rows=2)
    reference, other = server.serve(Pass("sequential")), server.serve(Pass("inflight"))
    assert differing(reference.requests, other.requests) == []
    other.requests[4].output_ids[3] += 1
    assert differing(reference.requests, other.requests) == [4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arrival sometimes", "--arrival sometimes is not known; choose from burst, "),
        ("--gen_len -3", "--gen_len -3: lengths are at least 1"),
        ("--gamma 4", "--gamma does nothing here: autoregressive decoding drafts nothing"),
        ("--draft ngram --budget 65", "--budget does nothing here: prompt lookup reads no KV"),
        ("--draft other", "--draft other is not known; choose from self, model:NAME, ngram, none"),
        ("--draft model:", "--draft model: is not known; choose from self, model:NAME"),
        ("--draft_dtype int8", "--draft_dtype does nothing here: autoregressive decoding drafts"),
        ("--top_k 5", "--top_k 5 does nothing at --temperature 0 (greedy)"),
        ("--rank_group 0 1", "--rank_group 0 1 names rank 1, which does not exist"),
        ("--window_ms 5 --modes static", "--window_ms 5.0 does nothing: --modes has no dynamic"),
        ("--goodput speed:3", "--goodput speed:3 is not known; choose from ttft:MS, tpot:MS, "),
        ("--arrival trace:a.jsonl --gen_len 8", "--gen_len does nothing here: the trace has the"),
        ("--arrival trace:nowhere.jsonl", "--arrival trace: nowhere.jsonl: No such file"),
        ("--out .", "--out .: Is a directory"),
        ("--rate 4", "unknown argument --rate"),
        (
            "--sweep_rate --arrival burst",
            "--arrival does nothing here: --sweep_rate serves Poisson",
        ),
        ("--sweep_rate 3 --modes static", "--modes does nothing here: --sweep_rate serves Poisson"),
        ("--sweep_rate --num_requests 1", "--num_requests 1 is too small for --sweep_rate"),
        ("--plot x.jpeg", "--plot x.jpeg: the name must end in .png or .svg or .pdf"),
    ],
)
def test_bad_flags_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(flags.split(), ALONE)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def refusal(*words: object) -> str:
    asked = parse(list(map(str, words)), ALONE)
    with pytest.raises(ValueError) as refused:
        prepare(asked.config, asked.options, ALONE)
    return str(refused.value)


def test_what_the_model_cannot_hold_is_refused_with_the_numbers(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    place = "--model", tiny_checkpoint
    found = refusal(*place, "--prefix_len", 1000, "--gen_len", 30)
    assert "--prefix_len 1000 + --gen_len 30 = 1030 exceeds the 1024 positions" in found
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_ms": 9, "prompt_len": 1000, "output_len": 30}\n')
    found = refusal(*place, "--arrival", f"trace:{trace}")
    text = "line 1: prompt_len 1000 + output_len 30 = 1030 exceeds the 1024 positions of --model"
    assert found.startswith(f"--arrival trace: {trace}, {text}")
    found = refusal(*place, "--num_requests", 20_000, "--prefix_len", 100, "--arrival", "burst")
    assert "20000 are needed (--num_requests)" in found
    lengths = "--prefix_len", 512, "--gen_len", 32
    found = refusal(*place, *lengths, "--cache_tokens", 547, "--draft", "self", "--budget", 65)
    assert "--cache_tokens 547 is too small; the longest request takes 548 tokens" in found


SIZES = ("--prefix_len", "600", "--gen_len", "32", "--B", "8")


def test_the_memory_plan_counts_the_blocks_of_the_cache(tiny_checkpoint: Path) -> None:
    """Beside the sizes that the runner allocates."""
    place = "--model", str(tiny_checkpoint), "--dtype", "float32", "--attention", "native"
    known, found = Known(), dict[str | None, int]()
    for cache_tokens in (None, "700"):
        limit = [] if cache_tokens is None else ["--cache_tokens", cache_tokens]
        asked = parse([*place, *SIZES, "--block_tokens", "64", *limit], ALONE)
        resolved = prepare(asked.config, asked.options, ALONE).config
        config, options = find(resolved.run_config, ALONE, known), asked.options
        plan = plan_of(options, config.config, config.models, ALONE)
        full = needed(config.config, config.models, ALONE)
        assert replace(plan, kv=0) == replace(full, kv=0)
        found[cache_tokens] = plan.kv
        with pytest.raises(ValueError) as refused:
            check_memory(options, config.config, config.models, ALONE, plan.total - 1)
        assert str(refused.value).startswith("--B 8 with requests of up to 632 tok")
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert found == {None: 8 * 640 * per_token, "700": 704 * per_token}
    plan_all = plan_of(options, config.config, config.models, ALONE)
    assert plan_all.kv < full.kv
    with pytest.raises(ValueError, match="--cache_tokens 5056 would fit"):
        options = replace(options, cache_tokens=None)
        free = plan_all.total - plan_all.kv + 5056 * per_token + 7
        check_memory(options, config.config, config.models, ALONE, free)


def measured(asked: Inflight) -> tuple[list[ServingRecord], int]:
    """The records of the command, and how many were record_file, without a process of its own."""
    record_file = RecordFile(Path(asked.config.output.results))
    return asked.measure(asked.prepare(ALONE), record_file), record_file.count


def test_a_trace_is_served_and_recorded(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the command but its process, with a pool of blocks that is too small for three
    requests, so that one is preempted."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "new" / "serving.jsonl"
    lines = [{"arrival_ms": 5.0 + i, "prompt_len": 40 - i, "output_len": 60} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = parse([
        *("--model", str(tiny_checkpoint), "--dtype", "float32", "--threads", "1"),
        *("--arrival", f"trace:{trace}", "--B", "3", "--prefill_tokens", "32"),
        *("--block_tokens", "16", "--cache_tokens", "160", "--window_ms", "3"),
        *("--draft", "self", "--budget", "20", "--num_sink_tokens", "4", "--gamma", "3"),
        *("--goodput", "ttft:100000", "e2el:0.001", "--out", str(out)),
        *("--view", str(tmp_path / "frames.txt")),
    ], ALONE)  # fmt: skip
    records, num_kept = measured(asked)
    assert num_kept == len(records) == len(BATCHINGS) + 1
    assert out.read_text() == "".join(to_json(record) + "\n" for record in records)
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.name for record in records] == [*BATCHINGS, "inflight, self"]
    for record in read:
        assert (record["kind"], record["schema_version"]) == ("serving", 2)
        assert (record["status"], record["num_differing"]) == ("ok", 0)
        assert record["reference"] == "sequential" and record["metrics"]["request_goodput"] == 0
        assert [r["prompt_len"] for r in record["requests"]] == [40, 39, 38, 37]
        assert [r["output_len"] for r in record["requests"]] == [60] * 4
        ends = [r["finished_ms"] for r in record["requests"]]
        assert record["metrics"]["makespan_s"] == pytest.approx(max(ends) / 1e3)
        workload = record["config"]["workload"]
        assert workload["num_requests"] == 4 and workload["gen_len"] is None
    preempted = {
        record.name: record.metrics.num_preemptions for record in records if record.metrics
    }
    assert preempted["sequential"] == 0 < preempted["inflight"]
    for record in records:
        left = sum(len(request.preempted_ms) for request in record.requests)
        assert record.metrics is not None and left == record.metrics.num_preemptions
        for request in record.requests:
            assert len(request.joined_ms) == len(request.preempted_ms) + 1
            spans = spans_of(request)
            total_ms = 1e3 * sum(length for _, _, length in spans)
            assert total_ms == pytest.approx(request.finished_ms - request.arrival_ms)
    draw_timeline(records, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    frames = (tmp_path / "frames.txt").read_text()
    assert "inflight with drafts: 4 of 4 requests have ended, 240 of 240 tokens" in frames
    assert [record["config"]["decoding"]["drafter"] for record in read] == [None] * 4 + ["self"]
    assert read[-1]["config"]["kv"]["budget"] == 20 and "kv" not in read[3]["config"]
    check_table(records)


def check_table(records: list[ServingRecord]) -> None:
    (table,) = tables(records)
    rows = {label: cells for label, *cells in table.body}
    known = len(ServingMetrics.__dataclass_fields__) - 1  # the rate served belongs to a sweep
    assert len(rows) == known and "served/s" not in rows, "labels are distinct"
    assert [len(cells) for cells in rows.values()] == [len(records)] * len(rows)
    assert rows["in flight, mean"][0] == "1.00"
    assert verdict(records[0]) == "sequential: the reference of the others"
    assert verdict(records[3]) == "inflight: all 4 requests have the tokens of sequential"


def test_rates_are_swept(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = parse([
        *("--model", str(tiny_checkpoint), "--dtype", "float32", "--threads", "1"),
        *("--num_requests", "4", "--prefix_len", "8", "--gen_len", "3", "--sweep_rate"),
        *("2000", "1000", "--goodput", "e2el:100000", "--out", str(tmp_path / "out.jsonl")),
    ], ALONE)  # fmt: skip
    records, _ = measured(asked)
    assert [record.config["workload"]["arrival"] for record in records] == [
        "poisson:0.5", "poisson:1",
    ]  # fmt: skip
    first, second = ([r.arrival_ms for r in record.requests] for record in records)
    assert second == pytest.approx([2 * at_ms for at_ms in first])
    assert first[-1] == pytest.approx(1.5), "3 requests at 2000 a second"
    assert all(record.metrics and record.metrics.served_rate for record in records)
    print_tables(tables(records))
    said = capsys.readouterr().out
    assert (
        "saturation rate: 2e+03 requests/s" in said
        and "90% of the requests keep e2el 100000 ms" in said
    )
    assert len(tables(records)[0].rows) == 2, "a row for each rate"
    draw_rates(records, tmp_path / "rates.svg")
    assert "<svg" in (tmp_path / "rates.svg").read_text()


def test_the_driver_prints_one_table(launch: Launch, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = launch(
        "inflight_benchmark.py", "--model", tiny_checkpoint, "--num_requests", 3, "--prefix_len",
        20, "--gen_len", "uniform:2:5", "--arrival", "constant:1", "--modes", "inflight",
        "static", "--dtype", "float32", "--out", tmp_path / "out.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "static: all 3 requests have the tokens of inflight" in done.stdout
    assert "makespan, s" in done.stdout and "2 records appended" in done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_every_rank_count_serves_the_same_tokens(
    launch: Launch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Two ranks, a dynamic batching whose batches depend on the clock, sampling, and a standalone
    draft on one of the ranks, whose tokens are of the same distribution only."""
    out = tmp_path / "out.jsonl"
    done = launch(
        "inflight_benchmark.py", "--model", tiny_checkpoint, "--num_requests", 4, "--prefix_len",
        20, "--gen_len", "uniform:2:9", "--arrival", "poisson:5", "--modes", "sequential",
        "dynamic", "inflight", "--window_ms", 4, "--dtype", "float32", "--out", out,
        "--temperature", 0.8, "--top_p", 0.9, "--draft", f"model:{tiny_checkpoint}", "--budget",
        20, "--num_sink_tokens", 4, "--draft_ranks", 1, num_ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "inflight: all 4 requests have the tokens of sequential" in done.stdout
    assert "inflight, model: sampled, so the tokens of drafts are not compared" in done.stdout
    threads = [json.loads(line)["threads"] for line in out.read_text().splitlines()]
    assert (
        len(threads) == 4 and all(each == threads[0] for each in threads) and len(threads[0]) == 2
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["num_differing"] for r in records] == [0, 0, 0, None]
    assert [r["environment"]["world_size"] for r in records] == [2] * 4
    assert records[3]["config"]["draft"]["rank_group"] == [1]
    assert records[0]["config"]["sampling"]["temperature"] == 0.8


def test_an_interruption_leaves_readable_records(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve, out = Server.serve, tmp_path / "out.jsonl"

    def interrupted(server: Server, each: Pass, *seen: Any) -> Served:
        if each.mode == "inflight":
            raise KeyboardInterrupt
        return serve(server, each, *seen)

    monkeypatch.setattr(Server, "serve", interrupted)
    monkeypatch.setattr("sys.argv", ["magicdec inflight", *map(str, (
        "--model", tiny_checkpoint, "--num_requests", 2, "--prefix_len", 8, "--gen_len", 3,
        "--modes", "sequential", "inflight", "--dtype", "float32", "--threads", 1, "--out", out,
    ))])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert f"interrupted; 1 records are in {out}" in capsys.readouterr().err
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["config"]["workload"]["batching"] == "sequential" and record["metrics"]
