"""The tokens of one request that are not committed yet, as a tree, and the newest committed ones.

A node is a token at a position with a cell of its own. The path from the prompt to a node is the
text that the node's row reads. `tip` is the node of the newest committed token: everything that
can still be right hangs below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Run:
    """Rows that go through the stages together."""

    run: int
    request: int
    nodes: list[Node]
    num_outputs: int
    is_speculative: bool
    is_cancelled: bool = False
    is_home: bool = False  # its result has come: every stage has computed or skipped it


@dataclass(eq=False, slots=True)
class Node:
    token: int
    position: int
    parent: Node | None
    cell: int = -1
    run: Run | None = None  # which writes the cell; None: not launched
    predicted: int | None = None  # the target's next token, once the run is home
    margin: float = math.inf  # by how much its logit exceeds the second largest
    children: list[Node] = field(default_factory=list)
    was_tip: bool = False
    ends: bool = False  # the drafter expects the end of the output after it, which is no input

    def add(self, token: int) -> Node:
        child = Node(token, self.position + 1, self)
        self.children.append(child)
        return child

    def path(self, after: int) -> tuple[int, ...]:
        """The tokens from the first position past `after` to this one."""
        tokens, node = [], self
        while node.position > after:
            tokens.append(node.token)
            assert node.parent is not None, "uncommitted tokens hang on committed ones"
            node = node.parent
        return tuple(reversed(tokens))

    def ancestors(self) -> Iterator[Node]:
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


class TokenTree:
    def __init__(self, tip: Node) -> None:
        self.tip = tip

    def commit(self, token: int) -> None:
        """Take over the token after the newest committed one. Its node becomes the tip. If it was
        not drafted it gets a node, which is to be launched."""
        drafted = [child for child in self.tip.children if child.token == token]
        self.tip = drafted[0] if drafted else self.tip.add(token)
        self.tip.was_tip = True

    def below(self) -> set[Node]:
        """The tip and all that hangs on it: what can still be right."""
        nodes: set[Node] = set()
        waiting = [self.tip]
        while waiting:
            node = waiting.pop()
            nodes.add(node)
            waiting += node.children
        return nodes

    def above(self) -> set[Node]:
        """All that the tip hangs on: what rows that can still be right read."""
        return set(self.tip.ancestors())

    def frontier(self) -> Node:
        """Where the chain that hangs on the tip ends: at the end of its first branches."""
        node = self.tip
        while node.children:
            node = node.children[0]
        return node
