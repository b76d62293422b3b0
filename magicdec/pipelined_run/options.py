"""SpeculationOptions: what `magicdec pipeline` asks for beside the model. Imports no torch.

Owns the checks that need no model. Must not know the flags of other commands.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from magicdec.config.sections import DraftChoice, StagesSection
from magicdec.config.setting import same, setting
from magicdec.distributed.layer_split import FLAG, is_auto
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.emulation import Link
from magicdec.pipelined_run.layout import read_split
from magicdec.pipelined_speculation.options import MODES, Options
from magicdec.workload.request_shapes import ShapedOptions

SCRIPTED_PROBABILITY = 0.7  # that the drafter of an emulated acceptance gives its candidate


@dataclass(frozen=True)
class SpeculationOptions(ShapedOptions, StagesSection):
    """The options of `magicdec pipeline`; `speculation` has those of the scheduler."""

    modes: tuple[str, ...] | None = same(ShapedOptions, "modes", choices=(SEQUENTIAL, *MODES))
    draft: str = same(DraftChoice, "draft", "model:demo-draft")
    emulate_draft_ms: float | None = setting(
        None,
        "A step of the emulated drafter takes so long. Default: no time.",
        metavar="MS",
        above=0,
    )
    emulate_acceptance: float | None = setting(
        None,
        "In place of --draft: each drafted token is what the target writes with this probability, "
        "which needs the baseline or emulated stages. Default: --draft drafts.",
        metavar="A",
        least=0,
        most=1,
    )
    speculation: Options = Options()

    def __post_init__(self) -> None:
        if not self.pipelined:
            raise ValueError(
                f"--modes {' '.join(self.passes)} needs no stages; add one of {', '.join(MODES)}"
            )
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
        return any(mode != "iterative" for mode in self.pipelined)

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
        every = (SEQUENTIAL, *MODES)
        if self.modes is None:
            return every if self.emulate_stage_ms is None else MODES
        return tuple(mode for mode in every if mode in self.modes)

    @property
    def has_baseline(self) -> bool:
        """Whether one process decodes too."""
        return SEQUENTIAL in self.passes

    @property
    def pipelined(self) -> tuple[str, ...]:
        """The ways to decode on stages."""
        return tuple(mode for mode in self.passes if mode != SEQUENTIAL)

    def of_mode(self, mode: str) -> Options:
        return replace(self.speculation, mode=mode)

    def describe(self) -> dict[str, Any]:
        """These options as the record's `config.workload` has them."""
        values = asdict(self) | asdict(self.speculation)
        for name in ("shapes", "speculation", "mode"):
            del values[name]
        values |= {"modes": self.passes, "has_baseline": self.has_baseline}
        values["machine"] = None if self.machine is None else str(self.machine)
        return values | {"num_requests": len(self.shapes)}
