"""DraftSection: the model that drafts in a run with a standalone draft, and the ranks that hold it.
Imports no torch.

Owns these fields and their flags. Must not know what is drafted nor how.
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
