"""Self-speculation: the target drafts for itself, reading only what a KV policy shows of its own
cache.

Costs no second prefill. With a policy that is a view it costs no KV memory either: draft tokens' K
and V land past the committed length, and verification overwrites them. Source: MagicDec (Chen et
al. 2024), section 4; TriForce (Sun et al. 2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magicdec.decoding.drafter import Proposal
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.strategy import Setup, choose, newest_tokens
from magicdec.request import Batch
from magicdec.runner import Watch


class SelfDrafter:
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

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        reader, rows = self.reader, batch.rows
        settled = reader.lengths(rows)
        drafts = [newest_tokens(batch, reader.runner.device)]
        for _ in range(num_draft_tokens):
            drafts.append(choose(reader.runner, reader.forward(drafts[-1], rows, settled)))
        reader.rewind(rows, settled)
        return Proposal(torch.cat(drafts, dim=1)[:, 1:])

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.reader.commit(rows, lengths)
