"""`magicdec model check` of a GGUF file compares with readers that are not this project's: the
values of the `gguf` package, and llama.cpp where it is installed."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from test_gguf import BIASES, MIXED, reference_model, save, trained_bpe, vocabulary_of
from test_gguf_families import MODELS

from magicdec.bench import gguf_reference, model_check
from magicdec.bench.gguf_reference import values_of
from magicdec.bench.model_check import check_model
from magicdec.model.checkpoint import checked, gguf_tensors
from magicdec.model.checkpoint.gguf_tensors import PlacedTensor, Placing
from magicdec.model.checkpoint.source import find_model
from magicdec.model.gguf.file import GgufTensor

STRINGS = vocabulary_of(trained_bpe("qwen2"), "qwen2") | {
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
}
SIZE = len(STRINGS["tokenizer.ggml.tokens"])


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests that compare with it say so."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name)
    )
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def llama(path: Path, types: tuple[Type, ...] = MIXED) -> Any:
    model = reference_model("Llama", vocab_size=SIZE, **BIASES)
    save(path, "llama", model, types, strings=STRINGS)
    return model


def test_values_are_read_in_the_order_of_hugging_face(path: Path) -> None:
    """Of an architecture with a permutation, weights and biases; by the definition of the
    converter's order, in which the file was written. Others are in test_gguf_families.py."""
    model = llama(path)
    found = values_of([path], find_model("--model", str(path)).tensors)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name
    with pytest.raises(ValueError, match="the gguf package finds no tensor model"):
        values_of([path], ["model.layers.9.x"])


def no_biases(placing: Placing, name: str, tensor: GgufTensor) -> PlacedTensor:
    placed = PLAIN(placing, name, tensor)
    return replace(placed, rows=None) if name.endswith("bias") else placed


def no_offset(placing: Placing, name: str, tensor: GgufTensor) -> PlacedTensor:
    return replace(PLAIN(placing, name, tensor), offset=0.0)


PLAIN = Placing.plain
REAL = gguf_tensors.expert_tensors
FAULTS = {
    "llama": (Placing, "plain", no_biases),
    "gemma3, all keys": (Placing, "plain", no_offset),
    "mixtral": (gguf_tensors, "expert_tensors", lambda tensor: REAL(tensor)[::-1]),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_loader_that_is_wrong_is_found(
    name: str, is_wrong: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "llama":
        llama(path)
    else:
        MODELS[name].saved(path, strings=STRINGS, vocab_size=SIZE)
    if is_wrong:
        monkeypatch.setattr(*FAULTS[name])
    check = check_model(str(path), 1e-9)
    assert check.outcome == (checked.DIFFERS if is_wrong else checked.EQUAL), check.lines
    assert "on the dequantised weights as gguf " in check.lines[10]


def test_without_the_package_nothing_is_compared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(path, (Type.F32,))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    check = check_model(str(path), 1e-9)
    assert check.outcome == checked.NOT_COMPARED
    assert check.lines[-1].endswith("transformers: gguf is not installed (pip install gguf)")


class StandIn:
    """What `LlamaCpp` says, computed by transformers, with one thing that is otherwise."""

    version = "0"

    def __init__(self, model: Any, fault: str, ids: list[int]) -> None:
        self.model = model
        self.fault = fault
        self.text_ids = ids
        self.cache: Any = None

    def encode(self, text: str) -> list[int]:
        return self.text_ids[1:] if self.fault == "ids" else self.text_ids

    def end_ids(self) -> set[int]:
        return {0, 5} if self.fault == "ends" else {0}

    @torch.inference_mode()
    def forward(self, ids: Any) -> torch.Tensor:
        out = self.model(torch.tensor([ids]), past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return out.logits[0, -1:] * (1.01 if self.fault == "logits" else 1)

    def restart(self) -> None:
        self.cache = None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fault", ["none", "ids", "ends", "logits"])
def test_llama_cpp_has_a_say_where_it_is_installed(
    fault: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(path, (Type.F32,))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json" if name == "llama_cpp" else name)
    )
    ids = list[int]()
    monkeypatch.setattr(model_check, "LlamaCpp", lambda *_: StandIn(model, fault, ids))
    monkeypatch.setattr(
        model_check, "prompt_of", recorded(model_check.prompt_of, ids, model_check.TRIED_TEXT)
    )
    check = check_model(str(path), 1e-9)
    assert check.outcome == (checked.EQUAL if fault == "none" else checked.DIFFERS), check.lines
    assert f"{path} is computed as transformers computes it" in check.lines
    verb = "is NOT" if fault == "logits" else "is"
    assert check.lines[-1] == f"{path} {verb} computed as llama.cpp computes it"


def recorded(prompt_of: Any, ids: list[int], ending: str) -> Any:
    def record(tokenizer: Any, config: Any, text: str) -> list[int]:
        found: list[int] = prompt_of(tokenizer, config, text)
        if text.endswith(ending):
            ids[:] = found
        return found

    return record


@pytest.mark.parametrize("types", [(Type.F32,), (Type.Q8_0,)])
def test_llama_cpp_itself(
    types: tuple[Type, ...], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with biases, which it computes as we do; and not without their order."""
    monkeypatch.undo()
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv(checked.VARIABLE, str(path.parent / "checked"))
    llama(path, types)
    check = check_model(str(path), 1e-9)
    assert check.outcome == checked.EQUAL, check.lines
    assert check.lines[-1] == f"{path} is computed as llama.cpp computes it"
    monkeypatch.setattr(Placing, "plain", no_biases)
    monkeypatch.setattr(gguf_reference, "PAIRS", {})  # so that llama.cpp alone sees it
    lines = check_model(str(path), 1e-9).lines
    assert lines[-1] == f"{path} is NOT computed as llama.cpp computes it"
