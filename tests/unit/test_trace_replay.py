"""Random traces of agents, served by a tiny model in float32: every mode emits the tokens of one
request after the other, with and without a prefix cache and drafts, requests arrive as the trace
says, and the cache has what one without limits would have."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import check_metrics
from serving_command import parse_as
from test_batching import measured
from trace_files import agent, call, mooncake, weka, weka_traces, write_lines

from magicdec.kv import prefix_cache
from magicdec.records.pass_record import PassRecord
from magicdec.workload.traces.sessions import THINK, WAITS, Session

MODES = ("sequential", "inflight", "inflight+draft")
CACHED = ("--prefix_cache", "--block_tokens", "8", "--cache_tokens", "4000")
CLOCK_MS = 0.01  # by which two of its readings may differ where they are one


def serve(
    checkpoint: Path, text: Path, folder: Path, form: str, rows: Sequence[Any], *words: str
) -> list[PassRecord]:
    path = write_lines(folder / "trace.jsonl", rows)
    command = parse_as_trace(checkpoint, text, folder, f"{form}:{path}", *words)
    return measured(command).records


def parse_as_trace(checkpoint: Path, text: Path, folder: Path, arrival: str, *words: str) -> Any:
    from magicdec.cli.serve import COMMANDS
    from magicdec.distributed.groups import Launch

    fixed = ["--model", str(checkpoint), "--dataset", str(text), "--dtype", "float32"]
    fixed += ["--device", "cpu", "--threads", "1", "--out", str(folder / "r.jsonl")]
    given = [*fixed, "--arrival", arrival, "--draft", "ngram", *words]
    if "--modes" not in words:
        given += ["--modes", *MODES]
    return COMMANDS["serve"].parse(given, Launch(0, 1, 0, 1))


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


@settings(max_examples=5)
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
            command = parse_as_trace(
                tiny_checkpoint,
                text_file,
                Path(name),
                f"weka:{write_lines(Path(name) / 't.jsonl', traces)}",
                *words,
                *more,
            )
            for record in measured(command).records:
                assert record.status == "verified", record.name
                assert check_metrics(record) == [], record.name
                check_arrivals(record, command.options.replay.sessions, waits)
                outputs.append(record.output_hashes)
        assert len(outputs) == 6 and all(output == outputs[0] for output in outputs)
