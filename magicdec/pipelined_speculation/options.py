"""The settings of pipelined speculation (Butler et al. 2024, PipeInfer, and its code)."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import FIXED_DRAFT_TOKENS, PROBABILITY, DecodingSection
from magicdec.config.setting import check_values, same, setting

MODES = ("iterative", "sync", "async")
NUM_CANDIDATES = 8  # of which a draft step can choose at one place


@dataclass(frozen=True)
class Options:
    """How to speculate. The names are those of the original's flags, but `gamma` is its `draft`."""

    mode: str = "async"
    pa: float = same(DecodingSection, "pa", 0.5)
    ps: float = setting(
        0.1,
        "A further candidate opens a branch when it is more probable than this.",
        **PROBABILITY,
    )
    pr: float = setting(
        0.0,
        "--pa and --ps rise by this with each microbatch since the last commit.",
        **PROBABILITY,
    )
    pd: float = setting(
        0.0,
        "--pa and --ps fall by this with each attempt that drafted nothing.",
        **PROBABILITY,
    )
    # The most draft tokens in the depth of a microbatch, and about its most rows.
    gamma: int = same(DecodingSection, "num_draft_tokens", FIXED_DRAFT_TOKENS, words=())
    np: int = setting(1, "Most branches of a microbatch.", least=1, most=NUM_CANDIDATES)
    max_in_flight: int | None = setting(
        None, "Most runs of a request at the same time. Default: no limit.", least=1
    )
    lanes: int = setting(1, "Requests at the same time; the others wait.", least=1)

    def __post_init__(self) -> None:
        assert self.mode in MODES
        check_values(self)

    @property
    def spare_cells(self) -> int:
        """Cells of a lane beside those of its positions: for branches, of which at most `np` - 1
        have another cell than that of their position."""
        return 4 * self.gamma * (self.np - 1)
