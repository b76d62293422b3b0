"""`magicdec model check` of weights in the formats that checkpoints store them in: the reference is
transformers' model with the dequantised weights, and a wrong weight is a difference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from stored_formats import FORMATS, stored

from magicdec.bench import model_check
from magicdec.bench.model_check import check_model, load_dequantised
from magicdec.model.checkpoint import checked


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))


@pytest.mark.narrow(8)
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_in_any_format_is_compared(name: str) -> None:
    path = str(stored(name))
    check = check_model(path, 1e-9)
    assert check.outcome == checked.EQUAL, check.lines
    assert "float32, CPU:" in check.lines[10]
    assert ("on the dequantised weights" in check.lines[10]) != FORMATS[name].is_plain
    assert check.lines[-1] == f"{path} is computed as transformers computes it"


@pytest.mark.parametrize("name", ["Q4_K", "awq"])
def test_a_wrong_weight_is_a_difference(
    name: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def load_other(*args: Any) -> tuple[Any, str | None]:
        other, why = load_dequantised(*args)
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight[0] += 0.5
        return other, why

    monkeypatch.setattr(model_check, "load_dequantised", load_other)
    done = command("model check", stored(name))
    assert done.code == 1
    assert done.out.splitlines()[-1].endswith("is NOT computed as transformers computes it")


def test_what_transformers_has_no_place_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = model_check.to_hf_config
    monkeypatch.setattr(
        model_check, "to_hf_config", lambda config: fields(config) | {"num_hidden_layers": 1}
    )
    check = check_model(str(stored("Q8_0")), 1e-9)
    assert check.outcome == checked.NOT_COMPARED
    expected = "not compared: transformers has no place for, or does not find, model.layers.1.input"
    assert check.lines[-1].startswith(expected)
