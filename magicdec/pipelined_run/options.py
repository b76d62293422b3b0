"""SpeculationOptions: what `magicdec pipeline` asks for beside the model. Imports no torch.

Owns the checks that need no model. Must not know the flags of other commands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from magicdec.distributed.layer_split import FLAG, is_auto
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.emulation import Link
from magicdec.pipelined_run.layout import read_split
from magicdec.pipelined_speculation.options import MODES, Options
from magicdec.workload.request_shapes import ShapedOptions
from magicdec.workload.trace import RequestShape

SCRIPTED_PROBABILITY = 0.7  # that the drafter of an emulated acceptance gives its candidate


@dataclass(frozen=True)
class SpeculationOptions(ShapedOptions):
    """`shapes` are all requests, `modes` the ways in which they are served. The other fields are
    the flags of the same names; `speculation` has those of the scheduler."""

    layer_split: str | None
    modes: tuple[str, ...]
    draft: str
    speculation: Options
    has_baseline: bool
    gen_len: str
    shapes: tuple[RequestShape, ...]
    emulate_stage_ms: float | None = None
    emulate_link_ms: float | None = None
    emulate_draft_ms: float | None = None
    emulate_acceptance: float | None = None
    machine: Path | None = None

    def __post_init__(self) -> None:
        for name in ("emulate_stage_ms", "emulate_link_ms", "emulate_draft_ms"):
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise ValueError(f"--{name} {given} is out of range; it must be larger than 0")
        rate = self.emulate_acceptance
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"--emulate_acceptance {rate:g} is not between 0 and 1")
        self._check_emulation()

    def _check_emulation(self) -> None:
        if self.emulate_stage_ms is not None and self.is_measured:
            raise ValueError(
                f"{FLAG} {self.layer_split}: with --emulate_stage_ms {self.emulate_stage_ms} a "
                "stage takes the same time with any layers; give layer counts or shares"
            )
        if self.emulate_stage_ms is not None and self.emulate_acceptance is None:
            raise ValueError(
                "--emulate_stage_ms: stages that sleep emit no tokens that a draft could guess; "
                "give --emulate_acceptance"
            )
        if self.emulate_stage_ms is not None and self.has_baseline:
            raise ValueError(
                "--emulate_stage_ms: stages that sleep emit no tokens to compare; leave "
                f"{SEQUENTIAL} out of --modes"
            )
        needs_tokens = self.emulate_acceptance is not None and self.emulate_stage_ms is None
        if needs_tokens and not self.has_baseline:
            raise ValueError(
                f"--emulate_acceptance needs the tokens of {SEQUENTIAL}; add it to --modes"
            )
        if self.emulate_draft_ms is not None and self.emulate_acceptance is None:
            raise ValueError("--emulate_draft_ms is for --emulate_acceptance")

    @property
    def is_measured(self) -> bool:
        """Whether the layers of the stages follow from times."""
        return is_auto(read_split(self.layer_split).stages)

    @property
    def needs_drafts(self) -> bool:
        return any(mode != "iterative" for mode in self.modes)

    @property
    def link(self) -> Link | None:
        """The link that is emulated between ranks; None if there is none."""
        return None if self.emulate_link_ms is None else Link(self.emulate_link_ms / 1e3)

    @property
    def on_host(self) -> str | None:
        """Why hidden states pass through the memory of the host, also between GPUs."""
        if self.link is not None:
            return "an emulated link delays messages on the host"
        return None if self.emulate_stage_ms is None else "stages that sleep have no hidden states"

    @property
    def passes(self) -> tuple[str, ...]:
        """All ways in which the requests are served, in order."""
        return (*[SEQUENTIAL] * self.has_baseline, *self.modes)

    def of_mode(self, mode: str) -> Options:
        return replace(self.speculation, mode=mode)

    def describe(self) -> dict[str, Any]:
        """These options as the record's `config.workload` has them."""
        values = asdict(self) | asdict(self.speculation)
        for name in ("shapes", "speculation", "mode"):
            del values[name]
        values["machine"] = None if self.machine is None else str(self.machine)
        return values | {"num_requests": len(self.shapes)}


def read_modes(names: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether one process decodes too, and the ways to decode on stages in the order of MODES.
    Raises ValueError, naming the flag."""
    for name in names:
        if name not in (SEQUENTIAL, *MODES):
            choices = ", ".join((SEQUENTIAL, *MODES))
            raise ValueError(f"--modes {name} is not known; choose from {choices}")
    modes = tuple(name for name in MODES if name in names)
    if not modes:
        raise ValueError(
            f"--modes {' '.join(names)} needs no stages; add one of {', '.join(MODES)}"
        )
    return SEQUENTIAL in names, modes
