"""Draft heads for tests. EAGLE-3 heads: random ones written as other programs write them, and the
head's forward in plain torch from its definition (arXiv 2503.01840, section 3), token by token. And
heads for multi-token prediction of models that have none."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from magicdec.config.sections import SamplingSection, model_drafter_of
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.checkpoint.weight_files import WeightSource, open_weights
from magicdec.model.checkpoint.weight_map import expected_shapes, weight_map
from magicdec.model.config import ModelConfig
from magicdec.model.draft_head import DraftHead
from magicdec.model.eagle import EagleHead
from magicdec.model.mtp import MtpHead
from magicdec.model.transformer import KeepState, Transformer
from magicdec.names import EAGLE, HEADS

Weights = dict[str, Tensor]


@dataclass
class HeadForm:
    """A head's options, and how its files name things."""

    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    num_layers: int = 1
    qk_norm: bool = False
    draft_vocab: int | None = 40  # None: the target's
    has_embedding: bool = False
    program: str = "speculators"  # or specforge
    capture: tuple[int, ...] = (0, 1, 2)  # layers before the state
    changes: dict[str, Any] = field(default_factory=dict)  # of the layer's config

    @property
    def switches(self) -> dict[str, bool]:
        names = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        return {name: getattr(self, name) for name in names}


SHARED = ("embedding.", "head.", "target_norm.")  # with the target
FITTED = HeadForm(draft_vocab=90, capture=(0, 1, 2))  # of a target of two layers or more


