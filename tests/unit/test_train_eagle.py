"""scripts/dev/train_eagle.py: chains at all slots are chains as a head drafts them, one slot at a
time; what is written; and a training that was stopped."""

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from magicdec.model.checkpoint.source import find_model
from magicdec.model.transformer import Transformer

pytestmark = pytest.mark.wide

OPTIONS = ("norm_before_residual", "norm_output", "fc_norm")
COMBINATIONS = [dict(zip(OPTIONS, values, strict=True)) for values in product((0, 1), repeat=3)]
CAPTURE = [0, 1, 2]
VOCAB = 60
SLOTS = 12
STEPS = 4


@pytest.fixture
def eagle(monkeypatch: pytest.MonkeyPatch) -> Any:
    import train_eagle

    return train_eagle


@dataclass
class PlainChain:
    """A head by its definition: a slot at a time, and a list of the keys and values so far."""

    tensors: dict[str, Tensor]
    config: Any
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def fork(self) -> "PlainChain":
        return PlainChain(self.tensors, self.config, [*self.keys], [*self.values])

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + self.config.norm_eps).sqrt() * self.weight(name)

    def fuse(self, states: list[Tensor]) -> Tensor:
        if self.config.fc_norm:
            states = [self.norm(f"fc_norm.{i}", x) for i, x in enumerate(states)]
        return self.weight("fc") @ torch.cat(states)

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        turns = position / self.config.rope_theta ** (torch.arange(half) / half)
        pairs = torch.complex(heads[:, :half], heads[:, half:]) * torch.polar(
            torch.ones(half), turns
        )
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def slot(self, features: Tensor, embedding: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The next slot's features, and the logits over the draft vocabulary."""
        config = self.config
        layer = "layers.0."
        normed = self.norm(layer + "hidden_norm", features)
        x = torch.cat([self.norm(layer + "input_layernorm", embedding), normed])
        q, k, v = (
            (self.weight(f"{layer}self_attn.{name}_proj") @ x).view(-1, config.head_dim)
            for name in "qkv"
        )
        self.keys.append(self.rotate(k, position))
        self.values.append(v)
        mixed = []
        for head, query in enumerate(self.rotate(q, position)):
            kv_head = head * config.num_kv_heads // config.num_heads
            scores = torch.stack([query @ key[kv_head] for key in self.keys])
            weights = (scores / math.sqrt(config.head_dim)).softmax(dim=0)
            mixed.append(weights @ torch.stack([value[kv_head] for value in self.values]))
        states = normed if config.norm_before_residual else features
        states = states + self.weight(layer + "self_attn.o_proj") @ torch.cat(mixed)
        y = self.norm(layer + "post_attention_layernorm", states)
        gate = F.silu(self.weight(layer + "mlp.gate_proj") @ y)
        both = gate * (self.weight(layer + "mlp.up_proj") @ y)
        states = states + self.weight(layer + "mlp.down_proj") @ both
        final = self.norm("norm", states)
        return (final if config.norm_output else states), self.weight("lm_head") @ final


@dataclass
class Small:
    """A tiny target, and a random head for it."""

    head: Any
    target: Any
    draft_ids: Tensor
    ids: Tensor  # [1, slots + steps]

    @property
    def model(self) -> Transformer:
        return self.target.model

    def chain(self) -> PlainChain:
        return PlainChain(self.head.state_dict(), self.head.config)


def make_small(eagle: Any, checkpoint: Path, options: dict[str, int]) -> Small:
    flags = [f"--{name}" for name, value in options.items() if value]
    arguments = ["--target", str(checkpoint), "--train", "x", "--out", "x", "--vocab", str(VOCAB)]
    args = eagle.make_parser().parse_args(arguments + flags)
    source = find_model("--target", str(checkpoint))
    target = eagle.Target(source, CAPTURE, 100, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    head = eagle.TrainedHead(eagle.head_config(source.config, len(CAPTURE), args), 100)
    draft_ids = torch.randperm(source.config.vocab_size)[:VOCAB].sort().values
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape) * 0.3 + ("norm" in name))
        parameter.requires_grad_(True)
    ids = torch.randint(source.config.vocab_size, (1, SLOTS + STEPS))
    return Small(head, target, draft_ids, ids)


def true_states(small: Small) -> list[list[Tensor]]:
    """The captured residual streams of each token, by a forward through the first layers."""
    captured = []
    for num_layers in CAPTURE:
        if num_layers == 0:
            captured.append(small.model.embedding(small.ids)[0])
            continue
        config = small.model.config
        part = Transformer(config, layers=range(num_layers))
        part.load_state_dict(small.model.state_dict(), strict=False)
        part.is_last = False
        part.set_positions(100, torch.device("cpu"))
        positions = torch.arange(small.ids.shape[1])[None]
        with torch.no_grad():
            captured.append(part(small.ids, positions, causal, lambda t: t)[0])
    return [list(states) for states in zip(*captured, strict=True)]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("options", COMBINATIONS)
