"""The gate on real runs: it finds planted losses of acceptance, and lets unchanged code pass."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WITH_SMALL_READS
from torch import Tensor

from magicdec.bench.gate.cases import Case, Subject
from magicdec.bench.gate.files import read_baselines
from magicdec.bench.gate.measuring import Result, run_cases
from magicdec.cli import gate
from magicdec.cli.flags import LoneCommand
from magicdec.config.sections import KVSection
from magicdec.kv.view import SinksAndWindow
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.pass_record import PassRecord
from magicdec.systems import prefilled_batching

pytestmark = pytest.mark.wide

SMALL = Subject(prefix_len=256, batch_size=8, num_batches=2, gen_len=48)
STREAMING = [SMALL.case("self", KVSection("streaming_llm", b), 4) for b in (65, 97)]
NOISE = 0.05  # of the standard deviation of each matrix
DRAFT = [SMALL.case("model", KVSection("full"), 4)]


def records_of(cases: Sequence[Case], threads: int = 1) -> list[PassRecord]:
    found = list(run_cases([(i, case.with_threads(threads)) for i, case in enumerate(cases)]))
    assert [number for number, _ in found] == list(range(len(cases)))
    records = [record for _, record in found if isinstance(record, PassRecord)]
    assert len(records) == len(found), found
    return records


@pytest.fixture(scope="module")
def baselines() -> list[PassRecord]:
    return records_of([*STREAMING, *DRAFT])


def move(ranges: Callable[[Any, Tensor], Tensor], part: int) -> Callable[[Any, Tensor], Tensor]:
    """The ranges with one of the two parts, sinks or window, off by a block."""

    def moved(self: Any, committed: Tensor) -> Tensor:
        found = ranges(self, committed).clone()
        found[:, part] += 16 if part == 0 else -16
        return found

    return moved


@pytest.mark.parametrize("part", [0, 1], ids=["sinks", "window"])
def test_a_policy_that_is_off_by_a_block_fails(
    part: int, baselines: list[PassRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SinksAndWindow, "ranges", move(SinksAndWindow.ranges, part))
    found = compare(records_of(STREAMING), baselines)
    assert exit_code(found) == 1, found


def test_a_draft_with_perturbed_weights_fails(
    baselines: list[PassRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint, which is of the small tensors, does not tell."""
    make_draft = prefilled_batching.make_draft

    def perturbed(*args: Any) -> Any:
        draft = make_draft(*args)
        assert draft is not None and draft.runner is not None
        generator = torch.Generator().manual_seed(0)
        for parameter in draft.runner.model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += NOISE * parameter.data.std() * noise
        return draft

    monkeypatch.setattr(prefilled_batching, "make_draft", perturbed)
    (found,) = compare(records_of(DRAFT), baselines)
    assert exit_code([found]) == 1, found


def test_unchanged_code_has_the_same_counts(baselines: list[PassRecord]) -> None:
    found = compare(records_of([*STREAMING, *DRAFT]), baselines)
    assert {comparison.verdict for comparison in found} == {"same"}


def changed(case: Case, name: str, **settings: Any) -> Case:
    """The case with other settings in a section of its config."""
    section = replace(getattr(case.config, name), **settings)
    return replace(case, config=replace(case.config, **{name: section}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unchanged_code_passes_with_other_kernels_and_threads(
    dtype: str, baselines: list[PassRecord]
) -> None:
    """The sums are rounded in other places, so some drafts are judged otherwise. Two threads wait
    for each other for long where other tests keep the cores busy: that is one run only."""
    cases = [changed(case, "model", dtype=dtype) for case in (STREAMING[0], DRAFT[0])]
    old = [baselines[0], baselines[-1]]
    changes = [("sdpa", 1, cases), ("auto", 2, cases[1:])]
    if dtype == "bfloat16":
        old = records_of(cases)
        changes = [("grouped", 1, cases)]
    for backend, threads, some in changes:
        other = [changed(case, "attention", backend=backend) for case in some]
        found = compare(records_of(other, threads), old)
        assert exit_code(found) == 0, (backend, threads, found)


def test_the_command_saves_cases_and_runs_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once in processes of its own, which take longer to start than to run the cases."""
    path = tmp_path / "gate.jsonl"
    junit = tmp_path / "gate.xml"

    def measure_here(cases: Sequence[Case], *_: Any) -> list[Result]:
        return [result for _, result in run_cases(list(enumerate(cases)))]

    def call(*flags: object, command: LoneCommand = gate.main) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["magicdec gate", *map(str, flags)])
        with pytest.raises(SystemExit) as stopped:
            command()
        return int(stopped.value.code or 0), capsys.readouterr().out

    measure = gate.measure
    monkeypatch.setenv("PYTHONPATH", WITH_SMALL_READS["PYTHONPATH"])
    monkeypatch.setattr(gate, "measure", measure_here)
    small = ("--prefix_len", 48, "--B", 4, "--num_batches", 1, "--gen_len", 16, "--nproc", 1)
    code, out = call("--baseline", path, *small, command=gate.save)
    records = read_baselines(path)
    assert code == 0 and f"{len(records)} baselines written" in out and len(records) >= 6
    monkeypatch.setattr(gate, "measure", measure)
    code, out = call("--baseline", path, "--junit", junit)
    assert code == 0 and junit.read_text().count("<testcase") == len(records)
    # Which drafts are judged in time differs from pass to pass in `pipeinfer` alone.
    is_timed = [record.mode == "pipeinfer" for record in records]
    same = f"{is_timed.count(False)} same" in out or f"{len(records)} same" in out
    assert same and is_timed.count(True) == 1
    monkeypatch.setattr(gate, "measure", measure_here)
    code, out = call("--baseline", path, "--quick")
    assert code == 0 and "regression" not in out
    by_margin = {record.margin == 0: record for record in records}
    path.write_text("".join(record.to_json() + "\n" for record in by_margin.values()))
    code, out = call("--baseline", path, "--margin", 0.1, command=gate.save)
    assert code == 0 and [r.margin for r in read_baselines(path)] == [
        0.0 if is_exact else 0.1 for is_exact in by_margin
    ]
