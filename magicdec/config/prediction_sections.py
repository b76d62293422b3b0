"""The settings that `magicdec plan` and `magicdec simulate` share: what is predicted for which
acceptance and which ranks. Imports no torch itself."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.setting import setting


@dataclass(frozen=True)
class AcceptanceSection:
    """How many draft tokens are accepted. One of the first two is given; a plan needs one of them,
    and a simulation takes a rate of 0.8 by default."""

    acceptance: tuple[str, ...] | None = setting(
        None,
        "An acceptance rate as in a record (accepted / drafted tokens) such as 0.8, or a file of "
        "records. A plan also takes the probabilities that at least 1, 2, 3 drafts are accepted, "
        "such as 0.8,0.7,0.6, and several values, one for each --budget. Default: 0.8 in simulate.",
        metavar="A",
    )
    conditional_acceptance: tuple[float, ...] | None = setting(
        None,
        "In place of --acceptance: the probability that a draft token is accepted if all before it "
        "in the step were. A plan takes one value, or one for each --budget; in a simulation "
        "further values are for the second, third, ... candidate of the draft.",
        metavar="A",
        least=0,
        most=1,
    )
    acceptance_gamma: int = setting(
        4, "Draft tokens in a step with which the rate of --acceptance was measured.", least=1
    )

    def __post_init__(self) -> None:
        if self.acceptance is not None and self.conditional_acceptance is not None:
            raise ValueError("--conditional_acceptance is given in place of --acceptance; give one")


@dataclass(frozen=True)
class ClusterSection:
    """The hosts and stages of what is predicted."""

    nodes: tuple[int, ...] | None = setting(
        None,
        "Number of hosts: over which a plan spreads the ranks, by default 1; or which share the "
        "work of a simulated pipeline, the hosts of a stage by tensor parallelism.",
        least=1,
    )
    stages: tuple[int, ...] | None = setting(
        None,
        "Number of stages of a pipeline. A plan predicts a ring of samples on them, as `magicdec "
        "recurrent` runs it, in place of speculation. Default of simulate: 4; with --nodes, every "
        "number that divides them.",
        least=1,
    )
