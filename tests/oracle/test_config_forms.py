"""Configs that say a thing in another form, twice, or other than the file of weights: the greedy
float32 tokens are those of transformers, which reads the same directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT

from magicdec import LLM

DEMO = ROOT / "magicdec" / "demo" / "target"
VOCAB, HIDDEN = 2048, 64  # the demo's vocabulary, whose tokenizer is put into each directory
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUM_NEW = 6
PROMPT = torch.randint(3, VOCAB, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def make(directory: Path, family: str, fields: dict[str, Any]) -> Path:
    """Save a random model as transformers does."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        is_matrix = parameter.dim() == 2
        drawn = torch.randn(parameter.shape)
        parameter.data = 0.15 * drawn if is_matrix else 1 + 0.2 * drawn
    model.save_pretrained(directory)
    shutil.copy(DEMO / "tokenizer.model", directory)
    return directory


def edit(directory: Path, changes: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def theirs(directory: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def ours(directory: Path) -> list[int]:
    llm = LLM(str(directory), dtype="float32", max_tokens=256, max_concurrency=1)
    return list(llm.submit(PROMPT, NUM_NEW, ignore_eos=True))


TRAINED = {"original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 24}
QWEN = BASE | WINDOW | {"use_sliding_window": True}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # What transformers 5 saved, and what a user added.
    "scaling added": (
        "Llama",
        BASE,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0} | TRAINED},
    ),
    "base added": (
        "Llama",
        BASE,
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
    ),
    "trained length outside": (
        *("Llama", BASE),
        TRAINED | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    ),
    "two temperatures": (
        *("Llama", BASE),
        {
            "rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}
            | TRAINED
        },
    ),
    "factor by lengths": (
        "Llama",
        BASE,
        {"rope_scaling": {"type": "yarn", "factor": None} | TRAINED},
    ),
    "llama3": (
        *("Llama", BASE),
        {
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0}
            | TRAINED,
            "rope_theta": 5e5,
        },
    ),
    "dynamic": ("Qwen2", BASE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "old form": (
        "Mistral",
        BASE | {"sliding_window": None},
        {"rope_parameters": None, "rope_theta": 3e4},
    ),
    # Layers that are alike.
    "mistral without its window": (
        "Mistral",
        BASE | WINDOW,
        {"layer_types": ["full_attention"] * 3},
    ),
    "mistral with its window": (
        "Mistral",
        BASE | WINDOW,
        {"layer_types": ["sliding_attention"] * 3},
    ),
    "qwen without its window": (
        "Qwen3",
        QWEN | {"head_dim": 16, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 3},
    ),
    "qwen with its window": ("Qwen2", QWEN, {"layer_types": ["sliding_attention"] * 3}),
    "qwen from layer 0 on": ("Qwen2", QWEN | {"max_window_layers": 0}, {"layer_types": None}),
    "qwen from layer 3 on": ("Qwen2", QWEN | {"max_window_layers": 3}, {"layer_types": None}),
}
# Those that say what was saved in other words, or what makes no difference within 512 tokens.
UNCHANGED = {"dynamic", "mistral with its window", "qwen from layer 0 on", "qwen from layer 3 on"}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_that_transformers_reads(tmp_path: Path, name: str) -> None:
    family, fields, changes = FORMS[name]
    plain = ours(make(tmp_path, family, fields))
    expected = theirs(edit(tmp_path, changes))
    assert ours(tmp_path) == expected
    assert (plain == expected) == (name in UNCHANGED)
