"""RingOptions: what `magicdec recurrent` asks for beside the model. Imports no torch.

Owns the checks that need no model, and the passes. Must not know the flags of other commands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magicdec.distributed.layer_split import AUTO, FLAG, is_auto
from magicdec.distributed.stages import StageGrid
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.emulation import Link
from magicdec.workload.request_shapes import ShapedOptions
from magicdec.workload.trace import RequestShape

RING, SPECULATIVE_RING = "ring", "ring_speculative"
RINGS = (RING, SPECULATIVE_RING)
BATCHED, TENSOR_PARALLEL = "batched", "tensor_parallel"
BASELINES = (SEQUENTIAL, BATCHED, TENSOR_PARALLEL)
WITH_CURVES = (SEQUENTIAL, RING)  # passes whose tokens and memory are drawn against time
MODES = (*BASELINES, RING)
NO_DRAFT = "none"
BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True)
class RingOptions(ShapedOptions):
    """`shapes` are all requests. The other fields are the flags of the same names; `lane_size` is
    --B, `has_spans` says whether every stage notes when it computes what, and `has_memory` whether
    every rank notes how much memory it uses. None stands for a default that follows from the number
    of stages."""

    layer_split: str | None
    lane_size: int
    n_samples: int | None
    prefill_tokens: int | None
    gen_len: str
    baselines: tuple[str, ...]
    shapes: tuple[RequestShape, ...]
    emulate_stage_ms: float | None = None
    emulate_link_ms: float | None = None
    emulate_link_mbps: float | None = None
    machine: Path | None = None
    has_spans: bool = False
    pad_stage_ms: float | None = None
    draft: str = NO_DRAFT
    has_memory: bool = False

    def __post_init__(self) -> None:
        for flag, value in (
            ("--B", self.lane_size),
            ("--n_samples", self.n_samples),
            ("--prefill_tokens", self.prefill_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{flag} {value} is too small; it must be at least 1")
        for flag, given in (
            ("--emulate_stage_ms", self.emulate_stage_ms),
            ("--pad_stage_ms", self.pad_stage_ms),
            ("--emulate_link_ms", self.emulate_link_ms),
            ("--emulate_link_mbps", self.emulate_link_mbps),
        ):
            if given is not None and not 0 < given < math.inf:
                raise ValueError(f"{flag} {given} is out of range; it must be larger than 0")
        if self.emulate_stage_ms is not None and is_auto(self.layer_split):
            raise ValueError(
                f"{FLAG} {self.layer_split}: with --emulate_stage_ms {self.emulate_stage_ms} a "
                "stage takes the same time with any layers; give layer counts or shares"
            )
        if self.emulate_stage_ms is not None and self.baselines:
            raise ValueError(
                f"--emulate_stage_ms {self.emulate_stage_ms}: stages that sleep emit no tokens to "
                f"compare with those of {' '.join(self.baselines)}; choose --modes {RING}"
            )
        if self.emulate_stage_ms is not None and self.pad_stage_ms is not None:
            raise ValueError(
                f"--pad_stage_ms {self.pad_stage_ms} is for stages that compute; leave out "
                "--emulate_stage_ms"
            )

    @property
    def link(self) -> Link | None:
        """The link that is emulated between stages; None if there is none."""
        if self.emulate_link_ms is None and self.emulate_link_mbps is None:
            return None
        rate = self.emulate_link_mbps
        bytes_per_s = None if rate is None else rate * BYTES_PER_MBIT
        return Link((self.emulate_link_ms or 0.0) / 1e3, bytes_per_s)

    @property
    def passes(self) -> tuple[str, ...]:
        """All ways in which the requests are served, in order. The tokens of the first are the
        reference of the others."""
        rings = RINGS if self.draft != NO_DRAFT else RINGS[:1]
        return (*self.baselines, *rings)

    def settle(self, grid: StageGrid) -> SettledOptions:
        """The options for a number of stages. Raises ValueError, naming the flag."""
        size, count = self.lane_size, len(self.shapes)
        samples = self.n_samples or grid.num_stages * size
        asked = f"--n_samples {samples}"
        if samples % size:
            raise ValueError(f"{asked} is not a multiple of --B {size}, the samples of a message")
        if count < samples:
            raise ValueError(f"--num_requests {count} is less than the samples in flight, {asked}")
        if grid.world_size == 1 and TENSOR_PARALLEL in self.baselines:
            raise ValueError(f"--modes {TENSOR_PARALLEL} needs several ranks; see --nproc")
        if self.machine is not None and not (is_auto(self.layer_split) and grid.num_stages > 1):
            raise ValueError(
                f"--machine {self.machine} does nothing here: it is for {FLAG} {AUTO} with several "
                "stages; leave it out"
            )
        if grid.num_stages == 1 and self.link is not None:
            raise ValueError("--emulate_link_ms and --emulate_link_mbps: one stage has no link")
        return SettledOptions(self, samples, samples // size)

    def describe(self) -> dict[str, Any]:
        """These options as the record's `config.workload` has them."""
        values = asdict(self)
        del values["shapes"], values["n_samples"]
        values["machine"] = None if self.machine is None else str(self.machine)
        return values | {"num_requests": len(self.shapes)}


@dataclass(frozen=True)
class SettledOptions:
    """The options of a run with a known number of stages."""

    asked: RingOptions
    n_samples: int
    num_lanes: int

    def describe(self) -> dict[str, Any]:
        """The options as the record's `config.workload` has them."""
        return self.asked.describe() | {"n_samples": self.n_samples}

    def prefill_tokens(self, num_stages: int, chunk: int) -> int:
        """Prompt tokens that a step of a lane prefills at most. By default a chunk for each stage,
        so that the chunks of one prompt can keep all stages busy."""
        return self.asked.prefill_tokens or num_stages * chunk


def read_modes(
    names: Sequence[str] | None, world_size: int, is_emulated: bool = False
) -> tuple[str, ...]:
    """What serves the requests beside the ring, in the order of BASELINES. None stands for all that
    there are on so many ranks, and for none beside emulated stages. Raises ValueError, naming the
    flag."""
    if names is None:
        if is_emulated:
            return ()
        return tuple(n for n in BASELINES if n != TENSOR_PARALLEL or world_size > 1)
    for name in names:
        if name not in MODES:
            raise ValueError(f"--modes {name} is not known; choose from {', '.join(MODES)}")
    if RING not in names:
        raise ValueError(f"--modes {' '.join(names)} lacks the {RING}; add it")
    return tuple(name for name in BASELINES if name in names)
