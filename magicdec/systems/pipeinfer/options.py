"""The settings of pipelined speculation (PipeInfer, arXiv 2407.11798, and its code). Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import FIXED_GAMMA, PROBABILITY, DecodingSection
from magicdec.config.setting import check_values, same, setting
from magicdec.systems.declaration import WITH_DRAFT

PIPELINE = "pipeline"  # one token after the other
PIPELINE_WITH_DRAFT = f"{PIPELINE}{WITH_DRAFT}"  # drafts, then one run that verifies them
PIPEINFER = "pipeinfer"  # drafts run ahead of the stages
MODES = (PIPELINE, PIPELINE_WITH_DRAFT, PIPEINFER)
# Their names in earlier versions, which are still accepted.
RENAMED = {"iterative": PIPELINE, "sync": PIPELINE_WITH_DRAFT, "async": PIPEINFER}


@dataclass(frozen=True)
class Options:
    """The settings of the scheduler, named as the original's flags, except that `gamma` is its
    `draft`."""

    mode: str = PIPEINFER
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
        "Requests at the same time; the others wait. Default: 1, or the most of --concurrency.",
        least=1,
    )

    def __post_init__(self) -> None:
        assert self.mode in MODES
        check_values(self)
