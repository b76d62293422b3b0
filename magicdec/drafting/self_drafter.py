"""Self-speculation: the target, or a low-bit copy of its matrices, drafts for itself, reading only
what a KV policy shows of its context.

Costs no second prefill. With a policy that is a view it costs no KV memory either: draft tokens' K
and V land past the committed length, and verification overwrites them. Source: MagicDec (Chen et
al. 2024), section 4; TriForce (Sun et al. 2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.config.tree_shape import TreeShape
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import AcceptedPath, DraftKV, draft_chain
from magicdec.drafting.draft_tree import draft_tree
from magicdec.drafting.drafter import Drafter, DraftSetup
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.request import Request
from magicdec.sampling.model_tokens import Proposal


class SelfDrafter(Drafter):
    draft_kv: DraftKV

    def __init__(self, draft_kv: DraftKV, pa: float = 0.0) -> None:
        self.draft_kv, self.pa = draft_kv, pa
        self.watch, self.watch_queries = draft_kv.watch, draft_kv.watch_queries

    @classmethod
    def build(cls, setup: DraftSetup) -> SelfDrafter:
        kv = make_draft_kv(setup.runner.drafter, setup.kv)
        return cls(kv, setup.decoding.pa or 0.0)

    def admit(self, requests: Sequence[Request]) -> None:
        self.draft_kv.admit(requests)

    def prepare(self, requests: Sequence[Request], num_draft_tokens: int) -> int:
        self.draft_kv.prepare(requests, num_draft_tokens)
        return 1

    def propose(
        self,
        batch: DeviceBatch,
        num_draft_tokens: int,
        pending: int = 1,
        tree: TreeShape | None = None,
    ) -> Proposal:
        kv, rows = self.draft_kv, batch.rows
        kv.follow(rows, num_draft_tokens + 1)
        committed = kv.lengths(rows)
        newest, sampling = batch.newest[:, -1:], batch.sampling
        if tree is None:
            count = num_draft_tokens
            proposal = draft_chain(kv, rows, committed, newest, sampling, count, self.pa)
        else:
            vocab_size = kv.runner.model.config.vocab_size
            proposal = draft_tree(kv, rows, committed, newest, sampling, tree, vocab_size)
        kv.rewind(rows, committed)
        return proposal

    def commit(self, rows: BatchRows, lengths: Lengths, path: AcceptedPath | None = None) -> None:
        self.draft_kv.commit(rows, lengths, path)

    def release(self, rows: Sequence[int]) -> None:
        self.draft_kv.release(rows)
