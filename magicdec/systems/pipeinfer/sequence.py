"""One request in the pipeline: its uncommitted tokens and its microbatch, by the rules of PipeInfer
(arXiv 2407.11798, and its code) for one branch.

A node is a token at a position. The tip is the node of the newest committed token: everything that
can still be right follows it, and every stage has computed what comes before it. Later runs
overwrite wrong drafts; stages run in order, so earlier readers have read before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from magicdec.runner.request import NotFinite
from magicdec.systems.pipeinfer.messages import Candidate, RunLaunch
from magicdec.systems.pipeinfer.options import PIPELINE_WITH_DRAFT, Options


@dataclass(eq=False)
class LaunchedRun:
    """Rows that go through the stages together."""

    run: int
    request: int
    nodes: list[Node]
    num_outputs: int
    is_speculative: bool
    is_cancelled: bool = False
    num_drafted: int = 0  # draft tokens among the nodes
    first_draft: int = 0  # its position in the text
    num_accepted: int = 0  # of these, so far
    is_judged: bool = False  # whether its first draft was accepted or rejected


@dataclass(eq=False, slots=True)
class Node:
    token: int
    position: int
    run: LaunchedRun | None = None  # None: not launched
    predicted: int | None = None  # the target's next token, once the run is home
    margin: float = math.inf  # by how much its logit exceeds the second largest
    was_tip: bool = False
    ends: bool = False  # the drafter expects the end of the output after it, which is no input


@dataclass
class Adjustment:
    """The addition of `--pr` and `--pd` to the threshold: `it * pr - max(rejects * pd, 0)`."""

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
        self.request = request
        self.options = options
        self.lane = -1  # until a lane is free
        self.prompt = prompt
        self.eos_ids = eos_ids
        self.max_new_tokens = max_new_tokens
        # The last token of the output is never an input. Synchronous speculation drafts a whole
        # microbatch also where the output ends inside it, as speculation in a batch does.
        past_end = options.gamma if options.mode == PIPELINE_WITH_DRAFT else 0
        self.num_positions = len(prompt) + max_new_tokens - 1 + past_end
        last = len(prompt) - 1
        self.tip = Node(prompt[last], last, was_tip=True)  # committed last
        self.chain = [self.tip]  # the tip, and what was drafted after it
        self.microbatch: Microbatch | None = None
        self.adjustment = Adjustment(options)
        self.is_stalled = False  # no attempt to draft can succeed before the next commit
        self.num_output = self.num_in_flight = 0
        self.least_margin = math.inf  # of the committed tokens

    def commit(self) -> tuple[tuple[int, ...], str | None]:
        """Commit all that the results tell and drop wrong drafts. Returns the tokens, and why the
        request has ended, if it has. Raises NotFinite for logits that are not finite (a NaN
        margin)."""
        tokens: list[int] = []
        finished = None
        while finished is None and (token := self.tip.predicted) is not None:
            if math.isnan(self.tip.margin):
                raise NotFinite.after(self.request, self.num_output)
            tokens.append(token)
            self.least_margin = min(self.least_margin, self.tip.margin)
            self.num_output += 1
            self._move_tip(token)
            if token in self.eos_ids:
                finished = "eos"
            elif self.num_output == self.max_new_tokens:
                finished = "length"
        if finished is not None:
            self.chain = []
        elif tokens:  # a burst of drafts begins
            self.adjustment = Adjustment(self.options)
            self.is_stalled = False
        return tuple(tokens), finished

    def _move_tip(self, token: int) -> None:
        following = self.chain[1:]
        if not following or following[0].token != token:
            following = [Node(token, self.tip.position + 1)]
        self.chain = following
        self.tip = following[0]
        self.tip.was_tip = True

    def needed_runs(self) -> set[LaunchedRun]:
        """The runs that a row which can still be right is in or reads; they must not be skipped."""
        return {node.run for node in self.chain if node.run is not None}

    def begin_microbatch(self) -> None:
        threshold = self.options.pa + self.adjustment.value
        self.microbatch = Microbatch(self.chain[-1], self.options.gamma, threshold)

    def path(self) -> tuple[int, ...]:
        return tuple(node.token for node in self.chain[1:])

    def grow(self, leaf: Node, token: int) -> Node | None:
        """Append a drafted token to a leaf, as `Grow` says."""
        if leaf.was_tip and leaf.position + 1 == self.tip.position and token == self.tip.token:
            return self.tip  # its result came before its draft
        if token in self.eos_ids:
            leaf.ends = True
            return None
        if not self.can_grow(leaf):
            return None
        self.chain.append(Node(token, leaf.position + 1))
        return self.chain[-1]

    @property
    def may_grow(self) -> bool:
        """Whether there is something to draft after the last draft."""
        end = self.chain[-1]
        return not end.ends and self.can_grow(end)

    def can_grow(self, leaf: Node) -> bool:
        """Whether a token after the leaf can still be right and would be an input."""
        is_end = bool(self.chain) and self.chain[-1] is leaf
        return is_end and leaf.position + 1 < self.num_positions

    @property
    def is_drafting(self) -> bool:
        """Whether the next draft step may extend the microbatch."""
        batch = self.microbatch
        return batch is not None and not batch.is_full and self.can_grow(batch.leaf)

    def take_drafted(self) -> list[Node]:
        """End the microbatch; returns those of its rows that can still be right."""
        assert self.microbatch is not None
        rows = [n for n in self.microbatch.rows if n.run is None and n in self.chain]
        self.microbatch = None
        return rows

    def launch(self, run: LaunchedRun, first: int, tokens: Tokens[int]) -> RunLaunch:
        for node in run.nodes:
            node.run = run
        self.num_in_flight += 1
        return RunLaunch(
            run.run,
            self.request,
            self.lane,
            run.is_speculative,
            run.num_outputs,
            min(first, self.tip.position),
            first,
            tuple(tokens),
        )


Grow = Callable[[Node, int], Node | None]
"""Appends a token to a node. None if there is no place for it, or it cannot be right."""


@dataclass(eq=False)
class Microbatch:
    """Draft tokens up to `leaf`, from at most `gamma` draft steps, at least as probable as the
    `threshold`."""

    leaf: Node
    gamma: int
    threshold: float
    rows: list[Node] = field(default_factory=list)
    num_steps: int = 0
    is_full: bool = False
    was_refused: bool = False  # it stopped at the threshold

    def extend(self, candidate: Candidate | None, grow: Grow) -> None:
        self.num_steps += 1
        self.was_refused = candidate is None or candidate[1] < self.threshold
        node = None if candidate is None or self.was_refused else grow(self.leaf, candidate[0])
        self.is_full = node is None or self.num_steps >= self.gamma
        if node is not None:
            self.leaf = node
            if node.run is None:  # else it was committed and launched while it was drafted
                self.rows.append(node)
