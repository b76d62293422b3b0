"""nanoGPT checkpoints with and without biases: the logits of nanoGPT's own computation, which is
repeated here, and its character tokenizer."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, decode_both, load, make_requests, make_runner
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.model.tokenizer import load_tokenizer

sys.path.insert(0, str(ROOT / "scripts"))

from convert_nanogpt import convert_nanogpt

TEXT = "To be, or not to be:\nthat is the question. \t'Tis nobler"
CHARACTERS = sorted(set(TEXT))
LAYERS, HEADS, WIDTH, POSITIONS = 2, 3, 48, 128


def make_state(bias: bool) -> dict[str, Tensor]:
    """nanoGPT's state dict, as after torch.compile."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.15)

    state = {"wte.weight": draw(len(CHARACTERS), WIDTH), "wpe.weight": draw(POSITIONS, WIDTH)}
    norms, linears = ["ln_f"], {}
    for i in range(LAYERS):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        linears |= {f"h.{i}.attn.c_attn": (3 * WIDTH, WIDTH), f"h.{i}.attn.c_proj": (WIDTH, WIDTH)}
        linears |= {f"h.{i}.mlp.c_fc": (4 * WIDTH, WIDTH), f"h.{i}.mlp.c_proj": (WIDTH, 4 * WIDTH)}
    for name in norms:
        state[f"{name}.weight"] = 1 + draw(WIDTH)
    for name, shape in linears.items():
        state[f"{name}.weight"] = draw(*shape)
    if bias:
        sizes = dict.fromkeys(norms, WIDTH) | {name: shape[0] for name, shape in linears.items()}
        state |= {f"{name}.bias": draw(size) for name, size in sizes.items()}
    whole = {f"_orig_mod.transformer.{name}": tensor for name, tensor in state.items()}
    return whole | {"_orig_mod.lm_head.weight": state["wte.weight"]}


def written_out(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, V] of token ids [T], as nanoGPT's model.py computes them."""

    def get(name: str) -> Tensor | None:
        return state.get(f"_orig_mod.transformer.{name}")

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), get(f"{name}.weight"), get(f"{name}.bias"), 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        weight = get(f"{name}.weight")
        assert weight is not None
        return F.linear(x, weight, get(f"{name}.bias"))

    wte, wpe = state["_orig_mod.transformer.wte.weight"], get("wpe.weight")
    assert wpe is not None
    x = wte[ids] + wpe[: len(ids)]
    for i in range(LAYERS):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(WIDTH, dim=1)
        heads = (t.view(len(ids), HEADS, -1).transpose(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)
        x = x + linear(mixed.reshape(len(ids), WIDTH), f"h.{i}.attn.c_proj")
        x = x + linear(
            F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj"
        )
    return norm(x, "ln_f") @ wte.T


def write(directory: Path, state: dict[str, Tensor], meta: Any) -> Path:
    arguments = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": POSITIONS}
    arguments |= {"vocab_size": len(CHARACTERS), "dropout": 0.0, "bias": True}
    saved = {"model": state, "model_args": arguments, "iter_num": 5, "config": {"dataset": "x"}}
    torch.save(saved, directory / "ckpt.pt")
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))
    return directory / "ckpt.pt"


def meta() -> dict[str, Any]:
    stoi = {c: i for i, c in enumerate(CHARACTERS)}
    itos = dict(enumerate(CHARACTERS))
    return {"vocab_size": len(CHARACTERS), "stoi": stoi, "itos": itos}


@pytest.mark.parametrize("bias", [False, True])
def test_logits_tokens_and_characters(tmp_path: Path, bias: bool) -> None:
    state = make_state(bias)
    assert convert_nanogpt(write(tmp_path, state, meta()), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert ids == [CHARACTERS.index(c) for c in TEXT] and tokenizer.decode(ids) == TEXT
    runner = make_runner(load(tmp_path / "out"), 1, POSITIONS)
    runner.allocate(0)
    logits = torch.cat([runner.forward(t[None], [0])[0] for t in torch.tensor(ids).split(16)])
    expected = written_out(state, torch.tensor(ids))
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    runner.cache.release(0)
    kv = KVSection("streaming_llm", 17, 4)
    baseline, ours, _ = decode_both(runner, make_requests([tuple(ids)], 20), kv, 3)
    for _ in range(20):
        ids.append(int(written_out(state, torch.tensor(ids))[-1].argmax()))
    assert baseline == ours == [ids[-20:]]


def test_characters_that_the_model_has_never_seen_are_an_error(tmp_path: Path) -> None:
    convert_nanogpt(write(tmp_path, make_state(False), meta()), tmp_path / "out")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "out").encode("\u00e9")


class Foreign:
    """A class that must not be unpickled."""


def test_what_is_not_nanogpt_is_refused(tmp_path: Path) -> None:
    good = make_state(True)
    broken = {k: v for k, v in good.items() if "h.1.mlp.c_fc" not in k}
    with pytest.raises(ValueError, match=r"ckpt\.pt: not a nanoGPT checkpoint .*h\.1\.mlp\.c_fc"):
        convert_nanogpt(write(tmp_path, broken, meta()), tmp_path / "out")
    with pytest.raises(ValueError, match=r"meta\.pkl: .*pickled .*Foreign"):
        convert_nanogpt(write(tmp_path, good, {"stoi": Foreign()}), tmp_path / "out")
    with pytest.raises(ValueError, match=r"meta\.pkl: stoi is not a numbering"):
        convert_nanogpt(write(tmp_path, good, {"stoi": {"ab": 0}}), tmp_path / "out")
    torch.save({"model": Foreign()}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"ckpt\.pt: not a readable torch\.save archive"):
        convert_nanogpt(tmp_path / "ckpt.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
