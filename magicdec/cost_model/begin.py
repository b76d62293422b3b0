"""The predicted cost of what a method does between prefill and its first decode step: the choice of
a KV policy, and a standalone draft's own prefill. Pure arithmetic: imports no torch, runs nothing.

B rows with prompts of S tokens. Allocation, top-k and softmax are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.cost_model.costs import (
    Deployment,
    attention_flops,
    kv_bytes_per_token,
    slowest_shard,
)

CHUNK = 512  # prompt tokens of a prefill forward, the default of `--prefill_chunk`


@dataclass(frozen=True)
class Choice:
    """What a KV policy does before the first draft. It scores all keys of a prompt by the queries
    of its newest `observed_tokens`, which prefill has kept; `is_copied`: it copies K and V of as
    many tokens as the budget. It runs the newest `rerun_tokens` once more."""

    observed_tokens: int = 0
    is_copied: bool = False
    rerun_tokens: int = 0

    def seconds(self, model: Deployment, budget: int, B: int, S: int) -> float:
        """The time of the choice for a draft by `model` that reads `budget` tokens of a row."""
        rerun, observed = min(self.rerun_tokens, S), min(self.observed_tokens, S)
        total = model.seconds(B, rerun, S - rerun) if rerun else 0.0
        if not observed:
            return total
        config, h, shard = model.config, model.hardware, slowest_shard(model.config, model.tp)
        entry = kv_bytes_per_token(config, shard, model.dtype_bytes)
        # Keys are half of an entry. Copied entries are read and written.
        num_bytes = B * (S * entry / 2 + 2 * min(budget, S) * entry * self.is_copied)
        # The products of queries and keys are half of what attention computes.
        flops = B * attention_flops(config, shard, observed, S - observed) / 2
        kv_rate = h.kv_bytes_per_s or h.read_bytes_per_s
        return total + max(num_bytes / kv_rate, flops / (h.attention_flops_per_s or h.flops_per_s))


def prefill_seconds(model: Deployment, B: int, S: int) -> float:
    """The time to take B prompts into the cache, one after the other and in chunks. Only the last
    token of a chunk has logits."""
    chunks = ((done, min(CHUNK, S - done)) for done in range(0, S, CHUNK))
    return B * sum(model.seconds(1, size, done, num_logits=1) for done, size in chunks)
