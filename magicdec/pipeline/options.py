"""RingOptions: what `magicdec recurrent` asks for beside the model. Imports no torch.

Owns the checks that need no model, and the passes. Must not know the flags of other commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from magicdec.config.sections import NONE as NO_DRAFT
from magicdec.config.sections import DraftChoice, StagesSection, WorkloadSection
from magicdec.config.setting import same, setting
from magicdec.distributed.layer_split import AUTO, FLAG, is_auto
from magicdec.distributed.stages import StageGrid
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.emulation import Link
from magicdec.serving.options import ServingOptions
from magicdec.workload.request_shapes import ShapedOptions

RING, SPECULATIVE_RING = "ring", "ring_speculative"
RINGS = (RING, SPECULATIVE_RING)
BATCHED, TENSOR_PARALLEL = "batched", "tensor_parallel"
BASELINES = (SEQUENTIAL, BATCHED, TENSOR_PARALLEL)
WITH_CURVES = (SEQUENTIAL, RING)  # passes whose tokens and memory are drawn against time
MODES = (*BASELINES, RING)
BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True)
class RingOptions(ShapedOptions, StagesSection):
    """The options of `magicdec recurrent`. `baselines` serve the requests beside the ring, and
    `has_memory` says whether every rank notes how much memory it uses. None stands for a default
    that follows from the number of stages."""

    modes: tuple[str, ...] | None = same(ShapedOptions, "modes", choices=MODES)
    draft: str = same(DraftChoice, "draft", NO_DRAFT)
    lane_size: int = same(WorkloadSection, "batch_size", 1)
    n_samples: int | None = setting(
        None,
        "Samples that are in flight together, a multiple of --B. Default: --B for each stage.",
        metavar="R",
        least=1,
    )
    prefill_tokens: int | None = same(ServingOptions, "prefill_tokens")
    pad_stage_ms: float | None = setting(
        None,
        "Stages compute, and then sleep until a message has taken so long. Default: they do not "
        "sleep.",
        metavar="MS",
        above=0,
    )
    emulate_link_mbps: float | None = setting(
        None,
        "Megabits a second that a link carries at most. Default: without limit.",
        above=0,
    )
    baselines: tuple[str, ...] = ()
    has_memory: bool = False

    def __post_init__(self) -> None:
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
        samples = self.n_samples or min(grid.num_stages, max(1, count // size)) * size
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
        for name in ("shapes", "n_samples"):
            del values[name]
        values["modes"] = (*self.baselines, RING)
        values["machine"] = None if self.machine is None else str(self.machine)
        return values | {"num_requests": len(self.shapes)}


@dataclass(frozen=True)
class SettledOptions:
    """The options of a run with a known number of stages."""

    flags: RingOptions
    n_samples: int
    num_lanes: int

    def describe(self) -> dict[str, Any]:
        """The options as the record's `config.workload` has them."""
        return self.flags.describe() | {"n_samples": self.n_samples}

    def prefill_tokens(self, num_stages: int, chunk: int) -> int:
        """Prompt tokens that a step of a lane prefills at most. By default a chunk for each stage,
        so that the chunks of one prompt can keep all stages busy."""
        return self.flags.prefill_tokens or num_stages * chunk


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
    if RING not in names:
        raise ValueError(f"--modes {' '.join(names)} lacks the {RING}; add it")
    return tuple(name for name in BASELINES if name in names)
