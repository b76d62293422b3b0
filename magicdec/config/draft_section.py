"""DraftSection: the model that drafts in a run with a standalone draft, and the ranks that hold it.
Imports no torch.

Owns these fields, their flags and the check of the ranks. Must not know what is drafted nor how.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.options import option
from magicdec.names import WEIGHT_DTYPES


@dataclass(frozen=True)
class DraftSection:
    model: str = option(
        "demo-draft",
        "The draft: demo, demo-draft, random:<preset>, a Hugging Face directory, or a "
        ".safetensors/.pth/.bin file beside its config.json.",
        "--model",
    )
    rank_group: tuple[int, ...] | None = option(
        None,
        "The ranks that hold the draft, in shard order. Default: the first of the target's.",
        "--draft_ranks",
        "--draft_rank_group",
        "--draft_group",
    )
    draft_dtype: str = option(
        "auto",
        "The dtype of the draft's matrices, as --target_dtype is of the target's.",
        "--draft_dtype",
        choices=("auto", *WEIGHT_DTYPES),
    )

    def check(self, world_size: int) -> None:
        """Raise ValueError, one line, for ranks that cannot be a group: any of those launched, each
        once."""
        if self.rank_group is None:
            return
        shown = " ".join(map(str, self.rank_group))
        launched = f"the launched ranks: {' '.join(map(str, range(world_size)))}"
        if not shown:
            raise ValueError(f"--draft_ranks names no rank; name some of {launched}")
        if len(set(self.rank_group)) != len(self.rank_group):
            raise ValueError(f"--draft_ranks {shown} names a rank twice; name some of {launched}")
        outside = [r for r in self.rank_group if not 0 <= r < world_size]
        if outside:
            raise ValueError(
                f"--draft_ranks {shown} names rank {outside[0]}, which does not exist; "
                f"choose from {launched}"
            )
