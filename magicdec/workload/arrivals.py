"""Arrival processes: when the requests of a serving workload arrive. The name table is
`names.ARRIVALS`.

A process is a function of the mean time between two arrivals, the number of requests and a random
generator; the times are in ms after the first arrival. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from magicdec.names import ARRIVALS, load_named

BURST, TRACE = "burst", "trace"
FORMS = ", ".join([*(n if n == BURST else f"{n}:MS" for n in ARRIVALS), f"{TRACE}:FILE"])


def burst(mean_ms: float, count: int, random: Random) -> list[float]:
    """All requests arrive at once."""
    return [0.0] * count


def constant(mean_ms: float, count: int, random: Random) -> list[float]:
    """The time between two arrivals is always the same."""
    return [mean_ms * i for i in range(count)]


def uniform(mean_ms: float, count: int, random: Random) -> list[float]:
    """The time between two arrivals is uniform between 0 and twice its mean."""
    gaps = (random.uniform(0, 2 * mean_ms) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def poisson(mean_ms: float, count: int, random: Random) -> list[float]:
    """The time between two arrivals is exponentially distributed (a Poisson process)."""
    gaps = (random.expovariate(1 / mean_ms) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


@dataclass(frozen=True)
class Arrival:
    """What `--arrival` asks for: a process with its mean time, or a trace."""

    process: str
    mean_ms: float = 0.0
    trace: Path | None = None

    def times_ms(self, count: int, random: Random) -> list[float]:
        """The time at which each request arrives, for a process and not for a trace."""
        times: list[float] = load_named(ARRIVALS, self.process)(self.mean_ms, count, random)
        return times


def parse_arrival(text: str) -> Arrival:
    """Raises ValueError if `text` is none of `FORMS`."""
    name, colon, value = text.partition(":")
    if name == TRACE and value:
        return Arrival(TRACE, trace=Path(value))
    if name == BURST and not colon:
        return Arrival(BURST)
    if name not in ARRIVALS or name == BURST:
        raise ValueError(f"--arrival {text} is not known; choose from {FORMS}")
    try:
        mean_ms = float(value)
    except ValueError:
        mean_ms = math.nan
    if not 0 < mean_ms < math.inf:
        raise ValueError(
            f"--arrival {text}: {value!r} is no time in ms larger than 0; choose from {FORMS}"
        )
    return Arrival(name, mean_ms)
