"""One request in the pipeline: the tree of its tokens that are not committed yet, the cells that
its nodes hold, and what is drafted for it, one microbatch at a time.

A node is a token at a position with a cell of its own. The path from the prompt to a node is the
text that the node's row reads. The tip is the node of the newest committed token: everything that
can still be right hangs below it.

The cells of a lane are the KV slots of one request, the same on every stage. Cell p is the home of
position p. Cells past the last position are spare: they hold branches whose home is taken. A free
cell is given to a later run only, and every stage runs in order, so an earlier reader has read
before it is written again.

The rules of a microbatch are those of the original (Butler et al. 2024, PipeInfer, and its code).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from magicdec.pipelined_speculation.messages import Candidates, Launch, Ranges, to_ranges
from magicdec.pipelined_speculation.options import NUM_CANDIDATES, Options

Ints = tuple[int, ...]


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

    def below(self) -> set[Node]:
        """This node and all that hangs on it."""
        nodes: set[Node] = set()
        waiting = [self]
        while waiting:
            node = waiting.pop()
            nodes.add(node)
            waiting += node.children
        return nodes


@dataclass
class Adjustment:
    """What `--pr` and `--pd` add to both thresholds: `it * pr - max(rejects * pd, 0)`."""

    options: Options
    num_launched: int = 0  # microbatches since the burst began: `it`
    rejects: int = 0  # attempts that drafted nothing since the last commit

    @property
    def value(self) -> float:
        return self.num_launched * self.options.pr - max(self.rejects * self.options.pd, 0.0)

    @property
    def may_draft(self) -> bool:
        return self.options.pa + self.value < 1.0


class Sequence:
    def __init__(
        self,
        request: int,
        prompt: Tokens[int],
        max_new_tokens: int,
        eos_ids: frozenset[int],
        options: Options,
    ) -> None:
        self.request, self.options = request, options
        self.lane = -1  # until a lane is free
        self.prompt, self.eos_ids, self.max_new_tokens = prompt, eos_ids, max_new_tokens
        # The last token of the output is never an input.
        self.num_positions = len(prompt) + max_new_tokens - 1
        self.cells = Cells(self.num_positions, options.spare_cells)
        self.cells.taken.update(range(len(prompt)))
        last = len(prompt) - 1
        self.tip = Node(prompt[last], last, None, cell=last, was_tip=True)  # committed last
        self.nodes = {self.tip}  # those that hold a cell
        self.prefix = last  # the committed cells below it are at home, cell p at position p
        self.moves: list[tuple[int, int]] = []  # of cells, for the next launch
        self.microbatch: Microbatch | None = None
        self.adjustment = Adjustment(options)
        self.is_stalled = False  # no attempt to draft can succeed before the next commit
        self.num_output = self.num_in_flight = 0
        self.least_margin = math.inf  # of the committed tokens

    def commit(self) -> tuple[tuple[int, ...], str | None]:
        """Commit all that the results tell: the tokens, and why the request has ended, if it has.
        Only the path from a row whose whole context is committed is followed."""
        tokens: list[int] = []
        finished = None
        while finished is None and (token := self.tip.predicted) is not None:
            tokens.append(token)
            self.least_margin = min(self.least_margin, self.tip.margin)
            self.num_output += 1
            drafted = [child for child in self.tip.children if child.token == token]
            self.tip = drafted[0] if drafted else self.tip.add(token)
            self.tip.was_tip = True
            if token in self.eos_ids:
                finished = "eos"
            elif self.num_output == self.max_new_tokens:
                finished = "length"
        if finished is not None:
            self._keep(set())
        elif tokens:
            self._begin_anew()
        return tuple(tokens), finished

    def _begin_anew(self) -> None:
        """After a commit: begin a burst of drafts, and give the newest token a cell."""
        self.adjustment, self.is_stalled = Adjustment(self.options), False
        self._keep(self.tip.below() | self.above())
        has_cell = self.tip.cell >= 0 or self._take_cell(self.tip)
        assert has_cell, "a tip that was not drafted finds its home free"
        self._settle()

    def above(self) -> set[Node]:
        """All that the tip hangs on: what rows that can still be right read."""
        return set(self.tip.ancestors())

    def frontier(self) -> Node:
        """Where the chain that hangs on the tip ends: at the end of its first branches."""
        node = self.tip
        while node.children:
            node = node.children[0]
        return node

    def _keep(self, needed: set[Node]) -> None:
        """Give back the cells of all other nodes, which cannot be right and which no row reads."""
        for node in self.nodes - needed:
            self.cells.give(node.cell)
        self.nodes &= needed

    def _settle(self) -> None:
        """Move the path that is committed and computed to its home cells, and forget its nodes."""
        above = self.above()
        copies = Counter(node.position for node in above)
        for node in sorted(above, key=lambda node: node.position):
            if node.run is None or not node.run.is_home or copies[node.position] > 1:
                break
            if node.position >= self.prefix:
                assert node.position == self.prefix, "the path has no holes"
                self._go_home(node)
                self.prefix += 1
            self.nodes.discard(node)
            for child in node.children:
                child.parent = None
            node.children = []

    def _go_home(self, node: Node) -> None:
        if node.cell == node.position:
            return
        home = self.cells.take(node.position)
        assert home == node.position, "no other node has this position"
        self.moves.append((node.cell, home))
        self.cells.give(node.cell)
        node.cell = home

    def _take_cell(self, node: Node) -> bool:
        cell = self.cells.take(node.position)
        if cell is None:
            return False
        node.cell = cell
        self.nodes.add(node)
        return True

    def needed_runs(self) -> set[Run]:
        """The runs that must not be skipped: those that a row which can still be right is part of
        or reads, through any number of other runs. The nodes that hold a cell are just these."""
        return {node.run for node in self.nodes if node.run is not None}

    def grow(self, leaf: Node, token: int) -> Node | None:
        """Append a drafted token to a leaf; `microbatch.Grow` says what is returned."""
        if leaf.was_tip and leaf.position + 1 == self.tip.position and token == self.tip.token:
            return self.tip  # its result came before its draft
        if token in self.eos_ids:
            leaf.ends = True  # unless another candidate continues it
            return None
        if not self.can_grow(leaf):
            return None
        child = Node(token, leaf.position + 1, leaf)
        if not self._take_cell(child):
            return None
        leaf.children.append(child)
        return child

    @property
    def may_grow(self) -> bool:
        """Whether there is something to draft after all that was drafted."""
        end = self.frontier()
        return not end.ends and self.can_grow(end)

    def can_grow(self, leaf: Node) -> bool:
        """Whether a token after the leaf can still be right and would be an input."""
        is_alive = leaf in self.nodes and leaf.position >= self.tip.position
        return is_alive and leaf.position + 1 < self.num_positions

    def open_branches(self) -> list[Branch]:
        """The branches of the microbatch that the next draft step may extend."""
        batch = self.microbatch
        if batch is None or batch.is_full:
            return []
        return [b for b in batch.branches if b.is_drafting and self.can_grow(b.leaf)]

    def take_drafted(self) -> list[Node]:
        """The rows of the microbatch that can still be right, which ends with this."""
        assert self.microbatch is not None
        rows = [n for n in self.microbatch.rows if n.run is None and n in self.nodes]
        self.microbatch = None
        return rows

    def launch_prompt(self, run: Run, first: int) -> Launch:
        """The message that runs the prompt from position `first` up to the run's only node."""
        (node,) = run.nodes
        node.run = run
        positions = tuple(range(first, node.position + 1))
        tokens = tuple(self.prompt[p] for p in positions)
        rows_before = tuple(range(-1, len(positions) - 1))
        context = to_ranges(first, ())
        return self._message(run, tokens, positions, positions, rows_before, context)

    def launch(self, run: Run) -> Launch:
        """The message that runs the nodes of `run`, which continue one path."""
        place = {node: row for row, node in enumerate(run.nodes)}
        for node in run.nodes:
            node.run = run
        (end,) = {node.parent for node in run.nodes if node.parent not in place}
        path = () if end is None else (end, *end.ancestors())
        return self._message(
            run,
            tuple(node.token for node in run.nodes),
            tuple(node.position for node in run.nodes),
            tuple(node.cell for node in run.nodes),
            tuple(-1 if node.parent is None else place.get(node.parent, -1) for node in run.nodes),
            to_ranges(self.prefix, (node.cell for node in path if node.position >= self.prefix)),
        )

    def _message(
        self,
        run: Run,
        tokens: Ints,
        positions: Ints,
        cells: Ints,
        parents: Ints,
        context: Ranges,
    ) -> Launch:
        moves, self.moves = tuple(self.moves), []
        self.num_in_flight += 1
        return Launch(
            run.run, self.request, self.lane, run.is_speculative, run.num_outputs,
            tokens, positions, cells, parents, context, moves,
        )  # fmt: skip


