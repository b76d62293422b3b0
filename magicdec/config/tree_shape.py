"""TreeShape: the shape of a tree of draft tokens, the same for all rows. Imports no torch.
Source: SpecInfer (Miao et al. 2024), section 3, token tree and expansion configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class TreeShape:
    """Node 0 is the newest token of a text, and nodes 1 to K are its K draft tokens, one level
    after the other. `parents` has the parent of each draft in order: draft k is node k + 1. The
    children of a node are ranked by their numbers; the drafter puts its best candidate first."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents and self.parents[0] == 0, "the first draft follows the newest token"
        assert list(self.parents) == sorted(self.parents), "one level after the other"
        assert all(parent <= k for k, parent in enumerate(self.parents)), "a parent comes first"

    @classmethod
    def of(cls, expansion: Sequence[int]) -> TreeShape:
        """Every node of level i has `expansion`[i] children; level 0 is the newest token."""
        parents: list[int] = []
        level = [0]
        for count in expansion:
            parents += [node for node in level for _ in range(count)]
            level = list(range(len(parents) + 1 - len(level) * count, len(parents) + 1))
        return cls(tuple(parents))

    @property
    def num_nodes(self) -> int:
        """The number of draft tokens."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of nodes 0 to K."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The largest number of drafts that a row can accept."""
        return self.depths[-1]

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, from that of node 0 to the deepest."""
        sizes = [self.depths.count(depth) for depth in range(self.depth + 1)]
        ends = accumulate(sizes)
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def num_expanded(self) -> int:
        """The number of nodes before the last level. Only these are computed by the draft."""
        return self.levels[-1].start

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of nodes 0 to K, in the order of their ranks."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents, 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each draft among the children of its parent."""
        return tuple(
            self.children[parent].index(node) for node, parent in enumerate(self.parents, 1)
        )

    @property
    def most_children(self) -> int:
        return max(map(len, self.children))

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """The ancestors of nodes 0 to K, with the node itself."""
        ancestors = [frozenset({0})]
        for node, parent in enumerate(self.parents, 1):
            ancestors.append(ancestors[parent] | {node})
        return tuple(ancestors)


def parse_expansion(text: str) -> tuple[int, ...]:
    """The children of each node by level, of an expansion configuration such as 3,2,1,1."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ValueError(
            f"--tree {text} is not known; give the children of each token by level, such as 3,2,1,1"
        )
    return counts
