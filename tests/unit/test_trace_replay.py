"""Random traces of agents, served by a tiny model in float32: every mode emits the tokens of one
request after the other, with and without a prefix cache and drafts, requests arrive as the trace
says, and the cache has what one without limits would have."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Launch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import check_metrics
from test_batching import measured
from trace_files import BLOCK, agent, call, mooncake, weka, weka_traces, write_lines

from magicdec.bench.showing import session_tables, tables, turns_shown
from magicdec.cli.serve import COMMANDS, ServeCommand
from magicdec.distributed.groups import Launch as Ranks
from magicdec.kv import prefix_cache
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.workload.traces.sessions import THINK, WAITS, Session

MODES = ("sequential", "inflight", "inflight+draft")
CACHED = ("--prefix_cache", "--block_tokens", str(BLOCK), "--cache_tokens", "4000")
CLOCK_MS = 0.01  # by which two of its readings may differ where they are one
FIXED = ("--attention", "grouped", "--dtype", "float32", "--device", "cpu", "--threads", "1")


def command_of(
    checkpoint: Path, text: Path | None, folder: Path, form: str, rows: Sequence[Any], *words: str
) -> ServeCommand:
    path = write_lines(folder / "trace.jsonl", rows)
    given = ["--model", str(checkpoint), *FIXED]
    given += [] if text is None else ["--dataset", str(text)]
    given += ["--out", str(folder / "r.jsonl"), "--arrival", f"{form}:{path}", *words]
    given += [] if "--modes" in words else ["--modes", *MODES]
    given += [] if "--draft" in words else ["--draft", "ngram"]
    return COMMANDS["serve"].parse(given, Ranks(0, 1, 0, 1))


def check_arrivals(record: PassRecord, sessions: Sequence[Session], waits: str) -> None:
    """Each request comes after those that it follows, and after its own time."""
    number = 0
    for place, session in enumerate(sessions):
        own = record.requests[number : number + len(session.requests)]
        number += len(own)
        for request, traced in zip(own, session.requests, strict=True):
            assert (request.conversation, request.branch) == (place, traced.branch)
            ends_ms = [own[before].finished_ms for before in traced.after]
            begin_ms = own[0].arrival_ms
            wait_ms = 1e3 * traced.wait_s if waits == THINK else 0.0
            expected = max(ends_ms, default=begin_ms) + wait_ms
            if waits == "start":
                expected = max(expected, begin_ms + 1e3 * traced.start_s)
            if request is not own[0]:
                assert request.arrival_ms == pytest.approx(expected, abs=CLOCK_MS), traced.place
    assert number == len(record.requests)


@settings(max_examples=3)
@given(st.lists(weka_traces(), min_size=1, max_size=3), st.sampled_from(WAITS))
def test_tokens_of_random_traces_are_equal(
    tiny_checkpoint: Path, text_file: Path, traces: list[dict[str, Any]], waits: str
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "LEAST_COPIED", 1)
        words = ["--scale", "1/2", "--waits", waits, "--ignore_eos"]
        if waits == THINK:
            words += ["--longest_wait_s", "0.04"]
        outputs = list[list[str]]()
        for more in ((), CACHED):
            arguments = tiny_checkpoint, text_file, Path(name), "weka", traces
            command = command_of(*arguments, *words, *more)
            for record in measured(command).records:
                assert record.status == "verified", record.name
                assert check_metrics(record) == [], record.name
                assert command.options.replay is not None
                check_arrivals(record, command.options.replay.sessions, waits)
                outputs.append(record.output_hashes)
        assert len(outputs) == 6 and all(output == outputs[0] for output in outputs)


AGENTS = [
    weka(
        call(0, 24, think_time=0.0, api_time=1.0),
        agent(1, call(1, 16, [50, 51]), call(2, 21, [50, 51]), duration_ms=1500),
        call(3, 37, think_time=9.0),
        call(4, 19, [1, 7]),
    ),
    weka(call(0, 8, out=2), call(1, 17, out=5, think_time=0.01)),
    weka(call(0, 40)),
]


def test_every_kind_of_mode_replays_a_trace(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    modes = ["sequential", "static", "dynamic", "inflight", "ring", "ring+draft", "pipeinfer"]
    words = ["--longest_wait_s", "0.02", "--modes", *modes, "--window_ms", "1"]
    command = command_of(tiny_checkpoint, text_file, tmp_path, "weka", AGENTS, *words)
    records = measured(command).records
    assert [record.mode for record in records] == modes
    assert command.options.replay is not None
    for record in records:
        assert (record.status, record.num_differing) == ("verified", 0), record.name
        check_arrivals(record, command.options.replay.sessions, THINK)
        assert [request.branch for request in record.requests] == [0, 1, 1, 0, 0, 0, 0, 0]
        assert [request.turn for request in record.requests] == [1, 1, 2, 2, 3, 1, 2, 1]
        assert [r.prompt_len for r in record.requests] == [24, 16, 21, 37, 19, 8, 17, 40]
        assert [r.num_known_tokens for r in record.requests] == [0, 0, 16, 24, 8, 0, 8, 0]
        assert record.metrics is not None
        assert record.metrics.theoretical_hit_rate == pytest.approx(56 / 182)
    assert f"3 sessions, arrival weka:{tmp_path}/trace.jsonl; ranks 1" in tables(records)[0].title


def test_sessions_of_a_closed_loop_begin_when_others_have_ended(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the cache has the whole blocks that one without limits would have, but for the last
    token of a prompt, which has to be computed."""
    monkeypatch.setattr(prefix_cache, "LEAST_COPIED", 1000)
    words = ["--waits", "none", "--concurrency", "1", *CACHED, "--draft", "self", "--budget", "20"]
    words += ["--gamma", "2"]
    command = command_of(tiny_checkpoint, text_file, tmp_path, "weka", AGENTS, *words)
    records = measured(command).records
    for record in records:
        assert record.status == "verified" and check_metrics(record) == [], record.name
        sessions = [
            [request for request in record.requests if request.conversation == number]
            for number in range(3)
        ]
        for before, after in pairwise(sessions):
            assert after[0].arrival_ms == max(request.finished_ms for request in before)
        for request in record.requests:
            known = min(request.num_known_tokens or 0, request.prompt_len - 1)
            assert request.joined_prefix_tokens == [known // BLOCK * BLOCK], record.name
        metrics = record.metrics
        assert metrics is not None and metrics.prefix_hit_rate is not None
        assert metrics.theoretical_hit_rate == pytest.approx(metrics.prefix_hit_rate)
    assert records[0].acceptance_by_hit is None and records[0].acceptance_by_turn is None
    drafting = records[-1]
    assert drafting.acceptance_by_hit is not None and drafting.acceptance_by_turn is not None
    groups = drafting.acceptance_by_hit
    assert {name: group.num_prompts for name, group in groups.items()} == {
        "cold": 4,
        "after a hit": 4,
    }
    counts = [group.num_prompts for group in drafting.acceptance_by_turn.values()]
    assert list(drafting.acceptance_by_turn) == ["1", "2", "3 to 4"] and counts == [4, 3, 1]
    (table,) = session_tables(records)
    keys = [column.key for column in table.headings]
    assert keys[1:3] == ["sessions_per_hour", "mean_session_ms"]
    assert "theoretical_hit_rate" in keys and table in tables(records, is_verbose=False)


def test_many_turns_have_few_columns() -> None:
    assert turns_shown(8) == [*range(1, 9)]
    assert turns_shown(51) == [1, 2, 4, 8, 16, 32, 51] and turns_shown(64)[-2:] == [32, 64]


def test_requests_of_mooncake_arrive_at_their_times(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    rows = [mooncake(700 + 64 * n, 600 + n, [5, 6 + n % 2]) for n in range(4)]
    words = ["--scale", "1/64", *CACHED]
    command = command_of(tiny_checkpoint, text_file, tmp_path, "mooncake", rows, *words)
    for record in measured(command).records:
        assert record.status == "verified"
        found = [request.arrival_ms for request in record.requests]
        assert found == pytest.approx([0.0, 1.0, 2.0, 3.0])
        assert [request.prompt_len for request in record.requests] == [9, 9, 9, 9]
        assert [request.num_known_tokens for request in record.requests] == [0, 8, 9, 9]
    words = ["--scale", "1/64", "--session_starts", "constant:2"]
    command = command_of(tiny_checkpoint, text_file, tmp_path, "mooncake", rows, *words)
    assert [shape.arrival_ms for shape in command.options.shapes] == [0.0, 2.0, 4.0, 6.0]


def test_ranks_replay_a_trace_alike(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """What comes next follows from times that all ranks know."""
    out = tmp_path / "out.jsonl"
    words = ["--model", tiny_checkpoint, "--dataset", text_file, *FIXED]
    words += ["--arrival", f"weka:{write_lines(tmp_path / 'trace.jsonl', AGENTS)}"]
    words += ["--longest_wait_s", "0.02", "--modes", "sequential", "inflight", "ring"]
    done = launch("inflight_benchmark.py", *words, "--out", out, num_ranks=2)
    assert done.returncode == 0, done.stderr
    records = list(read_records(out, PassRecord))
    assert [record.status for record in records] == ["verified"] * 3
    assert all(record.environment.world_size == 2 for record in records)


REFUSED = {
    "--scale 1/3": "trace.jsonl, line 1, requests[0] has 8 tokens, which would be no whole number",
    "--scale 0": "--scale 0 is not known; choose a number above 0, such as 1/64",
    "--num_requests 4": "--num_requests 4: TRACE has 3; choose fewer, or leave the flag out for",
    "--turns 2": "--turns 2: the sessions of weka have turns of their own; leave it out",
    "--think_ms 3": "--think_ms 3 does nothing without --turns; leave it out",
    "--waits start --longest_wait_s 3": "--longest_wait_s 3 bounds the times of --waits think",
    "--session_starts often": "--session_starts often is not known; choose from burst, constant:MS",
    "--session_starts burst --concurrency 2": "--concurrency says when sessions begin; leave one",
    "--concurrency 4": "--concurrency 4 exceeds the 3 requests",
    "--gen_len 5": "--gen_len does nothing here: the trace has the lengths",
    "--prompt_format chat": "--prompt_format chat: the prompts of --arrival weka are blocks",
    "--dataset recall": "--dataset recall: --arrival weka cuts its blocks from running text",
    "--dataset mt_bench:x.jsonl": "--dataset mt_bench:x.jsonl: --arrival weka cuts its blocks",
    "--arrival burst --scale 1/2": "--scale 1/2: --arrival burst is no trace of sessions; give",
    "--arrival burst --waits none": "--waits none: --arrival burst is no trace of sessions; give",
    "--arrival weka:": "--arrival weka: is not known; choose from burst",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    words: str, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as refused:
        command_of(tiny_checkpoint, text_file, tmp_path, "weka", AGENTS, *words.split())
    message = REFUSED[words].replace("TRACE", f"{tmp_path}/trace.jsonl")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_request_beyond_the_model_is_refused_with_its_place(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    trace = weka(call(0, 8), call(1, 1020, out=8))
    command = command_of(tiny_checkpoint, text_file, tmp_path, "weka", [trace])
    with pytest.raises(ValueError) as refused:
        measured(command)
    assert "line 1, requests[1]: a prompt of 1020 tokens and 8 new ones, after --scale, exceed" in (
        str(refused.value)
    )
    assert "\n" not in str(refused.value)
