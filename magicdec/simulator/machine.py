"""The machine that is simulated: stages, links and a drafter, with their times in seconds; and a
cluster of equal nodes, divided into stages.

The nodes of a stage share its work by tensor parallelism: its time is divided by their number, and
every layer adds two all-reduces. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

VOID_BYTES = 64  # a header alone
RESULT_BYTES = 16  # of a row that comes home: its arg-max and the margin


@dataclass(frozen=True)
class Machine:
    """A run of n rows keeps stage i busy for `stage_s[i]`, and for a share `row_cost` of it more
    with each row after the first. A message occupies its link for its bytes over `bytes_per_s`, and
    arrives `link_s` later."""

    stage_s: tuple[float, ...]
    layers: int = 8  # of a stage: between them it looks for cancellations
    prefill_s: float | None = None  # of a stage, for a prompt; None: as one row
    row_cost: float = 0.0
    link_s: float = 0.0
    bytes_per_s: float | None = None  # None: without limit
    row_bytes: int = 8192  # hidden states of one row
    cancel_s: float = 0.0  # until a cancellation is at a stage
    draft_s: float = 0.0  # one step of the drafter

    @property
    def num_stages(self) -> int:
        return len(self.stage_s)

    def busy_s(self, stage: int, num_rows: int, is_prompt: bool) -> float:
        if is_prompt and self.prefill_s is not None:
            return self.prefill_s
        return self.stage_s[stage] * (1 + self.row_cost * (num_rows - 1))

    def transfer_s(self, num_bytes: int) -> float:
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s


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
        prefill_s = None if self.base.prefill_s is None else self.base.prefill_s / nodes
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
