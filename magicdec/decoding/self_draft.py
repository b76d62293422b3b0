"""Self-speculation: the target drafts for itself, reading only what a KV policy shows of its own
cache.

Costs no second prefill and no KV memory: draft tokens' K and V land past the committed length, and
verification overwrites them. Source: MagicDec (Chen et al. 2024), section 4; TriForce (Sun et al.
2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.config import KVSection
from magicdec.decoding.strategy import choose
from magicdec.kv.policy import KVPolicy, make_policy
from magicdec.runner import ModelRunner


class SelfDrafter:
    def __init__(self, runner: ModelRunner, policy: KVPolicy) -> None:
        self.runner, self.policy = runner, policy

    @classmethod
    def build(cls, target: ModelRunner, kv: KVSection) -> SelfDrafter:
        return cls(target, make_policy(kv))

    def propose(self, last_ids: Tensor, rows: Sequence[int], num_draft_tokens: int) -> Tensor:
        committed = [self.runner.cache.lengths[row] for row in rows]
        ids, drafts = last_ids, []
        for _ in range(num_draft_tokens):
            logits = self.runner.forward(ids, rows, self.policy, committed)
            ids = choose(self.runner, logits)
            drafts.append(ids)
        self.runner.truncate(rows, committed)
        return torch.cat(drafts, dim=1)