def test_chains_at_all_slots_are_chains_of_one_slot(
    eagle: Any, tiny_checkpoint: Path, options: dict[str, int]
) -> None:
    """The text's own tokens are fed, as in training."""
    small = make_small(eagle, tiny_checkpoint, options)
    states = true_states(small)
    captured, _ = small.target.read(small.ids)
    expected = torch.stack([torch.cat(parts) for parts in states])
    torch.testing.assert_close(captured[0], expected, atol=1e-4, rtol=1e-4)

    embeddings = small.target.embed(small.ids)
    features = small.head.fuse(captured[:, :SLOTS])
    past: list[Any] = []
    logits = []
    for t in range(STEPS):
        features, final = small.head.step(features, embeddings[:, 1 + t : 1 + t + SLOTS], past)
        logits.append(small.head.lm_head(final)[0])

    base = small.chain()
    for i in range(SLOTS):
        chain = base.fork()
        feature = base.fuse(states[i])
        base.slot(feature, embeddings[0, i + 1], i)
        for t in range(STEPS):
            feature, guess = chain.slot(feature, embeddings[0, i + 1 + t], i + t)
            torch.testing.assert_close(logits[t][i], guess, atol=1e-3, rtol=1e-3)


def test_the_flash_kernel_and_its_gradients_are_the_plain_ones(eagle: Any) -> None:
    from train import eagle_head

    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(1 + 2 * STEPS)]
    weights = torch.randn(2, 3, 40, 16)
    for num_steps in (1, 2, STEPS):
        used = tensors[: 1 + 2 * num_steps]
        results = []
        for attend in (eagle_head.FlashForkedAttention.apply, eagle_head.plain_attention):
            out = attend(*used)
            results.append([out, *torch.autograd.grad((out * weights).sum(), used)])
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_the_loss_and_its_gradients_are_cross_entropy(eagle: Any) -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 8, requires_grad=True)
    head = torch.randn(20, 8, requires_grad=True)
    targets = torch.randn(50, 20).softmax(dim=-1)
    weights = torch.rand(50)
    ours = eagle.SoftCrossEntropy.apply(states, head, targets, weights, 16)
    plain = F.cross_entropy(states @ head.T, targets, reduction="none") @ weights
    torch.testing.assert_close(ours, plain)
    pairs = [torch.autograd.grad(3 * loss, (states, head)) for loss in (ours, plain)]
    torch.testing.assert_close(*pairs)


def teach(eagle: Any, small: Small) -> None:
    """Make the target's greedy text of 4 random tokens the window, and train on it a little."""
    for first in range(4, SLOTS + STEPS):
        small.ids[0, first] = next_token(small, small.ids[0, :first].tolist())
    drafted = set(small.ids[0, 4:].tolist())
    others = [i for i in range(100) if i not in drafted][: VOCAB - len(drafted)]
    small.draft_ids = torch.tensor(sorted([*drafted, *others]))
    windows = eagle.BookWindows([small.ids[0].numpy()], None)
    plan = eagle.TrainingPlan(40, 1, SLOTS, STEPS, 1e-2, 0.1)
    trainer = eagle.Trainer(small.head, small.target, small.draft_ids, windows, plan)
    for _ in range(plan.num_steps):
        trainer.step()


@torch.no_grad()
def next_token(small: Small, text: list[int]) -> int:
    positions = torch.arange(len(text))[None]
    logits = small.model(torch.tensor([text]), positions, causal, lambda t: t)
    return int(logits[0, -1].argmax())


def test_acceptance_is_that_of_drafting_and_checking(eagle: Any, tiny_checkpoint: Path) -> None:
    """Each slot drafts from the text so far, and the target goes on greedily from the same text."""
    small = make_small(eagle, tiny_checkpoint, {})
    teach(eagle, small)
    states = true_states(small)
    ids = small.ids[0].tolist()
    embeddings = small.target.embed(torch.arange(small.model.config.vocab_size))
    base = small.chain()
    counts = [0] * STEPS
    num_slots = len(ids) - 1
    for i in range(num_slots):
        chain = base.fork()
        feature = base.fuse(states[i])
        base.slot(feature, embeddings[ids[i + 1]], i)
        text = ids[: i + 2]
        token = text[-1]
        for t in range(STEPS):
            feature, guess = chain.slot(feature, embeddings[token], i + t)
            token = int(small.draft_ids[guess.argmax()])
            text.append(next_token(small, text))
            if token != text[-1]:
                break
            counts[t] += 1
    found = eagle.measure_survival(small.head, small.target, small.draft_ids, [small.ids], STEPS)
    assert num_slots > counts[0] > counts[-1] > 0
    assert found == pytest.approx([count / num_slots for count in counts])


