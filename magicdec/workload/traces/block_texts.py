"""Texts of prompts that a trace has only by the hash ids of their blocks: equal blocks are equal
text, and others differ. New blocks go on in the text of a dataset where the one before them ended,
so that a prompt reads as text, as far as its blocks have come in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

from magicdec.workload.traces.sessions import Blocks, ChatPrompt, Prompt

BlockText = tuple[int, ...]


class BlockTexts:
    """Makes prompts from `corpus`, the token ids of running text, in the order in which they are
    asked for. `bos`, if any, is the first token of every prompt, in place of its block's own; a
    block of a single token has no room for it."""

    def __init__(self, dataset: str, corpus: Sequence[int], seed: int, bos: int | None) -> None:
        self.dataset = dataset
        self.corpus = corpus
        self.bos = bos
        self._at = Random(f"trace {seed}").randrange(len(corpus)) if corpus else 0
        self._pieces = defaultdict[str, dict[int, BlockText]](dict)  # by namespace and hash id
        self._taken = defaultdict[str, set[BlockText]](set)
        self._firsts = set[BlockText]()  # of the first blocks of prompts, of all namespaces

    def ids_of(self, namespace: str, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of any prompt: its own, or those of its blocks."""
        assert not isinstance(prompt, ChatPrompt), "its tokens are known"
        return self.prompt(namespace, prompt) if isinstance(prompt, Blocks) else prompt.ids

    def prompt(self, namespace: str, blocks: Blocks) -> tuple[int, ...]:
        """The token ids. Raises ValueError if the text holds too few different blocks."""
        size = blocks.block_size
        pieces = self._pieces[namespace]
        ids = list[int]()
        for place, hash_id in enumerate(blocks.hash_ids):
            if hash_id not in pieces:
                pieces[hash_id] = self._new_piece(namespace, size, is_first=place == 0)
            ids += pieces[hash_id]
        ids += self._next(blocks.length - len(ids))
        del ids[blocks.length :]
        if self.bos is not None and (size > 1 or not blocks.hash_ids):
            ids[0] = self.bos
        return tuple(ids)

    def _new_piece(self, namespace: str, size: int, is_first: bool) -> BlockText:
        taken = self._taken[namespace]
        for _ in range(len(self.corpus)):
            piece = self._next(size)
            # BOS may take the place of the first token.
            own = piece[1:] if self.bos is not None and size > 1 else piece
            if own not in taken and not (is_first and own in self._firsts):
                taken.add(own)
                if is_first:
                    self._firsts.add(own)
                return piece
            self._at = (self._at + 1) % len(self.corpus)
        raise ValueError(
            f"--dataset {self.dataset} has too few different blocks of "
            f"{size} token{'s' * (size != 1)} for this trace, which needs more than {len(taken)}; "
            "choose a longer text or a larger --scale"
        )

    def _next(self, count: int) -> BlockText:
        """The next `count` tokens; the text begins again at its end."""
        found = list[int]()
        while len(found) < count:
            piece = self.corpus[self._at : self._at + count - len(found)]
            found += piece
            self._at = (self._at + len(piece)) % len(self.corpus)
        return tuple(found)
