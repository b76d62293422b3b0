"""What a scheduler has done so far, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Counts:
    """What was scheduled so far."""

    runs: int = 0
    speculative_runs: int = 0
    invalid_runs: int = 0  # cancelled: no row of them could be right any more
    superfluous_runs: int = 0  # cancelled: all that they tell was known
    drafted: int = 0  # tokens of speculative runs
    accepted: int = 0  # committed tokens that had been launched before as drafts
    failed_attempts: int = 0  # to draft; the first candidate was less probable than the threshold
    # By how much the largest logit exceeded the second, at the committed token with the least.
    least_margin: float = math.inf
