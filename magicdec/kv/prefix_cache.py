"""PrefixCache: which blocks of a KV cache hold the beginnings of texts, so that requests whose
texts begin alike share them: the turns of a conversation, or prompts with the same instructions.

Complete blocks are nodes of a tree, each below the block before it in the text. Tokens are compared
one by one, so that no two texts are taken for each other. Rows that read a node hold it; nodes
without rows stay until their blocks are needed, those that were used longest ago first. What a text
has in common with a block that it cannot take as a whole is copied into a block of its own; for
this the last block of a text that has ended is a node too, though it is not complete. A node whose
block is needed may go to a place in host memory, and comes back to a block when a text begins with
it.

Where layers have states, a text can begin only where a snapshot of them was taken: at the ends of
prompts and of texts, and where a text leaves what others have. The cache knows which snapshot is
of which place; who has the states takes and loads them.

Sources: RadixAttention (SGLang, arXiv 2312.07104, section 3) and its cache of states; vLLM's
automatic prefix caching; partial reuse of TensorRT-LLM. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import ne

CachedText = Sequence[Hashable]
"""Token ids, or that from which each entry of a cache follows beside the entries before it."""

LEAST_COPIED = 16  # tokens; fewer are computed as fast as they are copied


@dataclass(eq=False)
class TextBlock:
    """A block, complete but for the last of a text. Rows that hold it also hold those before it."""

    tokens: tuple[Hashable, ...]
    block: int
    before: TextBlock | None
    after: dict[tuple[Hashable, ...], TextBlock] = field(default_factory=dict)
    num_rows: int = 0
    place: int | None = None  # in host memory; the node has no block then
    # Numbers of snapshots, by the count of its tokens after which they were taken.
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """What a cache has of the beginning of a text: the blocks of a path, which the text's row
    shares, and the first `num_copied` tokens of `source`, which it copies. `snapshot`: that of the
    layers' states there. `num_known`: tokens of the text whose K and V are here all the same, up to
    where a snapshot is worth taking."""

    path: Sequence[TextBlock] = ()
    source: TextBlock | None = None
    num_copied: int = 0
    snapshot: int | None = None
    num_known: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(node.tokens) for node in self.path) + self.num_copied

    @property
    def num_from_host(self) -> int:
        """Tokens that are in host memory."""
        away = sum(len(node.tokens) for node in self.path if node.place is not None)
        is_away = self.source is not None and self.source.place is not None
        return away + is_away * self.num_copied

    @property
    def keeps_block(self) -> bool:
        """Whether the source has a block that no row holds, and that must stay until the copy."""
        return self.source is not None and not self.source.num_rows and self.source.place is None

    def in_whole_blocks(self, block_size: int) -> Beginning:
        """With its source in the path, if that is a whole block."""
        if self.source is None or self.num_copied < block_size:
            return self
        return replace(self, path=[*self.path, self.source], source=None, num_copied=0)

    def num_needed(self, num_blocks: int) -> int:
        """Blocks that a row of `num_blocks` takes beside those that others hold."""
        num_idle = sum(not node.num_rows for node in self.path)
        return num_blocks - len(self.path) + num_idle

    def in_multiples_of(self, num_tokens: int) -> Beginning:
        """As many whole blocks of it as have a multiple of `num_tokens`, without a copy."""
        ends = accumulate(len(node.tokens) for node in self.path)
        whole = [number for number, end in enumerate(ends, 1) if end % num_tokens == 0]
        return Beginning(self.path[: max(whole, default=0)])

    def that_fits(self, num_free: int, num_blocks: int) -> Beginning:
        """What a row of `num_blocks` can take where `num_free` are free: without the copy if its
        source, which is there until then, needs one of them. States go with the copy."""
        if not self.keeps_block or self.num_needed(num_blocks) < num_free:
            return self
        if self.snapshot is not None:
            return Beginning(num_known=self.num_known)
        return replace(self, source=None, num_copied=0)


@dataclass(frozen=True)
class SnapshotRoom:
    """Room for `count` snapshots, and the fewest tokens of a text that are computed after one:
    those that are run again to observe attention, which needs the states before them."""

    count: int
    fewest_after: int = 1


class PrefixCache:
    """The complete blocks of `block_size` tokens of texts that are, or were, in the rows of a
    cache, of which `num_places` may be in host memory. A row's path are the nodes that it holds,
    which are its first blocks. With room for `snapshots` of layers' states, texts begin only where
    one was taken."""

    def __init__(
        self, block_size: int, num_places: int = 0, snapshots: SnapshotRoom | None = None
    ) -> None:
        self.block_size = block_size
        self.snapshots = snapshots
        self._free_snapshots = [] if snapshots is None else list(range(snapshots.count))
        # Where snapshots were taken, by number; the one used longest ago first.
        self._taken = dict[int, tuple[TextBlock, int]]()
        self._root = TextBlock((), -1, None)
        self._paths: dict[int, list[TextBlock]] = {}  # by row
        self._sources: dict[int, TextBlock] = {}  # by row, until they are copied
        # Nodes without rows, the one used longest ago first. Of two on a path the later comes
        # first, so that the first of all has none after it.
        self._idle: dict[TextBlock, None] = {}
        # Nodes in host memory that no row is about to read, in the order in which they went there.
        # What comes after a node has gone before it, so that the first of all has none after it.
        self._away: dict[TextBlock, None] = {}
        self._free_places = list(range(num_places))
        self._moved = list[tuple[int, int]]()  # see `take_moved`
        self._num_repeated = 0  # see `num_repeated`
        self._replaced = list[int]()  # see `take_replaced`

    def __len__(self) -> int:
        """Blocks that no row holds."""
        return len(self._idle)

    def find(self, text: CachedText) -> Beginning:
        """The longest beginning of `text` that leaves at least one token of it, which has to be
        computed. Nobody holds it before `adopt`."""
        if self.snapshots is not None:
            return self._find_snapshot(text, self.snapshots.fewest_after)
        path = self._find_path(text)
        node = path[-1] if path else self._root
        rest = self._tokens(text[:-1], len(path))
        source = None
        num_copied = LEAST_COPIED - 1
        for child in node.after.values():
            count = num_common(child.tokens, rest)
            if count > num_copied:
                source = child
                num_copied = count
        return Beginning(path) if source is None else Beginning(path, source, num_copied)

    def _find_path(self, text: CachedText) -> list[TextBlock]:
        """The blocks with which `text` begins, but its last token."""
        path = list[TextBlock]()
        node = self._root
        for at in range((len(text) - 1) // self.block_size):
            found = node.after.get(self._tokens(text, at))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def _find_snapshot(self, text: CachedText, num_after: int) -> Beginning:
        """As `find`, up to the last place of a snapshot that leaves `num_after` tokens."""
        path = self._find_path(text)
        usable = text[: max(0, len(text) - num_after)]
        num_known = len(path) * self.block_size
        for number in range(len(path), -1, -1):
            before = path[number - 1] if number else self._root
            rest = self._tokens(usable, number)
            best = Beginning(num_known=num_known)
            for child in before.after.values():
                if not child.snapshots:
                    continue
                count = num_common(child.tokens, rest)
                at = max((at for at in child.snapshots if at <= count), default=0)
                if at > best.num_copied:
                    best = Beginning(path[:number], child, at, child.snapshots[at], num_known)
            if best.source is not None:
                return best.in_whole_blocks(self.block_size)
        return Beginning(num_known=num_known)

    def adopt(self, row: int, beginning: Beginning) -> None:
        """Give an empty row what was just found for it. It holds the path until `leave`, and the
        source until `copied`."""
        assert row not in self._paths, "a row leaves its text before another"
        self._paths[row] = [*beginning.path]
        self._hold(beginning.path)
        if beginning.snapshot is not None:  # which is the last that another takes the place of
            self._taken[beginning.snapshot] = self._taken.pop(beginning.snapshot)
        if beginning.source is not None:
            self._sources[row] = beginning.source
            self._hold([beginning.source])

    def copied(self, row: int) -> None:
        """Let go of the source of `row`."""
        self._let_go(self._sources.pop(row))

    def num_repeated(self, leaving: Collection[int] = ()) -> int:
        """Blocks that are too many where those of each row are added up: a block counts for every
        row that holds it but one. Rows that are `leaving` do not count."""
        gone = Counter(node for row in leaving for node in self._paths.get(row, ()))
        no_more = (min(count, node.num_rows - 1) for node, count in gone.items())
        return self._num_repeated - sum(no_more)

    def keep(self, row: int, text: CachedText, blocks: Sequence[int]) -> None:
        """Let others find the `blocks` of `row` that `text`, its cached tokens, fills, up to the
        first that another row has computed too."""
        path = self._paths.setdefault(row, [])
        new = list[TextBlock]()
        node = path[-1] if path else self._root
        for at in range(len(path), len(text) // self.block_size):
            tokens = self._tokens(text, at)
            if tokens in node.after:
                break
            node = self._add(node, tokens, blocks[at])
            new.append(node)
        self._hold(new)
        path += new

    def leave(self, row: int, text: CachedText, blocks: Sequence[int]) -> set[int]:
        """Let go of a row with the cached tokens `text`. Returns those of its `blocks` that stay
        here for other texts."""
        path = self._paths.pop(row, [])
        new = list[TextBlock]()
        node = path[-1] if path else self._root
        for at in range(len(path), len(text) // self.block_size):
            tokens = self._tokens(text, at)
            found = node.after.get(tokens)
            node = found if found is not None else self._add(node, tokens, blocks[at])
            if node.place is not None:
                self.come_back(node, blocks[at])
            new.append(node)
        self._hold(new)
        path += new
        last = path[-1] if path else self._root
        rest = self._tokens(text, len(path))
        if rest and all(
            num_common(child.tokens, rest) < len(rest) for child in last.after.values()
        ):
            partial = self._add(last, rest, blocks[len(path)])
            self._hold([partial])
            path.append(partial)
        for held in reversed(path):
            self._let_go(held)
        return {node.block for node in path} & set(blocks)

    def take_snapshot(self, text: CachedText) -> int | None:
        """The number of a snapshot that has to be taken after `text`, in the place of that used
        longest ago if all are; None where the cache has no such text, or one there."""
        if not text or not (self._free_snapshots or self._taken):
            return None
        last = (len(text) - 1) // self.block_size
        path = self._find_path(text)
        if len(path) < last:
            return None
        node = path[-1] if path else self._root
        rest = self._tokens(text, last)
        nodes = [child for child in node.after.values() if child.tokens[: len(rest)] == rest]
        if not nodes or any(len(rest) in child.snapshots for child in nodes):
            return None
        return self._place(nodes[0], len(rest))

    def _place(self, node: TextBlock, at: int) -> int:
        if not self._free_snapshots:
            oldest = next(iter(self._taken))
            former, place = self._taken.pop(oldest)
            del former.snapshots[place]
            self._free_snapshots.append(oldest)
        number = self._free_snapshots.pop()
        self._taken[number] = node, at
        node.snapshots[at] = number
        return number

    def evict(self, count: int) -> list[int]:
        """Let `count` nodes without rows, or all, go to host memory, or forget them. Returns the
        blocks that they had."""
        blocks = list[int]()
        while self._idle and len(blocks) < count:
            node = next(iter(self._idle))
            blocks.append(node.block)
            self._go_away(node)
        return blocks

    def take_moved(self) -> list[tuple[int, int]]:
        """The blocks that have gone since this was asked last, each with its place in host memory,
        in the order in which they have to be copied there."""
        moved = self._moved
        self._moved = []
        return moved

    def come_back(self, node: TextBlock, block: int) -> None:
        """Give a node in host memory a block that has what it is of."""
        assert node.place is not None, "it is away"
        self._free_places.append(node.place)
        self._away.pop(node, None)
        node.block = block
        node.place = None

    def clear(self) -> list[int]:
        """Forget all nodes without rows. Returns their blocks."""
        for node in [*self._away]:
            self._forget(node)
        return [node.block for node in [*self._idle] if self._forget(node)]

    def take_replaced(self) -> list[int]:
        """The blocks of texts' ends that have gone on in other blocks since this was asked last.
        Nobody has them."""
        blocks = self._replaced
        self._replaced = []
        return blocks

    def _go_away(self, node: TextBlock) -> None:
        if not self._free_places and self._away:
            self._forget(next(iter(self._away)))
        if not self._free_places:
            self._forget(node)
            return
        del self._idle[node]
        node.place = self._free_places.pop()
        self._moved.append((node.block, node.place))
        self._away[node] = None

    def _forget(self, node: TextBlock) -> bool:
        """Forget a node without rows. Returns whether it had a block."""
        assert not node.after and node.before is not None, "what comes after it is idle too"
        del node.before.after[node.tokens]
        for number in node.snapshots.values():
            del self._taken[number]
            self._free_snapshots.append(number)
        if node.place is not None:
            del self._away[node]
            self._free_places.append(node.place)
            return False
        del self._idle[node]
        return True

    def _let_go(self, node: TextBlock) -> None:
        node.num_rows -= 1
        if node.num_rows:
            self._num_repeated -= 1
        else:
            (self._idle if node.place is None else self._away)[node] = None

    def _tokens(self, text: CachedText, at: int) -> tuple[Hashable, ...]:
        return tuple(text[at * self.block_size : (at + 1) * self.block_size])

    def _add(self, before: TextBlock, tokens: tuple[Hashable, ...], block: int) -> TextBlock:
        """A new node, in place of those that have only the beginning of its tokens."""
        shorter = [
            child for child in before.after.values() if tokens[: len(child.tokens)] == child.tokens
        ]
        node = TextBlock(tokens, block, before)
        for child in shorter:
            for at, number in child.snapshots.items():
                node.snapshots[at] = number
                self._taken[number] = node, at
            child.snapshots = {}
        self._replaced += [child.block for child in shorter if self._forget(child)]
        before.after[tokens] = node
        return node

    def _hold(self, path: Sequence[TextBlock]) -> None:
        for node in path:
            self._idle.pop(node, None)
            self._away.pop(node, None)
            self._num_repeated += node.num_rows > 0
            node.num_rows += 1


def num_common(one: CachedText, other: CachedText) -> int:
    """Tokens with which both begin."""
    differ = map(ne, one, other)
    return next((at for at, is_other in enumerate(differ) if is_other), min(len(one), len(other)))
