"""A cluster of equal nodes, divided into stages: the machine that each division gives.

The nodes of a stage share its work by tensor parallelism: its time is divided by their number, and
every layer adds two all-reduces. Must not know how a machine is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from magicdec.simulator.machine import Machine


@dataclass(frozen=True)
class Cluster:
    """A model on nodes. `model_s` is what one node needs for one token through the whole model."""

    model_s: float
    num_layers: int
    all_reduce_s: float
    base: Machine  # links, drafter and costs of rows; its stages are not used

    def machine(self, nodes: int, stages: int) -> Machine:
        """The stages get equal numbers of layers, the first ones one more if they do not divide."""
        each, rest = divmod(self.num_layers, stages)
        width = nodes // stages
        layer_s = self.model_s / self.num_layers / width
        layer_s += 2 * self.all_reduce_s if width > 1 else 0.0
        times = tuple(layer_s * (each + (stage < rest)) for stage in range(stages))
        prefill_s = self.base.prefill_s
        if prefill_s is not None:
            prefill_s = prefill_s / nodes
        return replace(self.base, stage_s=times, layers=each, prefill_s=prefill_s)


def divisions(
    nodes: Sequence[int], stages: Sequence[int] | None, num_layers: int
) -> Iterator[tuple[int, int]]:
    """Every number of nodes with every number of stages that divides it into layers and nodes:
    those of `stages`, or all that there are."""
    for count in nodes:
        for stage_count in stages or range(1, count + 1):
            if count % stage_count == 0 and stage_count <= num_layers:
                yield count, stage_count
