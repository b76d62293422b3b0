"""StagesSettings: the settings of systems whose ranks are stages of layers, and their checks that
need no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import StagesSection
from magicdec.distributed.layer_split import FLAG, is_auto
from magicdec.distributed.layout import read_split
from magicdec.names import NGRAM_AND
from magicdec.systems.declaration import Ranks, SystemSettings, refuse_sampling

if TYPE_CHECKING:
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions


@dataclass(frozen=True)
class StagesSettings(StagesSection, SystemSettings):
    @property
    def emulates(self) -> bool:
        return self.emulate_stage_ms is not None

    @property
    def is_measured(self) -> bool:
        """Whether measured times decide the layers of the stages."""
        return is_auto(read_split(self.layer_split).stages)

    @property
    def stage_flag(self) -> str:
        return f"--emulate_stage_ms {self.emulate_stage_ms}"

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        drafting = [serving_pass.name for serving_pass in passes if serving_pass.is_drafting]
        if drafting and config.decoding.gamma == "auto":
            raise ValueError(
                f"--gamma auto: --modes {drafting[0]} drafts a fixed number of tokens; name one"
            )
        if drafting and load.draft.startswith(NGRAM_AND):
            raise ValueError(
                f"--draft {load.draft}: --modes {drafting[0]} drafts from one source; choose ngram "
                "or model:NAME"
            )
        if self.emulate_link_ms is not None and world_size == 1:
            raise ValueError(f"--emulate_link_ms {self.emulate_link_ms}: one rank has no link")
        if self.emulates:
            self._check_emulation(load, config)

    def _check_emulation(self, load: ServeOptions, config: RunConfig) -> None:
        """Raises ValueError for what means nothing beside stages that sleep."""
        if load.turns > 1:
            load.refuse_turns("emulate_stage_ms", "chooses no tokens")
        others = [
            serving_pass.name for serving_pass in load.passes if not load.emulates(serving_pass)
        ]
        if others:
            raise ValueError(
                f"{self.stage_flag}: --modes {others[0]} has no stages that could sleep; choose "
                f"from {', '.join(load.modes_on(Ranks.STAGES))}"
            )
        if self.is_measured:
            raise ValueError(
                f"{FLAG} {self.layer_split}: with {self.stage_flag} a stage takes the same time "
                "with any layers; give layer counts or shares"
            )
        refuse_sampling(config, f"{self.stage_flag}, whose stages choose no tokens")
