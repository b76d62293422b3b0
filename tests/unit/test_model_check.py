"""`magicdec model check`: a model is described, compared with that of transformers, and remembered;
a difference is exit code 1; a run says once how to compare a model that never was."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Command
from tiny_families import SIZES

from magicdec.bench import model_check
from magicdec.bench.model_check import ModelCheck, check_model, text_lengths
from magicdec.model.checkpoint import checked
from magicdec.model.checkpoint.convert import convert, quantized
from magicdec.model.checkpoint.source import find_model
from magicdec.model.config import LayerKind
from magicdec.model.presets.presets import demo_directory

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 96,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("Mistral", {"sliding_window": 240, "head_dim": 16}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
}
SHARED = {"vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test remembers what was checked."""
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))
    return tmp_path / "checked"


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path, remembered: Path) -> Iterator[Path]:
    kind, more = KINDS[request.param]
    yield make_model(tmp_path / "model", kind, more)


def make_model(directory: Path, kind: str, more: dict[str, Any]) -> Path:
    config = getattr(transformers, f"{kind}Config")(**SIZES | SHARED | more)
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    made.save_pretrained(directory)
    source = demo_directory("demo") / "tokenizer.model"
    (directory / source.name).write_bytes(source.read_bytes())
    return directory


def test_a_model_is_compared_on_three_texts(model: Path) -> None:
    """One of them goes past the window or the length that the model was trained with."""
    told = list[str]()
    check = check_model(str(model), 1e6, told.append)
    assert check.outcome == checked.EQUAL and not check.failed and check.lines == told
    assert told[-1] == f"{model} is computed as transformers computes it"
    source = find_model("--model", str(model))
    longest = 304 if source.config.narrowest_window else 160
    lines = [line for line in told if line.startswith("text of")]
    for length, line in zip((200, 16, longest), lines, strict=True):
        assert line.startswith(f"text of {length} tokens: 8 of 8 greedy tokens are equal, logits")
    assert len(told) == 10 + 1 + 3 + 1 and all(len(line) < 160 for line in told)
    assert checked.outcome_of(source) == checked.EQUAL


def test_another_weight_is_a_difference(
    model: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    load = model_check.load_reference

    def load_other(*args: Any) -> tuple[Any, str | None]:
        other, why = load(*args)
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight[0] += 0.5
        return other, why

    monkeypatch.setattr(model_check, "load_reference", load_other)
    ended = command("model check", model)
    assert ended.code == 1
    assert ended.out.splitlines()[-1] == f"{model} is NOT computed as transformers computes it"
    ended = command("run", "--model", model, *RUN)
    assert f"{model} differs from transformers: magicdec model check {model}" in ended.err


RUN = ("--prefix_len", 64, "--gen_len", 4, "--B", 1, "--draft", "none", "--num_batches", 1)


SERVE = ("--prefix_len", 64, "--gen_len", 4, "--num_requests", 1, "--modes", "sequential")


@pytest.mark.parametrize(("name", "flags"), [("run", RUN), ("serve", SERVE)])
def test_a_command_says_once_how_to_compare(
    name: str,
    flags: Sequence[object],
    tiny_checkpoint: Path,
    tmp_path: Path,
    remembered: Path,
    command: Command,
) -> None:
    line = f"{tiny_checkpoint} was never compared with transformers: magicdec model check"
    for expected in (1, 0):
        out = tmp_path / "records.jsonl"
        ended = command(name, "--model", tiny_checkpoint, *flags, "--out", out)
        assert ended.code == 0 and ended.err.count(line) == expected
    assert checked.outcome_of(find_model("--model", str(tiny_checkpoint))) == checked.TOLD
    ended = command(name, "--model", "demo", *flags, "--out", out)
    assert "never compared" not in ended.err and len(list(remembered.iterdir())) == 1


def test_another_file_is_another_model(model: Path, remembered: Path) -> None:
    source = find_model("--model", str(model))
    checked.remember(source, checked.EQUAL)
    assert checked.outcome_of(source) == checked.EQUAL
    file = model / "config.json"
    file.write_text(file.read_text() + "\n")
    assert checked.outcome_of(source) is None
    (next(remembered.iterdir())).write_text("[")
    assert checked.outcome_of(source) is None


@pytest.mark.parametrize("kind", ["Llama"])
def test_what_cannot_be_compared_is_said(
    kind: str, tmp_path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model(tmp_path / "model", kind, {"intermediate_size": 96})
    source = find_model("--model", str(directory))
    convert(source, tmp_path / "out" / "model.pth", None)
    convert(quantized(source, "int8"), tmp_path / "int8" / "model.safetensors", None)
    for name, why in (
        (str(tmp_path / "out"), "it does not read model.pth"),
        (str(tmp_path / "int8"), "it does not read weights in groups"),
        ("random:llama-68m", "random weights are in no file"),
    ):
        check = check_model(name, 1e6)
        assert check.outcome == checked.NOT_COMPARED and not check.failed
        assert check.lines[-1].startswith(f"not compared with transformers: {why}")
    baichuan = replace(source, config=replace(source.config, architecture="BaichuanForCausalLM"))
    assert model_check.obstacle(baichuan) == "it has no class BaichuanForCausalLM"
    monkeypatch.setattr(model_check, "free_device_memory", lambda kind, rank: 1000)
    assert "GB are free" in str(model_check.obstacle(source))
    monkeypatch.setattr(model_check.importlib.util, "find_spec", lambda name: None)
    assert "it is not installed" in str(model_check.obstacle(source))


def test_a_text_without_time_is_left_out(model: Path) -> None:
    check = check_model(str(model), 1e-9)
    left_out = [line for line in check.lines if "left out" in line]
    assert len(left_out) == 2 and check.outcome == checked.EQUAL


def test_texts_fit_the_model() -> None:
    config = find_model("--model", "demo").config
    assert text_lengths(config) == [200, 16]
    assert text_lengths(replace(config, max_position_embeddings=108)) == [100, 16]
    assert text_lengths(replace(config, layer_kinds=(LayerKind(4096),))) == [200, 16, 4160]


def test_logits_that_are_not_finite_are_a_difference(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model_check.continued_by_others

    def broken(*args: Any) -> Any:
        made = expected(*args)
        return replace(made, logits=made.logits * torch.nan)

    monkeypatch.setattr(model_check, "continued_by_others", broken)
    check: ModelCheck = check_model(str(model), 1e6)
    assert check.failed and "not finite" in check.lines[-2]


@pytest.mark.parametrize(("share", "is_within"), [(1.9e-4, True), (2.1e-4, False)])
def test_what_rounding_explains_by_hand(share: float, is_within: bool) -> None:
    """A logit may be off by 2e-4 of the largest one in size, which is -8 here."""
    theirs = model_check.Continued(torch.tensor([[1.0, -8.0, 2.0], [0.5, 0.25, 4.0]]), [2], 0.0)
    ours = replace(theirs, logits=theirs.logits.clone())
    ours.logits[1, 0] += 8 * share
    error, limit = model_check.difference(ours, theirs, model_check.TOLERANCE)
    assert limit == pytest.approx(1.6e-3) and error == pytest.approx(8 * share, rel=1e-3)
    assert (error <= limit) == is_within
