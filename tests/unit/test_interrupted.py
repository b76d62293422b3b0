"""Ctrl-C in a run of many batches: the batches that are done make a record."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from identities import check_record

from magicdec.cli.report import conclude
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.run.run import Run, execute
from magicdec.setup.prepare import prepare

ALONE = Launch(0, 1, 0, 1)
PASSES = 2  # of a batch


@pytest.fixture
def config(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        model=ModelSection(str(tiny_checkpoint), "float32"),
        parallel=ParallelSection(device="cpu", threads=1),
        kv=KVSection("streaming_llm", 24),
        decoding=DecodingSection("speculative", "self", 2),
        workload=WorkloadSection(
            str(text_file), batch_size=2, prefix_len=60, gen_len=12, num_batches=3
        ),
        output=OutputSection(results=str(tmp_path / "runs.jsonl")),
    )


def interrupt(monkeypatch: pytest.MonkeyPatch, num_passes: int) -> None:
    """Ctrl-C after so many measured passes."""
    measure, done = Run.measure_pass, []

    def measure_pass(self: Run, *args: Any) -> None:
        if len(done) == num_passes:
            raise KeyboardInterrupt
        measure(self, *args)
        done.append(args)

    monkeypatch.setattr(Run, "measure_pass", measure_pass)


def counts(record: RunRecord) -> dict[str, dict[str, Any]]:
    """The samples of a record that are no times and no memory."""
    assert record.samples is not None
    return {
        name: {
            key: value
            for key, value in asdict(samples).items()
            if not key.endswith("_ms") and key != "peak_memory_bytes"
        }
        for name, samples in record.samples.items()
    }


# In the second case one pass of the third batch is done, and the other is not.
@pytest.mark.parametrize("num_passes", [2 * PASSES, 2 * PASSES + 1])
def test_the_done_batches_are_those_of_a_run_of_as_many(
    num_passes: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shorter = replace(config, workload=replace(config.workload, num_batches=2))
    expected = execute(prepare(shorter, ALONE), is_leader=False).record
    interrupt(monkeypatch, num_passes)
    assert conclude(prepare(config, ALONE)) == 130
    (record,) = load_records(tmp_path / "runs.jsonl")
    assert (record.status, record.error) == ("interrupted", "interrupted after 2 of 3 batches")
    assert not record.passed and record.correctness == expected.correctness
    assert counts(record) == counts(expected)
    assert record.metrics is not None and expected.metrics is not None
    assert record.metrics.acceptance_rate == expected.metrics.acceptance_rate
    check_record(record)


def test_without_a_done_batch_there_is_no_record(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt(monkeypatch, 1)
    assert conclude(prepare(config, ALONE)) == 130
    assert not (tmp_path / "runs.jsonl").exists()


def test_what_differs_is_not_judged_and_has_no_performance(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt(monkeypatch, 2 * PASSES)
    measure = Run.measure_pass

    def measure_pass(self: Run, name: str, *args: Any) -> None:
        measure(self, name, *args)
        self.finished[name][0].output_ids[-1] += name == "speculative"

    monkeypatch.setattr(Run, "measure_pass", measure_pass)
    assert conclude(prepare(config, ALONE)) == 130
    (record,) = load_records(tmp_path / "runs.jsonl")
    assert record.error is not None and "were not judged" in record.error
    assert (record.status, record.correctness, record.metrics) == ("interrupted", None, None)


def test_sampled_batches_are_kept_without_comparison(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt(monkeypatch, 2 * PASSES)
    sampled = replace(config, sampling=SamplingSection(temperature=0.7))
    assert conclude(prepare(sampled, ALONE)) == 130
    (record,) = load_records(tmp_path / "runs.jsonl")
    assert record.correctness is not None and record.correctness.reference is None
    assert record.metrics is not None
