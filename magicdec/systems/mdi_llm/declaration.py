"""What MDI-LLM (arXiv 2505.18164) says of itself: requests circulate through a ring of stages.
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import NGRAM, SELF
from magicdec.distributed.layer_split import FLAG
from magicdec.distributed.layout import StageGrid, make_grid, read_split
from magicdec.systems.declaration import WITH_DRAFT, Drafts, Mode, Ranks, SystemDeclaration
from magicdec.systems.row_settings import PrefillSettings, RowSettings
from magicdec.systems.stages.settings import StagesSettings

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.systems.modes import Pass
    from magicdec.systems.options import ServeOptions

RING = "ring"


@dataclass(frozen=True)
class MDILLMSettings(StagesSettings, RowSettings, PrefillSettings):
    def grid(self, world_size: int) -> StageGrid:
        """The stages of a ring, without ranks that only draft in other modes. Raises ValueError,
        naming the flag."""
        split = read_split(self.layer_split)
        flag_text = f"{FLAG} {self.layer_split}"
        if split.head:
            raise ValueError(
                f"{flag_text}: a ring has no head without layers; leave the first share of 0 out, "
                f"or {RING} out of --modes"
            )
        num_ranks = world_size - split.is_apart
        if num_ranks < 1:
            raise ValueError(f"{flag_text} leaves no rank for a stage of the {world_size} ranks")
        return make_grid(flag_text, split.num_stages(world_size), num_ranks)

    def rows(self, load: ServeOptions, world_size: int) -> int:
        """The samples in flight. Raises ValueError, naming the flag."""
        size = self.batch_size
        count = len(load.shapes)
        lanes = max(self.grid(world_size).num_stages, -(-load.most_in_flight // size))
        samples = self.n_samples or min(lanes, max(1, count // size)) * size
        if samples % size:
            raise ValueError(
                f"--n_samples {samples} is not a multiple of --B {size}, the samples of a message"
            )
        if self.n_samples is not None and count < samples:
            raise ValueError(
                f"--num_requests {count} is less than the samples in flight of a ring, "
                f"--n_samples {samples}"
            )
        return samples

    def check(
        self, load: ServeOptions, passes: Sequence[Pass], config: RunConfig, world_size: int
    ) -> None:
        super().check(load, passes, config, world_size)
        drafting = [serving_pass for serving_pass in passes if serving_pass.is_drafting]
        if drafting and load.draft == SELF:
            raise ValueError(
                f"--draft {SELF}: --modes {RING}{WITH_DRAFT} lacks layers to draft with on its "
                "first stage; choose ngram or model:NAME"
            )
        self.rows(load, world_size)
        for serving_pass in drafting:
            if load.accepts_by_chance(serving_pass):
                raise ValueError(
                    f"{load.acceptance_flag}: stages judge the drafts of --modes "
                    f"{serving_pass.name} by "
                    "their logits alone; leave the mode or the flag out"
                )
        if drafting and self.emulates and load.draft != NGRAM:
            raise ValueError(
                f"{self.stage_flag}: stages that sleep emit no tokens that --draft {load.draft} "
                f"could guess in --modes {drafting[0].name}; leave {WITH_DRAFT} out"
            )

    def check_model(
        self, load: ServeOptions, passes: Sequence[Pass], source: ModelSource, world_size: int
    ) -> None:
        from magicdec.distributed.tensor_parallel import Shard
        from magicdec.systems.stages.staged import check_split

        grid = self.grid(world_size)
        check_split(read_split(self.layer_split).stages, grid, source)
        Shard(0, grid.tensor_parallel).heads(source.config.num_heads, source.config.num_kv_heads)


MDI_LLM = SystemDeclaration(
    name="mdi_llm",
    paper="2505.18164",
    page="mdi_llm.md",
    system="magicdec.systems.mdi_llm.system:MDILLM",
    settings=MDILLMSettings,
    details="magicdec.systems.mdi_llm.details:MDILLMDetails",
    modes={
        RING: Mode(
            Ranks.STAGES,
            Drafts.MAYBE,
            "requests circulate through stages of layers",
            is_in_gate=True,
        )
    },
    drafts_follow=("batch_size", "n_samples", "prefill_tokens"),
)
