"""The same prompts, drafts and number of drafts have the same acceptance in every way to serve
them, verification by verification; in pipelined speculation of the drafts that were judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from magicdec import LLM
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.llm import RequestOutput
from magicdec.records.acceptance import (
    AcceptanceMetrics,
    Verification,
    Verifications,
    acceptance_metrics,
)
from magicdec.records.reading import load_passes
from magicdec.setup.prepare import Prepared, prepare

WORDS = (
    "--model",
    "demo",
    "--draft",
    "model:demo-draft",
    "--kv_policy",
    "full",
    "--gamma",
    "3",
    "--dtype",
    "float32",
    "--prefix_len",
    "96",
    "--gen_len",
    "21",
    "--B",
    "3",
    "--threads",
    "1",
)
TRIES = 5
DRAFTING = ("static+draft", "inflight+draft", "ring+draft", "pipeline+draft", "pipeinfer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same")


def run_verifications(command: Command, folder: Path) -> dict[int, list[Verification]]:
    out = folder / "run.jsonl"
    words = (*WORDS, "--num_batches", "1", "--warmup_batches", "0", "--no_baseline")
    ended = command("run", *words, "--out", out)
    assert ended.code == 0, ended.err
    *_, record = load_passes(out)
    return record.verifications().by_request


def served(command: Command, folder: Path, *modes: str) -> dict[str, dict[str, Any]]:
    out = folder / f"{len(modes)}.jsonl"
    words = ("--num_requests", "3", "--arrival", "burst", "--pa", "0", "--modes", *modes)
    ended = command("serve", *WORDS, *words, "--out", out)
    assert ended.code == 0, ended.err
    return {record["name"]: record for record in map(json.loads, out.read_text().splitlines())}


def steps_of(record: dict[str, Any]) -> dict[int, list[Verification]]:
    columns = ("per_step_drafted", "per_step_accepted", "per_step_emitted")
    found = {}
    for number, request in enumerate(record["requests"]):
        counts = [request[name] or () for name in columns]
        contexts = request["per_step_context"] or [None] * len(counts[0])
        found[number] = [
            Verification(*step, context=context)
            for *step, context in zip(*counts, contexts, strict=True)
        ]
    return found


def test_every_mode_has_the_acceptance_of_a_run(command: Command, folder: Path) -> None:
    expected = run_verifications(command, folder)
    every = [step for steps in expected.values() for step in steps]
    assert 0 < sum(step.accepted for step in every) < sum(step.drafted for step in every)
    records = served(command, folder, "sequential", *DRAFTING)
    for _ in range(TRIES):  # a busy machine may judge no draft before it is known to be wrong
        if not any(steps_of(records["pipeinfer"]).values()):
            records |= served(command, folder, "pipeinfer")
    for name in DRAFTING:
        record = records[name]
        metrics = records[name]["metrics"]
        assert record["status"] == "verified", name
        steps = steps_of(record)
        if name != "pipeinfer":
            assert steps == expected, name
        found = [step for request_verifications in steps.values() for step in request_verifications]
        cancelled = [request["num_cancelled_draft_tokens"] for request in record["requests"]]
        if name in ("pipeline+draft", "pipeinfer"):
            assert metrics["num_cancelled_draft_tokens"] == sum(cancelled)
            assert name == "pipeinfer" or sum(cancelled) == 0
        else:
            assert metrics["num_cancelled_draft_tokens"] is None and set(cancelled) == {None}
        assert metrics["num_spec_steps"] == len(found) == sum(metrics["acceptance_histogram"])
        assert metrics["num_draft_tokens"] == sum(step.drafted for step in found)
        accepted = sum(step.accepted for step in found)
        assert metrics["num_accepted_draft_tokens"] == accepted
        assert metrics["draft_acceptance_rate"] == accepted / metrics["num_draft_tokens"]
        assert metrics["mean_acceptance_length"] == 1 + accepted / len(found)
        by_count = enumerate(metrics["acceptance_histogram"])
        assert sum(count * number for count, number in by_count) == accepted
    assert records["sequential"]["metrics"]["draft_acceptance_rate"] is None
    assert {request["per_step_drafted"] for request in records["sequential"]["requests"]} == {None}


def llm_results() -> list[RequestOutput]:
    """The prompts of `WORDS`, served by the Python interface."""
    config = RunConfig(
        ModelSection("demo", "float32"),
        kv=KVSection("full"),
        parallel=ParallelSection(threads=1),
        workload=WorkloadSection(batch_size=3, prefix_len=96, gen_len=21, num_batches=1),
    )
    prompts = prepare(config, Launch()).workload.prompts
    llm = LLM(
        "demo",
        "model:demo-draft",
        3,
        config.kv,
        "float32",
        max_tokens=128,
        max_concurrency=3,
        threads=1,
    )
    streams = [llm.submit(prompt, 21) for prompt in prompts]
    return [stream.result() for stream in streams]


def test_a_request_in_a_program_has_the_acceptance_that_it_has_when_served(
    command: Command, folder: Path
) -> None:
    steps = run_verifications(command, folder)
    (record,) = served(command, folder, "inflight+draft").values()
    assert steps_of(record) == steps
    results = llm_results()
    for number, result in enumerate(results):
        found = result.metrics.acceptance
        alone = Verifications({0: steps[number]})
        assert found == AcceptanceMetrics(**acceptance_metrics(alone, 1)), number
        assert found.num_spec_steps == len(steps[number])
        assert len(result.output_ids) == 1 + sum(step.emitted for step in steps[number])
    accepted = [result.metrics.acceptance.num_accepted_draft_tokens for result in results]  # type: ignore[union-attr]
    assert sum(map(int, filter(None, accepted))) == record["metrics"]["num_accepted_draft_tokens"]


def test_random_weights_have_no_acceptance(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prepared, "is_random", property(lambda prepared: True))
    for record in served(command, folder, "inflight", "inflight+draft").values():
        assert record["status"] == "verified"
        assert record["metrics"]["draft_acceptance_rate"] is None
        assert record["metrics"]["acceptance_histogram"] is None
        assert all(request["per_step_drafted"] is None for request in record["requests"])
