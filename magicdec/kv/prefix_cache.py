"""PrefixCache: which blocks of a KV cache hold the beginnings of texts, so that requests whose
texts begin alike share them: the turns of a conversation, or prompts with the same instructions.

Complete blocks are nodes of a tree, each below the block before it in the text. Tokens are compared
one by one, so that no two texts are taken for each other. Rows that read a node hold it; nodes
without rows stay until their blocks are needed, those that were used longest ago first. What a text
has in common with a block that it cannot take as a whole is copied into a block of its own; for
this the last block of a text that has ended is a node too, though it is not complete. A node whose
block is needed may go to a place in host memory, and comes back to a block when a text begins with
it. Sources:
RadixAttention (SGLang, arXiv 2312.07104, section 3); vLLM's automatic prefix caching; partial reuse
of TensorRT-LLM. Imports no torch.
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


@dataclass(frozen=True)
class Beginning:
    """What a cache has of the beginning of a text: the blocks of a path, which the text's row
    shares, and the first `num_copied` tokens of `source`, which it copies."""

    path: Sequence[TextBlock] = ()
    source: TextBlock | None = None
    num_copied: int = 0

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

    @property
    def num_idle(self) -> int:
        """Blocks of the path that no row holds."""
        return sum(not node.num_rows for node in self.path)

    def in_multiples_of(self, num_tokens: int) -> Beginning:
        """As many whole blocks of it as have a multiple of `num_tokens`, without a copy."""
        ends = accumulate(len(node.tokens) for node in self.path)
        whole = [number for number, end in enumerate(ends, 1) if end % num_tokens == 0]
        return Beginning(self.path[: max(whole, default=0)])

    def that_fits(self, num_spare: int) -> Beginning:
        """Without the copy if its source, which is there until then, needs a block that is not
        spare."""
        return replace(self, source=None, num_copied=0) if self.keeps_block > num_spare else self


class PrefixCache:
    """The complete blocks of `block_size` tokens of texts that are, or were, in the rows of a
    cache, of which `num_places` may be in host memory. A row's path are the nodes that it holds,
    which are its first blocks."""

    def __init__(self, block_size: int, num_places: int = 0) -> None:
        self.block_size = block_size
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
        path = list[TextBlock]()
        node = self._root
        for at in range((len(text) - 1) // self.block_size):
            found = node.after.get(self._tokens(text, at))
            if found is None:
                break
            path.append(found)
            node = found
        rest = self._tokens(text[:-1], len(path))
        source = None
        num_copied = LEAST_COPIED - 1
        for child in node.after.values():
            count = num_common(child.tokens, rest)
            if count > num_copied:
                source = child
                num_copied = count
        return Beginning(path) if source is None else Beginning(path, source, num_copied)

    def adopt(self, row: int, beginning: Beginning) -> None:
        """Give an empty row what was just found for it. It holds the path until `leave`, and the
        source until `copied`."""
        assert row not in self._paths, "a row leaves its text before another"
        self._paths[row] = [*beginning.path]
        self._hold(beginning.path)
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
        self._replaced += [child.block for child in shorter if self._forget(child)]
        node = before.after[tokens] = TextBlock(tokens, block, before)
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
