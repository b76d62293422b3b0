"""What PipeInfer (arXiv 2407.11798) says of itself: stages that decode token by token, with one
batch of drafts, or with drafts that run ahead and are cancelled if wrong. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from magicdec.config.run_config import RunConfig
from magicdec.config.setting import same, setting
from magicdec.distributed.layout import make_layout
from magicdec.systems.declaration import Drafts, Mode, Ranks, SystemDeclaration
from magicdec.systems.pipeinfer.options import PIPEINFER as AHEAD
from magicdec.systems.pipeinfer.options import PIPELINE, RENAMED, Options
from magicdec.systems.stages.settings import StagesSettings

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions


@dataclass(frozen=True)
class PipeInferSettings(StagesSettings):
    pa: float = same(Options, "pa")
    pr: float = same(Options, "pr")
    pd: float = same(Options, "pd")
    max_in_flight: int | None = same(Options, "max_in_flight")
    lanes: int | None = same(Options, "lanes", None, is_default=True)
    emulate_draft_ms: float | None = setting(
        None,
        "A step of the drafter of emulated stages takes so long. Default: no time.",
        metavar="MS",
        above=0,
    )

    def settled(self, load: ServeOptions, passes: Sequence[Pass]) -> Self:
        return replace(self, lanes=self.lanes or max(1, load.most_in_flight))

    def rows(self, load: ServeOptions, world_size: int) -> int:
        assert self.lanes is not None, "it is settled"
        return self.lanes

    def options(self, mode: str, gamma: int) -> Options:
        """The settings of the scheduler in a mode."""
        assert self.lanes is not None, "it is settled"
        return Options(mode, self.pa, self.pr, self.pd, gamma, self.max_in_flight, lanes=self.lanes)

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        drafting = [serving_pass.name for serving_pass in passes if serving_pass.is_drafting]
        acceptance = load.emulate_acceptance
        if acceptance is None and self.emulate_draft_ms is not None:
            raise ValueError("--emulate_draft_ms is for --emulate_acceptance")
        if drafting and acceptance is not None and not self.emulates:
            raise ValueError(
                f"{load.acceptance_flag}: --modes {drafting[0]} drafts ahead of stages that "
                "compute, whose tokens no drafter knows; give --emulate_stage_ms too, name by "
                "--draft what drafts, or predict it by magicdec simulate"
            )
        if drafting and acceptance is not None and not (len(acceptance) == 1 and acceptance[0] < 1):
            raise ValueError(
                f"{load.acceptance_flag}: pipelined speculation takes one probability below 1, "
                "that a token is drafted right"
            )
        super().check(load, passes, config, world_size)
        if drafting and acceptance is None and self.emulates:
            raise ValueError(
                f"{self.stage_flag}: stages that sleep emit no tokens that a draft could guess; "
                "give --emulate_acceptance"
            )

    def check_model(
        self, load: ServeOptions, passes: Sequence[Pass], source: ModelSource, world_size: int
    ) -> None:
        from magicdec.distributed.tensor_parallel import Shard

        model = source.config
        layout = make_layout(self.layer_split, world_size, model.num_layers)
        Shard(0, layout.tensor_parallel).heads(model.num_heads, model.num_kv_heads)


PIPEINFER = SystemDeclaration(
    name="pipeinfer",
    paper="2407.11798",
    page="pipeinfer.md",
    system="magicdec.systems.pipeinfer.system:PipeInfer",
    settings=PipeInferSettings,
    details="magicdec.systems.pipeinfer.details:PipeInferDetails",
    modes={
        PIPELINE: Mode(
            Ranks.STAGES,
            Drafts.MAYBE,
            "stages decode token by token, or verify one batch of drafts",
            is_draft_default=True,
            is_coupled=True,
            is_in_gate=True,
        ),
        AHEAD: Mode(
            Ranks.STAGES,
            Drafts.ALWAYS,
            "drafts run ahead of the stages",
            is_coupled=True,
            is_judged_by_time=True,
            is_in_gate=True,
        ),
    },
    draft_settings=frozenset({"pa", "pr", "pd", "emulate_draft_ms"}),
    drafts_follow=("lanes", "max_in_flight", "pa", "pr", "pd"),
    renamed_modes=RENAMED,
)