def test_acceptance_of_a_position_is_given_the_drafts_before(eagle: Any) -> None:
    entry = eagle.acceptance_entry([0.5, 0.4, 0.0, 0.0])
    assert entry["acceptance"] == [0.5, 0.8, 0.0, 0.0]
    assert entry["acceptance_length"] == 1.9


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    texts = ["The cat sat on the mat. " * 200, "All work and no play makes a dull day. " * 100]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def flags(checkpoint: Path, books: Path, out: Path, *others: str) -> list[str]:
    found = ["--target", str(checkpoint), "--train", str(books), "--out", str(out)]
    found += ["--length", "24", "--rows", "2", "--ttt", "3", "--steps", "4", "--capture", "0", "1"]
    found += ["--vocab", str(VOCAB), "--eval_windows", "2", "--eval_tokens", "96"]
    return [*found, "--threads", "1", "--dtype", "float32", *others]


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_written(
    eagle: Any, tiny_checkpoint: Path, books: Path, tmp_path: Path, handlers: None
) -> None:
    eagle.main(flags(tiny_checkpoint, books, tmp_path / "head", "--fc_norm"))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    layer = "layers.0."
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "fc.weight": (48, 96),
        "fc_norm.0.weight": (48,),
        "fc_norm.1.weight": (48,),
        layer + "input_layernorm.weight": (48,),
        layer + "hidden_norm.weight": (48,),
        layer + "post_attention_layernorm.weight": (48,),
        layer + "self_attn.q_proj.weight": (96, 96),
        layer + "self_attn.k_proj.weight": (48, 96),
        layer + "self_attn.v_proj.weight": (48, 96),
        layer + "self_attn.o_proj.weight": (48, 96),
        layer + "mlp.gate_proj.weight": (80, 48),
        layer + "mlp.up_proj.weight": (80, 48),
        layer + "mlp.down_proj.weight": (48, 80),
        "norm.weight": (48,),
        "lm_head.weight": (VOCAB, 48),
        "d2t": (VOCAB,),
        "t2d": (2051,),
    }
    others = {name: t.dtype for name, t in tensors.items() if t.dtype != torch.bfloat16}
    assert others == {"d2t": torch.int64, "t2d": torch.bool}
    ids = torch.arange(VOCAB) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["draft_vocab_size"] == VOCAB
    assert config["fc_norm"] and not config["norm_output"]
    assert config["transformer_layer_config"]["head_dim"] == 16
    assert config["transformer_layer_config"]["vocab_size"] == 2051
    log = [json.loads(line) for line in (tmp_path / "head" / "train_log.jsonl").open()]
    assert log[0]["coverage"] > 0.9
    assert [e["tokens"] for e in log if "acceptance_length" in e] == [0, 96, 192]
    assert [len(e["loss"]) for e in log if isinstance(e.get("loss"), list)] == [3]


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    eagle: Any,
    tiny_checkpoint: Path,
    books: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
) -> None:
    eagle.main(flags(tiny_checkpoint, books, tmp_path / "whole"))
    step = eagle.Trainer.step

    def stop_after_two(trainer: Any) -> Any:
        losses = step(trainer)
        if trainer.num_steps == 2:
            signal.raise_signal(signal.SIGTERM)
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(eagle.Trainer, "step", stop_after_two)
        eagle.main(flags(tiny_checkpoint, books, tmp_path / "halves"))
    state = torch.load(tmp_path / "halves" / "checkpoint.pt")
    assert state["num_steps"] == 2
    eagle.main(flags(tiny_checkpoint, books, tmp_path / "halves", "--resume"))
    whole, halves = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves")
    )
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    first = torch.load(tmp_path / "whole" / "checkpoint.pt")
    assert not torch.equal(first["head"]["fc.weight"], state["head"]["fc.weight"])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (("--capture", "1", "9"), "--capture 1 9: not rising numbers from 0 to 2"),
        (("--vocab", "3000"), "--vocab 3000: a draft vocabulary has 1 to 2051 ids"),
        (("--length", "2000"), "--length: windows of 2003 tokens are longer than the 1024"),
        (("--length", "1000"), "a window 1001; shorten --length"),
        (("--resume",), "--resume: "),
    ],
)
def test_refusals(
    eagle: Any,
    tiny_checkpoint: Path,
    books: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    others: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        eagle.main(flags(tiny_checkpoint, books, tmp_path / "head", *others))
    assert message in capsys.readouterr().err
