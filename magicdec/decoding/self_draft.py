"""Self-speculation: the target drafts for itself, reading only what a KV policy shows of its own
cache.

Costs no second prefill. With a policy that is a view it costs no KV memory either: draft tokens' K
and V land past the committed length, and verification overwrites them. Source: MagicDec (Chen et
al. 2024), section 4; TriForce (Sun et al. 2024), section 4.1.
"""

from __future__ import annotations

import torch

from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.drafter import Proposal, draw
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.strategy import Setup, choosing_of, newest_tokens
from magicdec.kv.device_rows import Lengths, Rows
from magicdec.request import Batch
from magicdec.runner import Watch


class SelfDrafter:
    draws = True
    can_replay = True

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @classmethod
    def build(cls, setup: Setup) -> SelfDrafter:
        return cls(make_reader(setup.runner, setup.kv))

    @property
    def watch(self) -> Watch | None:
        return self.reader.watch

    def begin(self, batch: Batch) -> None:
        self.reader.begin(batch)

    def prepare(self, batch: Batch, num_draft_tokens: int) -> None:
        self.reader.refresh(batch, num_draft_tokens, num_draft_tokens + 1)

    def propose(self, batch: Batch | DeviceBatch, num_draft_tokens: int) -> Proposal:
        reader, rows = self.reader, batch.rows
        if isinstance(batch, DeviceBatch):
            reader.follow(batch.rows, num_draft_tokens + 1)
        else:
            reader.refresh(batch, num_draft_tokens)
        settled = reader.lengths(rows)
        newest = newest_tokens(batch, reader.runner.device)
        choosing = choosing_of(reader.runner, batch)
        drafts, drawn_from = newest[:, 1:], []
        for _ in range(num_draft_tokens):
            logits = reader.forward(newest, rows, settled)
            newest, probs = draw(reader.runner, logits, choosing, drafts)
            drafts = torch.cat([drafts, newest], dim=1)
            drawn_from += [] if probs is None else [probs]
        reader.rewind(rows, settled)
        return Proposal(drafts, torch.cat(drawn_from, dim=1) if drawn_from else None)

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        self.reader.commit(rows, lengths)
