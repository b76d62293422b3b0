"""The settings of pipelined speculation (PipeInfer, arXiv 2407.11798, and its code)."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import FIXED_GAMMA, PROBABILITY, DecodingSection
from magicdec.config.setting import check_values, same, setting

MODES = ("iterative", "sync", "async")


@dataclass(frozen=True)
class Options:
    """The settings, named as the original's flags, except that `gamma` is its `draft`."""

    mode: str = "async"
    pa: float = same(DecodingSection, "pa", 0.5)
    pr: float = setting(
        0.0, "--pa rises by this with each microbatch since the last commit.", **PROBABILITY
    )
    pd: float = setting(
        0.0, "--pa falls by this with each attempt that drafted nothing.", **PROBABILITY
    )
    # The most draft tokens in a microbatch.
    gamma: int = same(DecodingSection, "gamma", FIXED_GAMMA, words=())
    max_in_flight: int | None = setting(
        None, "Most runs of a request at the same time. Default: no limit.", least=1
    )
    lanes: int = setting(
        1,
        "Requests at the same time; the others wait.",
        least=1,
        other_defaults="the most of --concurrency",
    )

    def __post_init__(self) -> None:
        assert self.mode in MODES
        check_values(self)