def chances(
    logits: Tensor, sampling: SamplingSection, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """[V], float64, of logits [V]: by repetition in prompt and output, presence in the output, and
    the temperature, if any. Nearly one-hot without it."""
    scores = logits.double().clone()
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= sampling.presence_penalty
    return torch.softmax(scores / (sampling.temperature or 1e-4), dim=0)


def random_head(target: ModelConfig, form: HeadForm, seed: int = 0) -> Weights:
    """The head's tensors under the names of `speculators`, float32; q, k and v of the target's
    sizes."""
    generator = torch.Generator().manual_seed(seed)
    H = target.hidden_size
    D = target.head_dim
    q = target.num_heads * D
    kv = target.num_kv_heads * D
    vocab = form.draft_vocab or target.vocab_size
    count = len(form.capture)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def vector(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    found = {"fc.weight": matrix(H, count * H), "norm.weight": vector(H)}
    found["lm_head.weight"] = 2 * matrix(vocab, H)
    if form.norm_before_fc:
        found["input_norm.weight"] = vector(count * H)
    if form.fc_norm:
        found |= {f"fc_norm.{i}.weight": vector(H) for i in range(count)}
    for i in range(form.num_layers):
        at = f"layers.{i}."
        width = 2 * H if i == 0 else H
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, width)
        found[f"{at}self_attn.o_proj.weight"] = matrix(H, q)
        for name in ("gate", "up"):
            found[f"{at}mlp.{name}_proj.weight"] = matrix(target.intermediate_size, H)
        found[f"{at}mlp.down_proj.weight"] = matrix(H, target.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = vector(H)
        if form.qk_norm:
            found |= {f"{at}self_attn.{name}_norm.weight": vector(D) for name in "qk"}
    found["layers.0.hidden_norm.weight"] = vector(H)
    if form.has_embedding:
        found["embed_tokens.weight"] = torch.randn(target.vocab_size, H, generator=generator)
    if form.draft_vocab is not None:
        ids = torch.randperm(target.vocab_size, generator=generator)[:vocab].sort().values
        found["d2t"] = ids - torch.arange(vocab)
        found["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def write_head(
    directory: Path,
    target: ModelConfig,
    form: HeadForm,
    seed: int = 0,
    weights: Weights | None = None,
) -> Weights:
    """Write a head, by default a random one, and return its tensors under the names of
    `speculators`."""
    found = weights or random_head(target, form, seed)
    layer = {
        "model_type": "qwen3" if form.qk_norm else "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": form.num_layers,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope.theta,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
    }
    config: dict[str, Any] = {"draft_vocab_size": form.draft_vocab}
    stored = dict(found)
    if form.program == "speculators":
        config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        config |= form.switches
        config["target_hidden_size"] = None
        config["eagle_aux_hidden_state_layer_ids"] = list(form.capture)
        layer |= form.changes
        config["transformer_layer_config"] = layer
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32"}
        config |= form.switches | layer | form.changes
        config["eagle_config"] = {"use_aux_hidden_state": True}
        stored = {name.replace("layers.0.", "midlayer."): value for name, value in found.items()}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: value.contiguous() for name, value in stored.items()}
    save_file(contiguous, directory / "model.safetensors")
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class PlainHead:
    """The forward of one sequence from the definition, a slot at a time, without a cache: attention
    of a slot reads the keys and values that slots before it have made."""

    def __init__(self, target: ModelConfig, form: HeadForm, weights: Weights, embedding: Tensor):
        self.target = target
        self.form = form
        self.w = {name: v.double() for name, v in weights.items() if v.is_floating_point()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.target_ids = torch.arange(target.vocab_size)
        if "d2t" in weights:
            self.target_ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
        self.kv: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(form.num_layers)]
        self.hidden = range(0)  # slots that attention does not see, after the sinks

    def fork(self) -> "PlainHead":
        other = object.__new__(PlainHead)
        other.__dict__ = dict(self.__dict__)
        other.kv = [list(layer) for layer in self.kv]
        return other

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.w[f"{name}.weight"], self.target.norm_eps)

    def reduced(self, states: Tensor) -> Tensor:
        """[H] from the target's states [N, H]."""
        states = states.double()
        if self.form.fc_norm:
            states = torch.stack([self.norm(f"fc_norm.{i}", s) for i, s in enumerate(states)])
        flat = states.flatten()
        flat = self.norm("input_norm", flat) if self.form.norm_before_fc else flat
        return self.w["fc.weight"] @ flat

    def slot(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Logits of the draft vocabulary and the state for the next slot. The slot's number is that
        of the slots so far."""
        position = len(self.kv[0])
        embedded = self.norm("layers.0.input_layernorm", self.embedding[token])
        normed = self.norm("layers.0.hidden_norm", state)
        x = normed if self.form.norm_before_residual else state
        u = torch.cat([embedded, normed])
        for layer in range(self.form.num_layers):
            if layer:
                u = self.norm(f"layers.{layer}.input_layernorm", x)
            x = x + self.attention(layer, u, position)
            y = self.norm(f"layers.{layer}.post_attention_layernorm", x)
            at = f"layers.{layer}.mlp."
            gate = self.w[f"{at}gate_proj.weight"] @ y
            up = self.w[f"{at}up_proj.weight"] @ y
            x = x + self.w[f"{at}down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        out = self.norm("norm", x)
        return self.w["lm_head.weight"] @ out, out if self.form.norm_output else x

    def attention(self, layer: int, u: Tensor, position: int) -> Tensor:
        c = self.target
        at = f"layers.{layer}.self_attn."
        q, k, v = (
            (self.w[f"{at}{name}_proj.weight"] @ u).view(-1, c.head_dim) for name in ("q", "k", "v")
        )
        if self.form.qk_norm:
            q = rms_norm(q, self.w[f"{at}q_norm.weight"], c.norm_eps)
            k = rms_norm(k, self.w[f"{at}k_norm.weight"], c.norm_eps)
        self.kv[layer].append((self.rotated(k, position), v))
        q = self.rotated(q, position)
        seen = [pair for slot, pair in enumerate(self.kv[layer]) if slot not in self.hidden]
        keys = torch.stack([key for key, _ in seen])
        sinks = self.hidden.start
        keys[:sinks] = self.rotated(keys[:sinks], len(self.hidden))
        values = torch.stack([value for _, value in seen])
        group = c.num_heads // c.num_kv_heads
        heads = []
        for head in range(c.num_heads):
            scores = keys[:, head // group] @ q[head] * c.head_dim**-0.5
            heads.append(scores.softmax(0) @ values[:, head // group])
        return self.w[f"{at}o_proj.weight"] @ torch.cat(heads)

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.target.head_dim // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = position * self.target.rope.theta**-powers
        first = x[..., :half]
        second = x[..., half:]
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def chain(self, state: Tensor, token: int, count: int) -> list[tuple[int, Tensor]]:
        """Greedy drafts with their logits, from a slot of the target's state on; `self` keeps that
        slot alone."""
        logits, fed_back = self.slot(state, token)
        own = self.fork()
        found = []
        for _ in range(count):
            draft = int(self.target_ids[logits.argmax()])
            found.append((draft, logits))
            logits, fed_back = own.slot(fed_back, draft)
        return found


def load_head(directory: Path, target: Transformer, shard: Shard = Shard()) -> EagleHead:
    """The head in a directory, in the target's dtype, with the target's embedding."""
    source = find_model("--draft", str(directory))
    dtype = next(target.parameters()).dtype
    head = load_transformer(source.config, source.weights, shard, None, dtype, torch.device("cpu"))
    assert isinstance(head, EagleHead)
    head.share(target)
    return head


def fitted_head(target: Transformer, texts: Sequence[Sequence[int]], seed: int = 0) -> Weights:
    """The tensors of a head of which the target accepts some drafts in these texts: that of
    `FITTED`, whose random layers stay as they are, with an `lm_head` fitted to them."""
    with TemporaryDirectory() as directory:
        found = write_head(Path(directory), target.config, FITTED, seed)
        head = load_head(Path(directory), target)
    outputs = []
    labels = []
    for text in texts:
        ids = torch.tensor([text])
        states = states_of(target, ids[0], FITTED.capture).unsqueeze(0)
        x = head.pair(ids[:, 1:-1], head.reduced(states[:, :-2]))
        outputs.append(head.norm(whole_forward(head, x))[0])
        labels.append(ids[0, 2:])
    weight = found["lm_head.weight"].clone().requires_grad_()
    kept = torch.isin(torch.cat(labels), head.target_ids)
    inputs = torch.cat(outputs)[kept].detach()
    places = torch.searchsorted(head.target_ids, torch.cat(labels)[kept])
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(inputs @ weight.T, places).backward()
        optimizer.step()
    found["lm_head.weight"] = weight.detach()
    return found


def is_head(drafter: str | None) -> bool:
    return model_drafter_of(drafter) in HEADS


def state_layers(drafter: str, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose states a `made_head` takes."""
    return FITTED.capture if drafter.endswith(EAGLE) else (target.num_layers,)


def made_head(
    target: Transformer,
    texts: Sequence[Sequence[int]] = (),
    seed: int = 0,
    drafter: str = EAGLE,
) -> DraftHead:
    """The head of `FITTED` for this model, or one for multi-token prediction, fitted to texts if
    there are any."""
    if not drafter.endswith(EAGLE):
        return made_mtp_head(target, texts)
    weights = fitted_head(target, texts, seed) if texts else None
    with TemporaryDirectory() as directory:
        write_head(Path(directory), target.config, FITTED, seed, weights)
        return load_head(Path(directory), target)


def mtp_config(target: ModelConfig) -> ModelConfig:
    return replace(target, num_mtp_layers=1).mtp_config()


def made_mtp_head(target: Transformer, texts: Sequence[Sequence[int]] = ()) -> MtpHead:
    """A head of one of the target's layers, trained on texts if there are any."""
    config = mtp_config(target.config)
    head = _load_mtp(config, RandomWeights(expected_shapes(config)), target)
    own = [p for name, p in head.named_parameters() if not name.startswith(SHARED)]
    for parameter in own:
        parameter.requires_grad_(bool(texts))
    rows = []
    for text in texts:
        ids = torch.tensor([text])
        states = states_of(target, ids[0], [target.config.num_layers]).unsqueeze(0)
        rows.append((ids, head.reduced(states[:, :-2]).detach()))
    optimizer = torch.optim.Adam(own, lr=0.003)
    for _ in range(60 if texts else 0):
        optimizer.zero_grad()
        for ids, state in rows:
            output = whole_forward(head, head.pair(ids[:, 1:-1], state), is_trained=True)
            torch.nn.functional.cross_entropy(head.read_out(output)[0][0], ids[0, 2:]).backward()
        optimizer.step()
    for parameter in own:
        parameter.requires_grad_(False)
    return head


def _load_mtp(config: ModelConfig, weights: WeightSource, target: Transformer) -> MtpHead:
    dtype = next(target.parameters()).dtype
    head = load_transformer(config, weights, target.shard, None, dtype, torch.device("cpu"))
    assert isinstance(head, MtpHead)
    head.share(target)
    return head


def write_mtp_head(file: Path, head: MtpHead) -> None:
    """Its own tensors, as in a checkpoint; of one rank."""
    tensors = {}
    for parameter, pieces in weight_map(head.config, Shard(), head.layers).items():
        rows = [piece.rows[1] - piece.rows[0] for piece in pieces]
        parts = head.state_dict()[parameter].split(rows)
        tensors |= {p.name: t.contiguous().clone() for p, t in zip(pieces, parts, strict=True)}
    save_file(tensors, file)


def read_mtp_head(file: Path, target: Transformer) -> MtpHead:
    """The target's shard of what `write_mtp_head` wrote."""
    return _load_mtp(mtp_config(target.config), open_weights(file), target)


def states_of(target: Transformer, ids: Tensor, layers: Sequence[int]) -> Tensor:
    """The target's states [T, N, hidden] of one text, without a cache."""
    kept = dict[int, Tensor]()
    whole_forward(target, ids.unsqueeze(0), kept.__setitem__)
    return torch.stack([kept[layer][0] for layer in layers], dim=1).clone()


def whole_forward(
    model: Transformer, x: Tensor, keep: KeepState | None = None, is_trained: bool = False
) -> Tensor:
    """A forward of whole texts, without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)

    model.set_positions(x.shape[1], x.device)
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    with torch.set_grad_enabled(is_trained):
        return model(x, positions, attend, lambda y: y, keep=keep)
