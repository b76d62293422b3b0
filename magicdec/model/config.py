"""ModelConfig: what a decoder is. Imports no torch.

Owns the meaning of every architecture field. Knows nothing of ranks, caches or files (`hf_config`
reads those).
"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and frequency scaling (RoFormer; Llama-3.1 model card for
    `llama3`)."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {self.rope_type!r} is not supported; "
                f"choose from {', '.join(ROPE_TYPES)}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder. Sizes are of the whole model; a rank's share is
    `distributed.tensor_parallel.Shard`."""

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model {self.name}: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model {self.name}: head_dim {self.head_dim} is odd; rotary needs it even"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def num_parameters(self) -> int:
        """Stored parameters; a tied head is counted once."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return (
            self.vocab_size * self.hidden_size
            + head
            + self.num_layers * self._layer_parameters()
            + self.hidden_size
        )

    def _layer_parameters(self) -> int:
        h, q, kv, f = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.intermediate_size,
        )
        biases = (q + 2 * kv) * self.qkv_bias + h * self.output_bias + (2 * f + h) * self.mlp_bias
        return h * (q + 2 * kv) + q * h + 3 * h * f + 2 * h + biases
