"""The facts of a host and of a model that decide what `auto` means. Imports nothing of this package
and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """The facts of a host. `missing_backends` says what each attention backend lacks,
    `avoids_native_steps` that the environment has MAGICDEC_NATIVE_STEPS=off.

    `gpu_obstacle` says why GPUs do not serve (then `has_cuda` is false). torch too uses
    `has_bfloat16_products`; only our kernels widen bfloat16 in registers (`widens_bfloat16`).
    `shared_memory_obstacle` says why ranks cannot use /dev/shm, with `shared_memory_bytes` left
    (None: no known limit). `fp8_obstacle` says why its GPUs do not multiply FP8.
    """

    num_cpus: int
    world_size: int = 1
    local_world_size: int = 1
    first_rank: int = 0
    has_cuda: bool = False
    gpu_obstacle: str | None = None
    has_bfloat16_products: bool = False
    widens_bfloat16: bool = False
    has_compiler: bool = False
    shared_memory_obstacle: str | None = "no /dev/shm"
    shared_memory_bytes: int | None = None
    num_gpus: int = 0
    fp8_obstacle: str | None = None
    avoids_native_steps: bool = False
    missing_backends: Mapping[str, str] = field(default_factory=dict)

    @property
    def local_ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True)
class ModelTraits:
    """The facts of a model: cached head size, ALiBi, sliding window in tokens (None without), sink
    logits, what native steps do not compute of it, whether layers have states (linear attention),
    and the target's layers that give hidden states to a draft head."""

    head_dim: int = 64
    has_alibi: bool = False
    sliding_window: int | None = None
    has_sinks: bool = False
    layer_obstacle: str | None = None
    has_states: bool = False
    state_layers: tuple[int, ...] = ()
