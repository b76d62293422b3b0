"""Prompt lookup: finds the longest earlier occurrence of the newest tokens, in the prompt or the
output, and drafts the tokens that followed it. It needs no model and no cache.

Source: Saxena 2023 (prompt lookup decoding); LLMA (Yang et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magicdec.config.tree_shape import TreeShape
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import AcceptedPath
from magicdec.drafting.drafter import Drafter, DraftSetup
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.request import Request
from magicdec.sampling.model_tokens import Proposal

MAX_NGRAM = 8


class Lookup:
    """The place where each n-gram of a growing sequence last ended, for n = 1 to `max_ngram`."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        # For each n-gram, the index of the token after its newest occurrence, apart from an
        # occurrence at the end, which no token follows.
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`. The n-grams that end before each of them can be found from now on."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.max_ngram, end) + 1):
                self._next[n - 1][tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """The `count` tokens that followed the longest suffix which occurred before. If the
        sequence ends before that, they continue with the proposal's own first tokens. If no suffix
        occurred before, the newest token is repeated."""
        tokens = list(self.tokens)
        start = self._find(self.tokens[-self.max_ngram :])
        for i in range(count):
            tokens.append(tokens[-1] if start is None else tokens[start + i])
        return tokens[len(self.tokens) :]

    def following(self, path: Sequence[int]) -> int | None:
        """The token that followed the longest suffix of the sequence and `path` which occurred in
        the sequence; None if none did."""
        start = self._find([*self.tokens[-self.max_ngram :], *path])
        return None if start is None else self.tokens[start]

    def _find(self, end: Sequence[int]) -> int | None:
        """The place after the newest occurrence of the longest suffix of `end`."""
        for n in range(min(self.max_ngram, len(end)), 0, -1):
            start = self._next[n - 1].get(tuple(end[-n:]))
            if start is not None:
                return start
        return None


class NgramDrafter(Drafter):
    """The lookup is the host phase. It writes its result to a device tensor with one line for each
    row of the cache, from which `propose` reads."""

    has_probabilities = False

    def __init__(
        self, num_rows: int, most: int, device: torch.device, max_ngram: int = MAX_NGRAM
    ) -> None:
        self.max_ngram = max_ngram
        self.lookups: dict[int, Lookup] = {}  # by row
        self._found = torch.zeros(num_rows, most, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: DraftSetup) -> NgramDrafter:
        runner = setup.runner
        return cls(runner.num_rows, setup.decoding.most_draft_tokens, runner.device)

    def admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            self.lookups[request.row] = Lookup(self.max_ngram)
            self.lookups[request.row].extend(request.prompt_ids)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lookups.pop(row, None)

    def prepare(self, requests: Sequence[Request], num_draft_tokens: int) -> int:
        rows, proposals = [], []
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            lookup = self.lookups[request.row]
            lookup.extend(request.output_ids[len(lookup.tokens) - len(request.prompt_ids) :])
            rows.append(request.row)
            proposals.append(lookup.propose(num_draft_tokens))
        device = self._found.device
        self._found[:, :num_draft_tokens].index_copy_(
            0, upload(rows, device), upload(proposals, device)
        )
        return 1

    def propose(
        self,
        batch: DeviceBatch,
        num_draft_tokens: int,
        pending: int = 1,
        tree: TreeShape | None = None,
    ) -> Proposal:
        assert tree is None, "refused before"
        return Proposal(self._found[batch.rows.index, :num_draft_tokens])

    def commit(self, rows: BatchRows, lengths: Lengths, path: AcceptedPath | None = None) -> None:
        """Nothing to do: `prepare` reads the emitted tokens from the requests."""
