"""The rule of the gate on drafts at every position of texts: what is compared, what is named, and
what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acceptance_records import acceptance_record, write_records
from conftest import Command
from synthetic_records import KERNELS, drawn

from magicdec.bench.acceptance import measuring
from magicdec.bench.acceptance.record import AcceptanceRecord, digits_of
from magicdec.bench.gate.cases import Subject, standard_cases
from magicdec.bench.gate.measuring import run_cases
from magicdec.cli import compare as compare_command
from magicdec.config.sections import ModelSection
from magicdec.records.comparison.compare import compare
from magicdec.records.drafted import DraftedPass

TEXTS = ("03012233", "22330112", "30113301", "13023331")
NAME = "--draft self --kv_policy streaming_llm --budget 65 --gamma 3, every position"


def judged(accepted: Sequence[str] = TEXTS, context: int = 64, **fields: Any) -> AcceptanceRecord:
    """One of the gate, on native kernels."""
    record = acceptance_record(context, accepted)
    environment = replace(
        record.environment, compiler="g++ 12", instructions=["AVX2"], kernels=KERNELS
    )
    config = record.config | {"model": record.config["model"] | {"native_steps": "on"}}
    hashes = [f"text {number}" for number in range(len(accepted))]
    known = {"environment": environment, "config": config, "text_hashes": hashes, "seal": ""}
    return replace(record, **known | fields)


def elsewhere(record: AcceptanceRecord) -> AcceptanceRecord:
    """Of another machine, so that statistics decide."""
    return replace(record, environment=replace(record.environment, torch="3"))


def test_equal_counts_at_every_position_are_the_same() -> None:
    (found,) = compare([judged()], [judged()])
    assert str(found) == f"{NAME}: acceptance rate 0.5833, every step as before [exact]"
    (found,) = compare([elsewhere(judged())], [judged()])
    assert found.verdict == "same" and "all counts as before [statistics: torch 3" in str(found)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "accepted": (
        {"accepted": [TEXTS[0], "22310112", *TEXTS[2:]]},
        "prompt 1, step 3: accepted 1 of 3, was 3; acceptance rate 0.5833 -> 0.5625, -3.6 %",
    ),
    "gained": (
        {"accepted": [*TEXTS[:3], "13023333"]},
        "prompt 3, step 7: accepted 3 of 3, was 1; acceptance rate 0.5833 -> 0.6042, +3.6 %",
    ),
    "drafted": (
        {"drafted": ["33333333"] * 3 + ["33033333"]},
        "prompt 3, step 2: 0 drafts proposed, was 3, accepted 0 of 0, was 0",
    ),
    "text": (
        {"text_hashes": ["text 0", "other", "text 2", "text 3"]},
        "prompt 1, emitted other tokens",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_of_a_position_is_named_and_fails(name: str) -> None:
    fields, message = CHANGES[name]
    (found,) = compare([judged(**fields)], [judged()])
    assert found.verdict == "changed" and found.rule == "exact" and message in str(found), found


def many(chance: float, seed: int = 0) -> AcceptanceRecord:
    """Of 8 texts, in which each draft token is right with that probability."""
    rng = np.random.default_rng(seed)
    rights = rng.random((8, 64, 3)) < chance
    return judged([digits_of(text.cumprod(axis=1).sum(axis=1).tolist()) for text in rights])


def test_elsewhere_statistics_over_texts_decide() -> None:
    """And say the loss that they would have seen."""
    (found,) = compare([elsewhere(many(0.7))], [many(0.8)])
    assert found.verdict == "regression" and "beyond the margin of 2 % and the noise" in str(found)
    assert found.change is not None and found.change.num_prompts == 8
    assert "would be seen in 19 of 20 runs" in str(found)
    (found,) = compare([elsewhere(many(0.8, seed=1))], [many(0.8)])
    assert found.verdict == "tolerated", found
    (found,) = compare([elsewhere(many(0.8))], [many(0.7)])
    assert found.verdict == "gain", found


def test_records_of_the_command_and_of_earlier_versions_are_compared_by_statistics(
    tmp_path: Path, command: Command
) -> None:
    """They have no seal, and earlier ones no hash of each text: that of all stands for each."""
    old = judged(seal=None, text_hashes=None)
    line = old.to_json()
    for absent in (', "text_hashes": null', ', "margin": null', ', "seal": null'):
        assert absent in line
        line = line.replace(absent, "")
    path = tmp_path / "old.jsonl"
    path.write_text(f"{line}\n")
    new = write_records(tmp_path / "new.jsonl", [old])
    found = command(compare_command, new, path)
    assert found.code == 0 and "all counts as before" in found.out and "1 same" in found.out
    assert "holds no log of what was drafted" in found.out
    other = write_records(tmp_path / "other.jsonl", [replace(old, outputs_sha256="x")])
    assert "; 4 outputs differ" in command(compare_command, other, path).out
    longer = write_records(tmp_path / "longer.jsonl", [acceptance_record(128, TEXTS, sha256="x")])
    found = command(compare_command, longer, path)
    assert found.code == 3 and "not comparable: prefix_len 128, was 64" in found.out
    assert DraftedPass.of(old).steps is None


def test_a_position_is_no_verification_of_a_run() -> None:
    """Nor is it compared with one."""
    run = drawn(budget=65)
    (found,) = compare([judged()], [run])
    assert found.verdict == "not comparable" and "has no such record" in str(found)


@pytest.mark.parametrize("words", [("gate",), ("gate", "save")])
def test_sampled_texts_are_refused_as_baselines_in_one_line(
    words: tuple[str, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicdec.cli.gate.measure", None)
    greedy = acceptance_record(64)
    config = greedy.config | {"sampling": greedy.config["sampling"] | {"temperature": 0.8}}
    sampled = replace(
        greedy, config=config, accepted=None, acceptance_probabilities=[[[0.5, 0.4, 0.1]]]
    )
    path = write_records(tmp_path / "old.jsonl", [greedy, sampled])
    code, _, err = command(*words, "--baseline", path)
    assert code == 2 and err.count("\n") == 1, err
    assert "--temperature 0.8, every position: drafts of sampled texts are probable" in err


def test_an_edited_position_is_refused_with_its_line(tmp_path: Path, command: Command) -> None:
    line = judged().to_json()
    path = tmp_path / "old.jsonl"
    path.write_text(line.replace(TEXTS[0], TEXTS[0][::-1]) + "\n")
    code, _, err = command("gate", "--baseline", path)
    assert code == 2 and f"{path}:1: this record was edited since `magicdec gate` wrote it" in err


def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, command: Command) -> None:
    line = judged(seal=None).to_json()
    path = tmp_path / "old.jsonl"
    for text, other, message in (
        (f'"{TEXTS[0]}", ', "", "it has not as many texts as prompts"),
        ('"text 3"', '"text 3", "text 4"', "it has not as many texts as prompts"),
        ('"drafted": null', '"drafted": ["3"]', "it does not say at every position what was"),
        ('"decoding": ', '"coding": ', "it has no config.decoding"),
    ):
        assert line.count(text) == 1
        path.write_text(line.replace(text, other) + "\n")
        code, _, err = command("gate", "--baseline", path)
        assert code == 2 and err.count("\n") == 1 and message in err, err


def test_a_case_that_cannot_run_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(prefix_len=64, batch_size=4, num_batches=1, gen_len=5)
    (case,) = (case for case in standard_cases(subject) if case.is_at_every_position)
    config = case.config
    absent = replace(case, config=replace(config, model=ModelSection("absent", "float32")))
    cases = [(0, absent), (1, case.with_threads(1))]
    found = dict(run_cases(cases))
    assert "absent" in found[0] and isinstance(found[1], AcceptanceRecord)
    assert found[1].num_positions == 16 and found[1].seal == ""
    monkeypatch.setattr(measuring, "measure_cells", fail)
    assert dict(run_cases(cases)) == {0: found[0], 1: "RuntimeError: no room"}


def fail(*args: Any) -> None:
    raise RuntimeError("no room")
