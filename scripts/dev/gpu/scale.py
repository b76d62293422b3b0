"""The shapes that the stages measure: full, or tiny to test all stages on a CPU. Times of tiny
shapes are meaningless."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu.results import Results
from magicdec.config.capabilities import capabilities_of
from magicdec.config.machine import Machine
from magicdec.hardware.environment import missing_backends


@dataclass(frozen=True)
class Heads:
    """Heads of the attention stage: H query heads, G KV heads, D head size."""

    H: int
    G: int
    D: int


@dataclass(frozen=True)
class Scale:
    model: str  # of `magicdec latency`
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    budgets: tuple[int, ...]
    repeats: int
    heads: dict[str, Heads]
    places: tuple[tuple[int, int], ...]  # (B, S) of the attention stage
    attention_tokens: tuple[int, ...]
    backends: tuple[str, ...]
    copied_bytes: int
    peer_model: str
    peer_places: tuple[tuple[int, int], ...]  # (B, S)
    tests: dict[str, tuple[str, ...]]  # the files by stage
    demo_prefix: int
    demo_backends: tuple[str, ...]
    demo_dtypes: tuple[str, ...]
    run_places: tuple[tuple[int, int], ...]  # (B, S) of the stage `whole_runs`
    run_gammas: tuple[int, ...]
    run_budget: int
    draft_rows: tuple[int, ...]  # of products of the stage `drafts`
    draft_batch_sizes: tuple[int, ...]  # of its steps
    draft_places: tuple[tuple[int, int], ...]  # (B, S) of its whole runs
    draft_gamma: int
    hybrid_model: str | None  # of the stage `hybrid`; None: a small one, which it writes
    hybrid_batch_sizes: tuple[int, ...]
    hybrid_contexts: tuple[int, ...]


GPU_BACKENDS = ("triton", "flash_attn", "grouped")
# In order of importance, because the last ones are left out when time runs out.
FULL = Scale(
    model="random:llama-3.1-8b",
    batch_sizes=(32, 1, 8, 64),
    contexts=(4096, 16384, 32768, 65536),
    new_tokens=tuple(range(1, 10)),  # decode, and verification of gamma 1 to 8
    budgets=(257, 513, 1025),
    repeats=10,
    heads={"llama-3.1-8b": Heads(32, 8, 128), "llama-2-7b": Heads(32, 32, 128)},
    places=((32, 16384), (32, 32768), (1, 4096), (1, 65536), (8, 32768), (64, 4096)),
    attention_tokens=(1, 5, 9),
    backends=GPU_BACKENDS,
    copied_bytes=4 << 30,
    peer_model="llama-3.1-8b",
    peer_places=((1, 4096), (8, 4096), (8, 16384), (32, 4096)),
    tests={
        "tokens": ("tests/oracle/test_cuda_tokens.py", "tests/oracle/test_replay.py"),
        "tests": (
            "tests/oracle/test_attention.py",
            "tests/oracle/test_cuda_libraries.py",
            "tests/oracle/test_triton.py",
            "tests/oracle/test_elementwise_triton.py",
            "tests/oracle/test_kernel_view.py",
            "tests/oracle/test_low_bit_triton.py",
            "tests/oracle/test_elementwise.py",
            "tests/unit/test_step_times.py",
        ),
    },
    demo_prefix=16384,
    demo_backends=("auto", *GPU_BACKENDS),
    demo_dtypes=("float32", "bfloat16"),
    run_places=((8, 32768), (1, 32768), (24, 16384)),
    run_gammas=(3, 2, 5),
    run_budget=513,
    draft_rows=(1, 8, 28, 140),
    draft_batch_sizes=(1, 28, 8),
    draft_places=((1, 32768), (28, 32768), (8, 16384)),
    draft_gamma=4,
    hybrid_model="random:qwen3.5-27b",
    hybrid_batch_sizes=(1, 8),
    hybrid_contexts=(4096, 32768),
)
# What `quick` measures of the stages that it shares with the whole suite.
QUICK = replace(
    FULL,
    batch_sizes=(8, 1, 32),
    contexts=(4096, 16384, 32768),
    new_tokens=(1, 5),
    budgets=(513,),
    backends=("triton", "grouped", "flash_attn"),
    peer_places=((1, 4096), (8, 4096), (8, 16384)),
    attention_tokens=(1, 5),
    run_places=((28, 32768), (1, 32768)),
    run_gammas=(3,),
)
TINY = Scale(
    model="demo",
    batch_sizes=(2,),
    contexts=(64, 128),
    new_tokens=(1, 2, 3),
    budgets=(17, 33),
    repeats=1,
    heads={"tiny": Heads(4, 2, 64)},
    places=((2, 128),),
    attention_tokens=(1, 3),
    backends=("grouped", "native"),
    copied_bytes=1 << 22,
    peer_model="tiny",
    peer_places=((2, 64),),
    tests=dict.fromkeys(("tokens", "tests"), ("tests/unit/test_ngram.py",)),
    demo_prefix=256,
    demo_backends=("grouped",),
    demo_dtypes=("float32",),
    run_places=((2, 128),),
    run_gammas=(2,),
    run_budget=33,
    draft_rows=(1, 20),
    draft_batch_sizes=(2,),
    draft_places=((2, 128),),
    draft_gamma=2,
    hybrid_model=None,
    hybrid_batch_sizes=(2,),
    hybrid_contexts=(64, 128),
)


@dataclass(frozen=True)
class Suite:
    """The arguments of a stage."""

    device: torch.device
    is_tiny: bool
    directory: Path
    results: Results
    is_quick: bool = False

    @property
    def scale(self) -> Scale:
        if self.is_tiny:
            return TINY
        return QUICK if self.is_quick else FULL


def obstacle_of(backend: str, device: torch.device, D: int, dtype: str) -> str | None:
    """Why the backend does not serve heads of size D in `dtype` here; None if it does."""
    machine = Machine(1, has_compiler=True, missing_backends=missing_backends((backend,)))
    return capabilities_of(backend).obstacle(machine, device.type, D, dtype)
