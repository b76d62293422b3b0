"""Configs that say a thing in another form, twice, or other than the file of weights: the greedy
float32 tokens are those of transformers, which reads the same directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, load
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicdec import LLM
from magicdec.cli.plan import find_stored
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.convert import convert, quantized
from magicdec.model.checkpoint.source import find_model

DEMO = ROOT / "magicdec" / "demo" / "target"
# The demo's vocabulary, whose tokenizer is put into each directory.
VOCAB = 2048
HIDDEN = 64
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
        "Llama",
        BASE,
        TRAINED | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    ),
    "two temperatures": (
        "Llama",
        BASE,
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
        "Llama",
        BASE,
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


GPT = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": 512}
SMALL = {k: BASE[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}
TIED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", BASE, "model.embed_tokens"),
    "mistral": ("Mistral", BASE, "model.embed_tokens"),
    "qwen2": ("Qwen2", BASE, "model.embed_tokens"),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16}, "model.embed_tokens"),
    "gpt2": ("GPT2", GPT, "transformer.wte"),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 8}, "transformer.wte"),
    "starcoder": ("GPTBigCode", GPT, "transformer.wte"),
    "falcon": ("Falcon", SMALL | {"num_attention_heads": 4}, "transformer.word_embeddings"),
    "bloom": ("Bloom", SMALL | {"n_head": 4}, "transformer.word_embeddings"),
}
HEAD = "lm_head.weight"


def make_tied(directory: Path, name: str) -> tuple[Path, str]:
    """A checkpoint with a tied head, and the name of its embedding."""
    family, fields, embedding = TIED[name]
    fields = fields | {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    return make(directory, family, fields), f"{embedding}.weight"


def store(directory: Path, tensors: dict[str, Tensor], *dropped: str) -> None:
    """Change the tensors of a checkpoint."""
    file = directory / "model.safetensors"
    kept = {n: t.clone() for n, t in load_file(file).items() if n not in dropped}
    save_file(kept | tensors, file, metadata={"format": "pt"})


def another_head() -> Tensor:
    return 0.15 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.narrow(3)
@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_counts(tmp_path: Path, name: str) -> None:
    """Another head than the embedding, a copy of the embedding, and the head's name alone."""
    directory, embedding = make_tied(tmp_path, name)
    tied = theirs(directory)
    assert ours(directory) == tied
    table = load_file(directory / "model.safetensors")[embedding]
    for copy in ({HEAD: table.clone()}, {HEAD: table.clone(), embedding: table.clone()}):
        store(directory, copy, embedding)
        assert ours(directory) == tied
        assert find_model("--model", str(directory)).config.tie_word_embeddings == (name != "gptj")
    store(directory, {HEAD: another_head(), embedding: table})
    expected = theirs(directory)
    assert ours(directory) == expected != tied


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_stored_head_in_every_format(tmp_path: Path, name: str) -> None:
    """Names without the body's prefix, pickles, converted files, and what `plan` sees."""
    directory = make_tied(tmp_path / "a", name)[0]
    assert find_stored("--model", str(directory)).tie_word_embeddings
    store(directory, {HEAD: another_head()})
    expected = ours(directory)
    assert not find_stored("--model", str(directory)).tie_word_embeddings
    source = find_model("--model", str(directory))
    convert(source, tmp_path / "b" / "model.pth", None)
    shutil.copy(DEMO / "tokenizer.model", tmp_path / "b")
    assert ours(tmp_path / "b") == expected
    convert(quantized(source, "int8"), tmp_path / "c" / "model.safetensors", None)
    int8 = find_model("--model", str(tmp_path / "c"))
    assert int8.has_groups
    assert (int8.weights.read(HEAD) - another_head()).abs().max() < 0.01
    if name == "gpt2":
        bare = {n.removeprefix("transformer."): t for n, t in _tensors(directory).items()}
        save_file(bare, directory / "model.safetensors", metadata={"format": "pt"})
        assert theirs(directory) == ours(directory) == expected


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_every_rank_and_stage_has_the_stored_head(tmp_path: Path, name: str) -> None:
    directory, embedding = make_tied(tmp_path, name)
    store(directory, {HEAD: another_head()})
    table = _tensors(directory)[embedding]
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        model = load(directory, shard)
        rows = slice(*model.head_rows)
        assert torch.equal(model.state_dict()["head.weight"], another_head()[rows])
        assert torch.equal(model.state_dict()["embedding.weight"], table)
    for layers, has_ends in ((range(1), True), (range(1, 3), None), (range(1, 3), False)):
        part = load(directory, layers=layers, has_ends=has_ends).state_dict()
        assert ("head.weight" in part) == (has_ends is not False)
        assert ("embedding.weight" in part) == (has_ends is True)


def test_a_padded_vocabulary_has_text(tmp_path: Path) -> None:
    directory = make(tmp_path, "Llama", BASE | {"vocab_size": 2 * VOCAB})
    llm = LLM(str(directory), dtype="float32", max_tokens=256, max_concurrency=1)
    ids = ours(directory)
    stream = llm.submit(PROMPT, NUM_NEW, ignore_eos=True)
    padding = [i for i in ids if i >= VOCAB]
    assert padding, "the model emits ids that the tokenizer does not have"
    text = stream.text()
    assert all(f"<id {i}>" in text for i in padding) and text.count("<id ") == len(padding)


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in load_file(directory / "model.safetensors").items()}
