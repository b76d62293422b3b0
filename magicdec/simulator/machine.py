"""The machine that is simulated: stages, links and a drafter, with their times in seconds.

Must not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass

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
