"""Link: the delay and the bandwidth of the way from one stage to the next. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A message occupies the link for its bytes over `bytes_per_s`, and arrives `delay_s` after
    that. None: without limit."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def seconds(self, num_bytes: int) -> float:
        """How long a message of that size occupies the link."""
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s
