"""ModelConfig: the architecture of a decoder, read from files by `families/hf_config.py`. Imports
no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from magicdec.model.mixers import Mixer

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned", "alibi", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
RESIDUALS = ("sequential", "parallel", "parallel_shared_norm")
ALIBI_DIMS = 2  # with ALiBi, a cached key holds its position as two digits in extra dimensions
KERNEL_DIMS = 16  # the CPU attention kernel supports head sizes that are multiples of this
# The parameters of a mixture of experts that choose and weigh; they are never quantised.
ROUTER = "router"
SHARED_GATE = "shared_gate"
MOST_THETA = 1e30  # of which float32 still holds all powers that the rotation needs


def check_number(name: str, value: float, above: float, most: float = math.inf) -> None:
    """Raise ValueError for a config field unless `above` < value <= most, and finite."""
    if not (math.isfinite(value) and above < value <= most):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ValueError(f"{name} {value} must be a finite number above {above:g}{limit}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and frequency scaling (RoFormer; Llama-3.1 model card for
    `llama3`; Peng et al. 2023 for `yarn`).

    The first `rotary_dim` dimensions of a head are rotated (None: all), in pairs half of that
    apart, or adjacent if `interleaved`. `dynamic` uses the unscaled table up to the trained
    length. `attention_factor` multiplies rotated dimensions of q and k."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotary_dim: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {self.rope_type!r} is not supported; "
                f"choose from {', '.join(ROPE_TYPES)}"
            )
        check_number("rope_theta", self.theta, above=0, most=MOST_THETA)
        for name in ROPE_NUMBERS:
            check_number(f"rope_scaling: {name}", getattr(self, name), above=0)
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling: high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class LayerKind:
    """How layers of one kind attend.

    A token sees the last `window` tokens, itself included; None: all tokens before it. `rope`:
    the kind's rotary embedding; None: the model's. `has_mlp`: the layer has an MLP where others
    have a mixture of experts. `mixer`: what it has in place of attention that is computed here.
    `is_mixer_alone`: the layer has neither an MLP nor experts."""

    window: int | None = None
    rope: RopeConfig | None = None
    has_mlp: bool = False
    mixer: Mixer | None = None
    is_mixer_alone: bool = False


@dataclass(frozen=True)
class ClampedGate:
    """A gated activation of gpt-oss: (u + 1) g sigmoid(`alpha` g) of a gate g, at most `limit`, and
    a factor u, at most `limit` on either side."""

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        check_number("swiglu_limit", self.limit, above=0)
        check_number("swiglu_alpha", self.alpha, above=0)


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP. A token goes to `num_used` of `num_experts`
    MLPs of `width` units, those with the largest softmax of the router's logits, which are their
    weights; `renormalises`: divided by their sum. `has_bias`: router and experts add biases.
    `gate`: of the experts, in place of the model's activation. Every token also goes to an MLP of
    `shared_width` units, 0 for none, possibly times the sigmoid of a gate of its own.
    `stored_bytes`: those of an expert's weight as stored, None: as many as other layers' weights
    have, on average."""

    num_experts: int
    num_used: int
    width: int
    renormalises: bool = True
    has_bias: bool = False
    gate: ClampedGate | None = None
    shared_width: int = 0
    has_shared_gate: bool = False
    stored_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.num_used > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_used} is more than the {self.num_experts} experts"
            )

    def touched(self, num_tokens: int) -> float:
        """Experts that so many tokens go to, each to others at random: E (1 - (1 - k/E)^T)."""
        return self.num_experts * (1 - (1 - self.num_used / self.num_experts) ** num_tokens)


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE-3 head (Li et al., arXiv 2503.01840) has beside its layers, which are those of
    a ModelConfig whose `vocab_size` is the draft vocabulary.

    `num_states` hidden states of `state_size` numbers come from the target; `capture` are their
    numbers as the config lists them, None without a list. `norm_before_fc`: one RMS norm of all
    states; `fc_norm`: one of each. `norm_before_residual`: the residual of the first layer is
    normed. `norm_output`: the next draft step gets the normed output (EAGLE-3.1, arXiv 2605.09992).
    `has_embedding`: the head has one of its own, else it shares the target's. `has_map`: draft ids
    are not target ids. `is_exact`: `capture` counts layers before the state, without doubt."""

    target_vocab_size: int
    state_size: int
    num_states: int = 3
    capture: tuple[int, ...] | None = None
    is_exact: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_embedding: bool = False
    has_map: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, Llama by default, with sizes of the whole model (`Shard` computes a rank's).

    `norm`: RMS, or layer norm with a bias. `positions`: rope, learned, ALiBi (Press et al. 2022),
    or none, where states have the order of tokens. `layer_kinds`: of each layer, or one of all.
    `residual`: the MLP follows attention (sequential), or both read the block's input, through two
    norms (parallel) or one (parallel_shared_norm). `qk_norm`: an RMS norm on every head of q and k.
    `sink_logits`: every query head has a logit that takes part in its softmax and has no value.
    `post_norms`: norms of what attention and MLP add, too. `embedding_scale` multiplies embedded
    tokens, `query_scale` queries. `experts`: a mixture in place of the MLP, except in layers that
    have one.

    `gated_attention`: the output of attention is multiplied by the sigmoid of a gate, as wide as
    the queries.

    `stored_bytes`: those of a weight of a checkpoint whose matrices are numbers in groups, with
    scales, on average over its layers; `plain_share` of their weights are plain numbers, and so are
    `cut_share` where several ranks share a layer. `head_bytes`: of a weight of the head, None if it
    is plain. `planned_only`: what its config has that nothing here computes, and only
    `magicdec plan` counts.

    `num_mtp_layers`: layers of a head for multi-token prediction beside the model, which drafts if
    it is asked to. `mtp_state_first`: its projection takes the state before the embedding.
    `is_mtp`: the config is that of this head (`mtp_config`). `eagle`: of an EAGLE-3 head, None of
    a model."""

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(),)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"
    dtype: str = "bfloat16"
    norm: str = "rms"
    positions: str = "rope"
    activation: str = "silu"
    gated_mlp: bool = True
    residual: str = "sequential"
    qk_norm: bool = False
    sink_logits: bool = False
    gated_attention: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    embedding_norm: bool = False
    head_bias: bool = False
    experts: ExpertsConfig | None = None
    stored_bytes: float | None = None
    plain_share: float = 0.0
    cut_share: float = 0.0
    head_bytes: float | None = None
    num_mtp_layers: int = 0
    mtp_state_first: bool = False
    is_mtp: bool = False
    eagle: EagleConfig | None = None
    planned_only: str = ""

    def __post_init__(self) -> None:
        assert self.norm in NORMS and self.positions in POSITIONS
        assert self.activation in ACTIVATIONS and self.residual in RESIDUALS
        assert not self.post_norms or self.residual == "sequential", "of Gemma"
        assert self.query_scale == 1.0 or self.rope.rotary_dim is None, "of Gemma"
        assert len(self.layer_kinds) in (1, self.num_layers), "a kind of each layer, or of all"
        # By kinds, not by layers, of which a file may claim any number.
        mixers = [kind.mixer for kind in self.layer_kinds if kind.mixer is not None]
        is_computed = all(mixer.is_computed for mixer in mixers)
        is_computed &= not any(kind.is_mixer_alone for kind in self.layer_kinds)
        is_computed &= self.positions != "none"
        assert is_computed or self.planned_only, "what only the plan knows is refused elsewhere"
        field = "rms_norm_eps" if self.norm == "rms" else "layer_norm_epsilon"
        if not 0 <= self.norm_eps <= 1:
            raise ValueError(
                f"model {self.name}: {field} {self.norm_eps} is not a number from 0 to 1"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model {self.name}: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        rotated = self.head_dim if self.rope.rotary_dim is None else self.rope.rotary_dim
        if self.positions == "rope" and (rotated % 2 or rotated > self.head_dim):
            what = "head_dim" if self.rope.rotary_dim is None else "rotary_dim"
            why = "odd; rotary needs it even" if rotated % 2 else f"over head_dim {self.head_dim}"
            raise ValueError(f"model {self.name}: {what} {rotated} is {why}")

    def part(self, layers: range) -> ModelConfig:
        """The config of some of the layers."""
        kinds = self.layer_kinds
        kinds = kinds if len(kinds) == 1 else kinds[layers.start : layers.stop]
        return replace(self, num_layers=len(layers), layer_kinds=kinds)

    @property
    def is_head(self) -> bool:
        """Whether it is a head, which drafts for another model from its hidden states."""
        return self.is_mtp or self.eagle is not None

    def mtp_config(self) -> ModelConfig:
        """The config of the head for multi-token prediction: layers with attention. Its embedding
        and the matrix of its logits are the model's."""
        return replace(
            self,
            num_layers=self.num_mtp_layers,
            layer_kinds=(LayerKind(),),
            tie_word_embeddings=False,
            stored_bytes=None,
            head_bytes=None,
            num_mtp_layers=0,
            is_mtp=True,
        )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        is_one = len(self.layer_kinds) == 1
        return self.layer_kinds * self.num_layers if is_one else self.layer_kinds

    @property
    def attention_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer with attention, whose keys and values a cache has."""
        return tuple(kind for kind in self.kinds if kind.mixer is None)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What the other layers have, layer by layer."""
        return tuple(kind.mixer for kind in self.kinds if kind.mixer is not None)

    @cached_property
    def kind_counts(self) -> dict[LayerKind, int]:
        """The number of layers of each kind."""
        return Counter(self.kinds)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows that layers have, the widest first; None is wider than any number."""
        found = {kind.window for kind in self.layer_kinds}
        return tuple(sorted(found, key=lambda window: -(window or math.inf)))

    @property
    def narrowest_window(self) -> int | None:
        return self.windows[-1]

    @property
    def layers_by_window(self) -> dict[int | None, int]:
        """The number of layers with each of the windows."""
        counts = Counter(kind.window for kind in self.kinds)
        return {window: counts[window] for window in self.windows}

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The units of a layer's MLP, of an expert and of a shared expert, as far as layers have
        them."""
        has_mlp = self.experts is None or any(kind.has_mlp for kind in self.kinds)
        own = (self.intermediate_size,) if has_mlp else ()
        if self.experts is None:
            return own
        shared = (self.experts.shared_width,) if self.experts.shared_width else ()
        return (*own, self.experts.width, *shared)

    @property
    def mlp_inputs(self) -> int:
        """Products that make what an MLP's activation takes: of the gate and up, or of up alone."""
        return 2 if self.gated_mlp else 1

    @property
    def num_mixtures(self) -> int:
        """The number of layers with experts."""
        if self.experts is None:
            return 0
        return sum(not (kind.has_mlp or kind.is_mixer_alone) for kind in self.kinds)

    @property
    def num_mixers_alone(self) -> int:
        """The number of layers that have neither an MLP nor experts."""
        return sum(kind.is_mixer_alone for kind in self.kinds)

    def rope_of(self, kind: LayerKind) -> RopeConfig:
        return self.rope if kind.rope is None else kind.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings that layers have, in the order of their first layers."""
        return tuple(dict.fromkeys(self.rope_of(kind) for kind in self.layer_kinds))

    def average_bytes(self, dtype_bytes: int, num_ranks: int) -> float:
        """Of a weight of the layers as they are stored, of which plain ones have `dtype_bytes`."""
        if self.stored_bytes is None:  # of a model whose experts alone are in groups
            return dtype_bytes
        plain = self.plain_share + self.cut_share * (num_ranks > 1)
        return self.stored_bytes * (1 - plain) + dtype_bytes * plain

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def cached_head_dim(self) -> int:
        """Head size in attention and the KV cache. ALiBi keys hold positions in extra
        dimensions, rounded up to a size that the CPU kernel supports."""
        if self.positions != "alibi":
            return self.head_dim
        return -(-(self.head_dim + ALIBI_DIMS) // KERNEL_DIMS) * KERNEL_DIMS

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence. YaRN extends the trained length by `factor`."""
        if any(rope.rope_type != "yarn" for rope in self.ropes):
            return self.max_position_embeddings
        stretched = int(self.rope.factor * self.rope.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)

    @property
    def num_reduces(self) -> int:
        """Sums over ranks of all layers."""
        in_layer = 2 if self.residual == "sequential" else 1
        return in_layer * self.num_layers - self.num_mixers_alone

    @property
    def norm_parameters(self) -> int:
        """Parameters of all norms except the embedding's, on every rank."""
        per_norm = self.hidden_size * (2 if self.norm == "layer" else 1)
        per_layer = per_norm * (1 if self.residual == "parallel_shared_norm" else 2)
        per_layer += 2 * per_norm * self.post_norms
        num_normed = sum(kind.mixer is None for kind in self.kinds) * self.qk_norm
        in_layers = self.num_layers * per_layer + num_normed * 2 * self.head_dim
        in_layers -= self.num_mixers_alone * per_norm
        if self.is_mtp:  # also of the embedding, and of the state
            return in_layers + 3 * per_norm
        if self.eagle is None:
            return in_layers + per_norm
        states_width = self.eagle.num_states * self.eagle.state_size
        num_norms = self.eagle.norm_before_fc + self.eagle.fc_norm
        return in_layers + per_norm + self.hidden_size + num_norms * states_width

    @property
    def embedding_rows(self) -> int:
        """Tokens that the model's own embedding has; a draft head may take the target's."""
        if self.eagle is None:
            return 0 if self.is_mtp else self.vocab_size
        return self.eagle.target_vocab_size * self.eagle.has_embedding

    @property
    def embedding_norm_parameters(self) -> int:
        return self.embedding_norm * self.hidden_size * (2 if self.norm == "layer" else 1)
