"""The facts that decide what `auto` means: those about a host (`Machine`) and those about a model
(`ModelTraits`). Imports nothing of this package and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """What `resolve` needs to know about the host. `world_size` and `local_world_size` are those of
    torchrun, and `first_rank` is the first rank of this host. `missing_backends` says for each
    attention backend what it needs and does not find. `avoids_native_steps` says that the
    environment has MAGICDEC_NATIVE_STEPS=off. `has_cuda` is false if `gpu_obstacle` says why the
    GPUs of the host do not serve. The CPU `has_bfloat16_products`, which torch uses
    too, or the project's own kernels can widen bfloat16 in registers (`widens_bfloat16`).
    `shared_memory_obstacle` says why ranks cannot make files in the shared memory of the host,
    which has `shared_memory_bytes` left (None: no limit is known)."""

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
    avoids_native_steps: bool = False
    missing_backends: Mapping[str, str] = field(default_factory=dict)

    @property
    def local_ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True)
class ModelTraits:
    """What `resolve` needs to know about a model: the size of a head in the cache, whether its
    positions are ALiBi, its sliding window in tokens (None: it has none), and what in its layers
    native steps do not compute (None: nothing)."""

    head_dim: int = 64
    has_alibi: bool = False
    sliding_window: int | None = None
    layer_obstacle: str | None = None