class Cells:
    def __init__(self, num_positions: int, num_spare: int) -> None:
        self.num_positions = num_positions
        self.taken: set[int] = set()  # homes
        self.spare = list(range(num_positions, num_positions + num_spare))

    def take(self, position: int) -> int | None:
        """The home of the position, or else a spare cell; None if there is none."""
        if position not in self.taken:
            self.taken.add(position)
            return position
        return heapq.heappop(self.spare) if self.spare else None

    def give(self, cell: int) -> None:
        """The cell is free again."""
        if cell < self.num_positions:
            self.taken.remove(cell)
        else:
            heapq.heappush(self.spare, cell)


Grow = Callable[[Node, int], Node | None]
"""Appends a token to a node. None if there is no cell or no place for it, or it cannot be right."""


@dataclass(eq=False)
class Branch:
    leaf: Node
    is_drafting: bool = True


@dataclass(eq=False)
class Microbatch:
    """A small tree of tokens that grows by one draft step at a time. Branch 0 takes the most
    probable token at every step."""

    branches: list[Branch]
    options: Options
    adjustment: float  # of both thresholds, when the microbatch began
    rows: list[Node] = field(default_factory=list)
    num_steps: int = 0
    was_refused: bool = False  # a branch stopped at the threshold `--pa`

    def extend(self, branches: Tokens[Branch], candidates: Tokens[Candidates], grow: Grow) -> None:
        """Take the candidates of one draft step for the branches that were asked for."""
        for branch, choices in zip(branches, candidates, strict=True):
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
