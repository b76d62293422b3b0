"""A microbatch while it is drafted: a small tree of tokens, which grows by one draft step at a
time. The rules are those of the original (Butler et al. 2024, PipeInfer, and its code).

Must not know when a microbatch begins, and how its rows are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from magicdec.pipelined_speculation.messages import Candidates
from magicdec.pipelined_speculation.options import NUM_CANDIDATES, Options
from magicdec.pipelined_speculation.token_tree import Node

Grow = Callable[[Node, int], Node | None]
"""Appends a token to a node. None if there is no cell or no place for it, or it cannot be right."""


@dataclass(eq=False)
class Branch:
    leaf: Node
    is_drafting: bool = True


@dataclass(eq=False)
class Microbatch:
    """Branch 0 takes the most probable token at every step."""

    branches: list[Branch]
    options: Options
    adjustment: float  # of both thresholds, when the microbatch began
    rows: list[Node] = field(default_factory=list)
    num_steps: int = 0
    was_refused: bool = False  # a branch stopped at the threshold `--pa`

    def extend(self, asked: Sequence[Branch], candidates: Sequence[Candidates], grow: Grow) -> None:
        """Take the candidates of one draft step for the branches that were asked for."""
        for branch, choices in zip(asked, candidates, strict=True):
            choices = choices[:NUM_CANDIDATES]
            if not choices or choices[0][1] < self.options.pa + self.adjustment:
                branch.is_drafting, self.was_refused = False, True
                continue
            leaf = branch.leaf
            targets = [branch, *self._split(leaf, choices)]
            for target, (token, _) in zip(targets, choices, strict=False):
                self._append(target, grow(leaf, token))
        self.num_steps += 1

    def _split(self, leaf: Node, choices: Candidates) -> list[Branch]:
        """New branches from this place, for the second, third, ... candidate."""
        opened: list[Branch] = []
        for _, probability in choices[1:]:
            is_full = len(self.branches) >= self.options.np
            if is_full or probability <= self.options.ps + self.adjustment:
                break
            opened.append(Branch(leaf))
            self.branches.append(opened[-1])
        return opened

    def _append(self, branch: Branch, node: Node | None) -> None:
        if node is None:
            branch.is_drafting = False
            return
        branch.leaf = node
        if node.run is None:  # else it was committed and launched while it was drafted
            self.rows.append(node)
        if len(self.rows) > self.options.gamma:
            branch.is_drafting = False

    @property
    def is_full(self) -> bool:
        return self.num_steps >= self.options.gamma or len(self.rows) > self.options.gamma
