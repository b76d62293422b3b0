"""A gate for one's own model runs where the model and the text lie elsewhere, and refuses others
before any case runs. No case runs here: the processes that run them are replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from synthetic_records import drawn

from magicdec.bench.gate.cases import Case
from magicdec.bench.gate.measuring import Result
from magicdec.cli import gate as gate_command
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.records.pass_record import PassRecord
from magicdec.setup.prepare import prepare

DEMO = ROOT / "magicdec" / "demo"
TEXT = " ".join(f"The {n}. ship sailed past the light of the old harbour." for n in range(120))


def config_at(place: Path, num_batches: int = 1) -> RunConfig:
    return RunConfig(
        model=ModelSection(str(place / "target"), "float32"),
        draft=DraftSection(str(place / "draft")),
        kv=KVSection("full", -1),
        decoding=DecodingSection("speculative", "model", 4, ignore_eos=True),
        workload=WorkloadSection(str(place / "text.txt"), 4, 64, 8, num_batches=num_batches),
    )


def record_at(place: Path) -> PassRecord:
    """What a run of the case there leaves behind."""
    prepared = prepare(config_at(place), Launch())
    record = drawn()
    return replace(record, config=prepared.config.to_dict(), workload=prepared.describe_workload())


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Where the models and the text of the baselines are."""
    for name in ("target", "draft"):
        shutil.copytree(DEMO / name, tmp_path / "there" / name)
    (tmp_path / "there" / "text.txt").write_text(TEXT)
    return tmp_path / "there"


@pytest.fixture
def here(there: Path) -> Path:
    """The same under other names."""
    place = there.with_name("here")
    shutil.copytree(there, place)
    return place


Gate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gate(
    there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> Gate:
    """The gate of a case that was measured there, whose result is the same here."""
    baseline = record_at(there)
    result = record_at(here)
    assert result.workload is not None and result.workload.draft is not None
    draft = replace(result.workload.draft, model="small")
    result = replace(result, workload=replace(result.workload, model="large", draft=draft))
    (tmp_path / "gate.jsonl").write_text(baseline.to_json() + "\n")
    for name, model in (("large", "target"), ("small", "draft")):
        (here / model).rename(here / name)
    shutil.rmtree(there)

    def measure(cases: Sequence[Case], num_processes: int, finished: Any) -> list[Result]:
        (case,) = cases
        config = case.config
        assert config.model.model == str(here / "large")
        assert config.draft is not None and config.draft.model == str(here / "small")
        assert config.workload.dataset == str(here / "text.txt")
        return [result]

    monkeypatch.setattr(gate_command, "measure", measure)

    def run(**changed: str) -> tuple[int, str, str]:
        places = {
            "model": here / "large",
            "draft": f"model:{here / 'small'}",
            "dataset": here / "text.txt",
        }
        words = [w for name, value in (places | changed).items() for w in (f"--{name}", value)]
        return command("gate", "--baseline", tmp_path / "gate.jsonl", *words)

    return run


def test_a_gate_passes_where_its_models_and_text_lie_elsewhere(gate: Gate) -> None:
    code, out, err = gate()
    assert (code, "1 same" in out) == (0, True), out + err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("model", "demo-draft"), ("draft", "model:demo"), ("dataset", "demo"), ("draft", "self")],
)
def test_another_model_and_another_text_are_refused(flag: str, value: str, gate: Gate) -> None:
    code, out, err = gate(**{flag: value})
    told = "choose model:NAME" if value == "self" else "that the baseline was measured with"
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"--{flag} {value}" in err and told in err


def test_another_model_is_refused_before_its_limits(
    gate: Gate, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """One that could not run the baseline's prompts is another model in the first place."""
    short = shutil.copytree(tiny_checkpoint, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    code, _, err = gate(model=str(short))
    assert code == 2 and f"--model {short}: its weights are not those that the baseline" in err


def test_fewer_than_four_prompts_are_refused(there: Path, tmp_path: Path, command: Command) -> None:
    record = record_at(there)
    record.config["workload"] |= {"batch_size": 3}
    (tmp_path / "gate.jsonl").write_text(record.to_json() + "\n")
    few = "--B 3 x --num_batches 1 are 3 prompts; a gate needs at least 4"
    for words in (["gate"], ["gate", "save"]):
        code, _, err = command(*words, "--baseline", tmp_path / "gate.jsonl")
        assert code == 2 and few in err
    new = ("--baseline", tmp_path / "new.jsonl", "--B", 3, "--num_batches", 1)
    code, _, err = command("gate", "save", *new)
    assert code == 2 and few in err and not (tmp_path / "new.jsonl").exists()
