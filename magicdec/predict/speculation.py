"""The predicted speedup of speculative decoding, from the costs of forwards and an acceptance.
Imports no torch.

Two speedups: of decode steps, and net, from the end of prefill to the last token. What lies between
the two is the choice of a KV policy and a standalone draft's own prefill; allocation, top-k and
softmax are left out.
Source: MagicDec (Chen et al. 2024), section 3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.hardware.costs import Deployment, attention_flops, kv_bytes_per_token, slowest_shard
from magicdec.predict.curves import AcceptanceCurve, expected_tokens

CHUNK = 512  # prompt tokens of a prefill forward, the default of `--prefill_chunk`


@dataclass(frozen=True)
class SelectionCost:
    """What a KV policy does before the first draft. It scores all keys of a prompt by the queries
    of its newest `observed_tokens`, which prefill has kept; `is_copied`: it copies K and V of as
    many tokens as the budget. It runs the newest `rerun_tokens` once more."""

    observed_tokens: int = 0
    is_copied: bool = False
    rerun_tokens: int = 0

    def seconds(self, model: Deployment, budget: int, B: int, S: int) -> float:
        """The time of the choice for a draft by `model` that reads `budget` tokens of a row."""
        rerun = min(self.rerun_tokens, S)
        observed = min(self.observed_tokens, S)
        total = model.seconds(B, rerun, S - rerun) if rerun else 0.0
        if not observed:
            return total
        config = model.config
        h = model.hardware
        shard = slowest_shard(model.config, model.tp)
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
    chunks = ((start, min(CHUNK, S - start)) for start in range(0, S, CHUNK))
    return B * sum(model.seconds(1, size, start, num_logits=1) for start, size in chunks)


@dataclass(frozen=True)
class Prediction:
    """Predicted times in seconds: of one step, and of what comes before the first one (`begin_s`).
    `draft_s` is the sum of all gamma draft forwards. For gamma 0, fields that do not apply are
    None."""

    gamma: int
    budget: int | None
    decode_s: float
    draft_s: float | None
    verify_s: float | None
    tokens_per_step: float
    speedup: float  # tokens per second of steps, relative to autoregressive decoding
    begin_s: float = 0.0

    def net_speedup(self, gen_len: int) -> float:
        """The speedup from the end of prefill to the last token of an output of `gen_len` tokens,
        the first of which prefill emits."""
        baseline = (gen_len - 1) * self.decode_s
        return baseline / (self.begin_s + baseline / self.speedup) if baseline else 1.0

    @property
    def break_even_gen_len(self) -> int | None:
        """The smallest output length for which the net speedup is above 1; None if there is
        none."""
        saved = self.decode_s - self.decode_s / self.speedup  # for each token after the first
        return None if saved <= 0 else math.floor(self.begin_s / saved) + 2


@dataclass(frozen=True)
class SpeculationCost:
    """Speculative decoding with one KV budget. The draft (in self-speculation the target itself)
    reads at most `budget` committed tokens per row. The acceptance is the same at every context."""

    target: Deployment
    draft: Deployment
    budget: int
    acceptance: AcceptanceCurve
    choice: SelectionCost = SelectionCost()

    def begin_s(self, B: int, S: int) -> float:
        """The time between prefill and the first step."""
        is_self = self.draft.config is self.target.config
        own = 0.0 if is_self else prefill_seconds(self.draft, B, S)
        return own + self.choice.seconds(self.draft, self.budget, B, S)

    def predict(self, B: int, S: int, gamma: int) -> Prediction:
        """Decoding of B rows with S cached tokens each; gamma 0 is autoregressive decoding."""
        step = self.predict_step(B, S, gamma)
        return replace(step, begin_s=self.begin_s(B, S)) if gamma else step

    def predict_step(self, B: int, S: int, gamma: int) -> Prediction:
        """`predict` without what comes before the first step."""
        decode = self.target.seconds(B, 1, S)
        if gamma == 0:
            return Prediction(0, None, decode, None, None, 1.0, 1.0)
        # The k-th draft forward also sees the k - 1 draft tokens before it.
        draft = sum(self.draft.seconds(B, 1, min(S, self.budget) + k) for k in range(gamma))
        verify = self.target.seconds(B, gamma + 1, S)
        tokens = expected_tokens(self.acceptance, gamma)
        speedup = tokens * decode / (draft + verify)
        return Prediction(gamma, self.budget, decode, draft, verify, tokens, speedup)


def best_gamma(candidates: Sequence[SpeculationCost], B: int, S: int, max_gamma: int) -> Prediction:
    """The prediction with the fastest steps, over `candidates` (one per KV budget) and gamma 0 to
    `max_gamma`. Gamma is 0 if speculation is not faster than autoregressive decoding."""
    ways = [(candidates[0], 0)]
    ways += [(way, gamma) for way in candidates for gamma in range(1, max_gamma + 1)]
    way, gamma = max(ways, key=lambda w: w[0].predict_step(B, S, w[1]).speedup)
    return way.predict(B, S, gamma)


def break_even_context(
    candidates: Sequence[SpeculationCost], B: int, max_gamma: int, limit: int = 1 << 20
) -> int | None:
    """The fewest cached tokens per row from which on speculation is faster than autoregressive
    decoding; None if it is not at `limit`. It may be faster with fewer tokens too, below a range in
    which it is not: a low-bit draft gains least where it reads all of a full budget."""

    def pays(S: int) -> bool:
        gammas = range(1, max_gamma + 1)
        return any(way.predict_step(B, S, g).speedup > 1 for way in candidates for g in gammas)

    powers = (1 << n for n in range(limit.bit_length()))
    places = sorted({limit, *powers, *(min(way.budget, limit) for way in candidates)})
    low = max((S for S in places if not pays(S)), default=0)
    high = next((S for S in places if low < S), None)
    return high and low + 1 + bisect_left(range(low + 1, high), True, key=pays)
