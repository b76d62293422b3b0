"""Which blocks a prefix cache should lose first, on random traces in which a block is one token:

    python scripts/dev/simulate_evictions.py [--seeds N]

A row for each kind of trace, size of the cache and rule: the share of tokens found, and the cost of
what is prefilled again, with attention over what stands before it. Each number is the mean over
seeds; the last column is the cost as a share of that of `last used`, the rule of
`magicdec.kv.prefix_cache`, with the least and the largest of the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[2]))

from magicdec.kv import prefix_cache
from magicdec.kv.prefix_cache import PrefixCache, TextBlock

# Blocks of 256 tokens before a block at which attention costs as much as the weights' products: of
# Llama 3.1 8B, 4 * 32 layers * 4096 * tokens = 2 * 7.5e9.
EVEN = 112
TURNS = 600
SIZES = (0.1, 0.25, 0.5)  # of all distinct blocks of the turns


def cost(depth: int) -> float:
    """That of computing a block behind `depth` others, in blocks without attention."""
    return 1 + depth / EVEN


def depth_of(node: TextBlock) -> int:
    depth = -1
    while node.before is not None:
        node = node.before
        depth += 1
    return depth


class LastUsed(PrefixCache):
    """The rule as it is: the longest unused first, of a path the last block first."""

    def used(self, path: list[TextBlock]) -> None:
        """A request has read or made `path`."""


class Ranked(LastUsed):
    """The leaf with the lowest rank goes first; what has gone last raises the rank of what is used
    from then on (GreedyDual, Cao and Irani 1997)."""

    def __init__(self, gain: Callable[[int, int], float]) -> None:
        super().__init__(1)
        self.gain = gain
        self.level = 0.0
        self.uses: dict[TextBlock, int] = {}
        self.rank: dict[TextBlock, float] = {}

    def used(self, path: list[TextBlock]) -> None:
        for depth, node in enumerate(path):
            self.uses[node] = self.uses.get(node, 0) + 1
            self.rank[node] = self.level + self.gain(depth, self.uses[node])

    def evict(self, count: int) -> list[int]:
        blocks = list[int]()
        heap = [(self.rank[n], i, n) for i, n in enumerate(self._idle) if not n.after]
        heap.sort()
        tie = len(self._idle)
        while heap and len(blocks) < count:
            rank, _, node = heappop(heap)
            before = node.before
            self.level = max(self.level, rank)
            blocks.append(self._forget(node))
            del self.rank[node], self.uses[node]
            if before is not None and before in self._idle and not before.after:
                tie += 1
                heappush(heap, (self.rank[before], tie, before))
        return blocks


RULES: dict[str, Callable[[], LastUsed]] = {
    "last used": lambda: LastUsed(1),
    "last used, by cost": lambda: Ranked(lambda depth, uses: cost(depth)),
    "by uses and cost": lambda: Ranked(lambda depth, uses: uses * cost(depth)),
    "by uses": lambda: Ranked(lambda depth, uses: float(uses)),
}


@dataclass(frozen=True)
class Trace:
    """Sessions in flight, how they begin and grow, how long they last, and which share of requests
    are texts of their own that nobody goes on with."""

    num_sessions: int
    beginnings: tuple[int, int, int]  # how many kinds, of how many blocks
    turns: tuple[int, int]
    growth: tuple[int, int]
    lone: float = 0.0
    branches: float = 0.0

    def requests(self, random: Random) -> Iterator[list[int]]:
        """The texts that are asked, each with what it adds to one before."""
        number = 0

        def fresh() -> int:
            nonlocal number
            number += 1
            return number

        kinds, least, most = self.beginnings
        starts = [[fresh() for _ in range(random.randint(least, most))] for _ in range(kinds)]
        sessions = list[list[int]]()
        left = list[int]()
        for _ in range(TURNS):
            if random.random() < self.lone:
                yield [fresh() for _ in range(random.randint(20, 200))]
                continue
            if len(sessions) < self.num_sessions:
                sessions.append([*random.choice(starts)])
                left.append(random.randint(*self.turns))
            # Some sessions are asked often, and some seldom.
            place = min(random.randrange(len(sessions)), random.randrange(len(sessions)))
            text = sessions[place]
            if random.random() < self.branches:
                text = text[: random.randint(len(text) // 2, len(text))]
            asked = [*text, *(fresh() for _ in range(random.randint(*self.growth)))]
            yield asked
            if text is sessions[place]:
                sessions[place] = asked
            left[place] -= 1
            if not left[place]:
                del sessions[place], left[place]


TRACES = {
    "agents": Trace(24, (3, 10, 40), (5, 60), (1, 8)),
    "agents that branch": Trace(24, (3, 10, 40), (5, 60), (1, 8), branches=0.3),
    "agents and lone texts": Trace(24, (3, 10, 40), (5, 60), (1, 8), lone=0.3),
    "chats": Trace(120, (20, 1, 8), (2, 8), (1, 3)),
}


def simulate(requests: list[list[int]], cache: LastUsed, size: int) -> tuple[float, float]:
    """The share of blocks found, and the cost of the others."""
    num_blocks = num_found = 0
    total = 0.0
    for text in requests:
        found = cache.find(text)
        count = len(found.path)
        num_blocks += len(text)
        num_found += count
        total += sum(map(cost, range(count, len(text))))
        cache.adopt(0, found)
        held = len(cache) + count
        cache.evict(held + len(text) - count - size)
        cache.leave(0, text, range(len(text)))
        path = list[TextBlock]()
        node = cache._root
        for token in text:
            node = node.after[token,]
            path.append(node)
        cache.used(path)
    return num_found / num_blocks, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    prefix_cache.LEAST_COPIED = 1
    print(f"{'trace':24}{'size':>6}  {'rule':22}{'found':>7}{'cost':>10}  beside last used")
    for name, trace in TRACES.items():
        drawn = [list(trace.requests(Random(seed))) for seed in seeds]
        for share in SIZES:
            plain = list[float]()
            for rule, make in RULES.items():
                found = []
                for requests in drawn:
                    distinct = len({block for text in requests for block in text})
                    longest = max(len(text) for text in requests)
                    found.append(simulate(requests, make(), max(longest, int(share * distinct))))
                costs = [one for _, one in found]
                plain = plain or costs
                ratios = [one / own for one, own in zip(costs, plain, strict=True)]
                hits = mean(hit for hit, _ in found)
                spread = f"{mean(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
                print(f"{name:24}{share:6}  {rule:22}{hits:7.3f}{mean(costs):10.0f}  {spread}")


if __name__ == "__main__":
    main()
