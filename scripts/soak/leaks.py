"""What a rank holds after each pass, and whether it grows. Imports no torch.

Every pass serves the same requests with the same settings, so a rank holds as much after each of
them as after the one before. Growth is judged over the passes after the warm-up, in which threads,
caches of the allocator and the pages of ring buffers come to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

WARM_UP = 16  # passes; the heap of the head grows until then
COUNTS = ("threads", "files", "segments", "mappings", "waiting")
BOUNDS = {"anonymous_kb": 24.0, "objects": 2.0}
"""Growth a pass. A pass has 30 runs or more in every mode. The smallest thing that one of them can
leave behind, a message whose payload is kept, is an object, and takes about 1 kB with its tensor:
30 objects and 30 kB a pass, if only one message of each run is kept. What the allocator keeps of
healthy passes drifts by less, over enough passes: one case grew by 35 kB a pass until its 40th, and
by 4 kB from then on."""
Sample = Mapping[str, int]


def find_leaks(samples: Sequence[Sample]) -> list[str]:
    """What grows in the samples of one rank, which are those of its passes in order."""
    steady, found = samples[WARM_UP:], list[str]()
    for name in COUNTS:
        before, after = map(median, halves([sample[name] for sample in steady]))
        if after > before:
            found.append(f"{name} grew from {before:g} to {after:g} in {len(steady)} passes")
    for name, bound in BOUNDS.items():
        grown = growth([sample[name] for sample in steady])
        if grown > bound:
            found.append(f"{name} grew by {grown:.1f} a pass, more than {bound:g}")
    return found


def halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]


def growth(values: Sequence[float]) -> float:
    """Growth a pass that lasts: the smaller of those of both halves, so that memory which is taken
    once does not count."""
    return min(map(slope, halves(values)))


def slope(values: Sequence[float]) -> float:
    """The median slope of all pairs of values (Theil and Sen)."""
    pairs = combinations(enumerate(values), 2)
    return median((late - early) / (j - i) for (i, early), (j, late) in pairs)
