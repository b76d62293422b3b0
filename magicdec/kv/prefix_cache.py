"""PrefixCache: which blocks of a KV cache hold the beginnings of texts, so that requests whose
texts begin alike share them: the turns of a conversation, or prompts with the same instructions.

Complete blocks are nodes of a tree, each below the block before it in the text. Tokens are compared
one by one, so that no two texts are taken for each other. Rows that read a node hold it; nodes
without rows stay until their blocks are needed, those that were used longest ago first. Sources:
RadixAttention (SGLang, arXiv 2312.07104, section 3); vLLM's automatic prefix caching. Imports no
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class TextBlock:
    """A complete block. Rows that hold it also hold those before it."""

    tokens: tuple[int, ...]
    block: int
    before: TextBlock | None
    after: dict[tuple[int, ...], TextBlock] = field(default_factory=dict)
    num_rows: int = 0


class PrefixCache:
    """The complete blocks of `block_size` tokens of texts that are, or were, in the rows of a
    cache. A row's path are the nodes that it holds, which are its first blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = TextBlock((), -1, None)
        self._paths: dict[int, list[TextBlock]] = {}  # by row
        # Nodes without rows, the one used longest ago first. Of two on a path the later comes
        # first, so that the first of all has none after it.
        self._idle: dict[TextBlock, None] = {}
        self._num_repeated = 0  # see `num_repeated`

    def __len__(self) -> int:
        """Blocks that no row holds."""
        return len(self._idle)

    def find(self, text: Sequence[int]) -> list[TextBlock]:
        """The longest path of a beginning of `text` that leaves at least one token of it, which has
        to be computed. Nobody holds it before `adopt`."""
        path = list[TextBlock]()
        node = self._root
        for at in range((len(text) - 1) // self.block_size):
            found = node.after.get(self._tokens(text, at))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def adopt(self, row: int, path: list[TextBlock]) -> None:
        """Give an empty row a path that was just found for it, which it holds until `leave`."""
        assert row not in self._paths, "a row leaves its text before another"
        self._paths[row] = [*path]
        self._hold(path)

    def num_repeated(self, leaving: Collection[int] = ()) -> int:
        """Blocks that are too many where those of each row are added up: a block counts for every
        row that holds it but one. Rows that are `leaving` do not count."""
        gone = Counter(node for row in leaving for node in self._paths.get(row, ()))
        no_more = (min(count, node.num_rows - 1) for node, count in gone.items())
        return self._num_repeated - sum(no_more)

    def keep(self, row: int, text: Sequence[int], blocks: Sequence[int]) -> None:
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

    def leave(self, row: int, text: Sequence[int], blocks: Sequence[int]) -> set[int]:
        """Let go of a row with the cached tokens `text`. Returns those of its `blocks` that stay
        here for other texts."""
        path = self._paths.pop(row, [])
        new = list[TextBlock]()
        node = path[-1] if path else self._root
        for at in range(len(path), len(text) // self.block_size):
            tokens = self._tokens(text, at)
            found = node.after.get(tokens)
            node = found if found is not None else self._add(node, tokens, blocks[at])
            new.append(node)
        self._hold(new)
        path += new
        for each in reversed(path):
            each.num_rows -= 1
            if each.num_rows:
                self._num_repeated -= 1
            else:
                self._idle[each] = None
        return {node.block for node in path} & set(blocks)

    def evict(self, count: int) -> list[int]:
        """Forget `count` nodes without rows, or all. Returns their blocks."""
        blocks = list[int]()
        while self._idle and len(blocks) < count:
            node = next(iter(self._idle))
            assert not node.after and node.before is not None, "what comes after it is idle too"
            del self._idle[node]
            del node.before.after[node.tokens]
            blocks.append(node.block)
        return blocks

    def _tokens(self, text: Sequence[int], at: int) -> tuple[int, ...]:
        return tuple(text[at * self.block_size : (at + 1) * self.block_size])

    def _add(self, before: TextBlock, tokens: tuple[int, ...], block: int) -> TextBlock:
        node = before.after[tokens] = TextBlock(tokens, block, before)
        return node

    def _hold(self, path: Sequence[TextBlock]) -> None:
        for node in path:
            self._idle.pop(node, None)
            self._num_repeated += node.num_rows > 0
            node.num_rows += 1
