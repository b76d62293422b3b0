"""Prompt lookup: the draft is what followed the longest earlier occurrence of the newest tokens, in
prompt or output. No model, no cache.

Source: Saxena 2023 (prompt lookup decoding); LLMA (Yang et al. 2023). Verification is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.drafter import Proposal
from magicdec.decoding.strategy import Setup
from magicdec.kv.device_rows import Lengths, Rows, upload
from magicdec.request import Batch

MAX_NGRAM = 8


class Lookup:
    """Where each n-gram of a growing sequence last ended, for n = 1 .. `max_ngram`."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        # Of each n-gram, the index of the token after its newest occurrence that has one.
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append; n-grams that end before each new token become findable."""
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.max_ngram, end) + 1):
                self._next[n - 1][tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """`count` tokens that followed the longest known suffix; they run on into the proposal
        itself where the sequence ends. The newest token again where nothing is known."""
        tokens = list(self.tokens)
        start = self._find()
        for i in range(count):
            tokens.append(tokens[-1] if start is None else tokens[start + i])
        return tokens[len(self.tokens) :]

    def _find(self) -> int | None:
        for n in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            found = self._next[n - 1].get(tuple(self.tokens[-n:]))
            if found is not None:
                return found
        return None


class NgramDrafter:
    watch = None
    draws = False
    reader = None
    can_replay = False  # looked up by the host

    def __init__(self, device: torch.device, max_ngram: int = MAX_NGRAM) -> None:
        self.device, self.max_ngram = device, max_ngram
        self.lookups: dict[int, Lookup] = {}

    @classmethod
    def build(cls, setup: Setup) -> NgramDrafter:
        return cls(setup.runner.device)

    def begin(self, batch: Batch) -> None:
        self.lookups = {r.request_id: Lookup(self.max_ngram) for r in batch.requests}
        for request in batch.requests:
            self.lookups[request.request_id].extend(request.prompt_ids)

    def prepare(self, batch: Batch, num_draft_tokens: int) -> None:
        """Nothing to prepare."""

    def propose(self, batch: Batch | DeviceBatch, num_draft_tokens: int) -> Proposal:
        drafts = []
        for request in batch.requests:
            lookup = self.lookups[request.request_id]
            known = len(lookup.tokens) - len(request.prompt_ids)
            lookup.extend(request.output_ids[known:])
            drafts.append(lookup.propose(num_draft_tokens))
        return Proposal(upload(drafts, self.device))

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """Requests say what was emitted."""
