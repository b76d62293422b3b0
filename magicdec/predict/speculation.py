"""The predicted speedup of speculative decoding, from costs of forwards and an acceptance
([MagicDec](https://arxiv.org/abs/2408.11049), section 3). Imports no torch.

The net speedup also counts the choice of a KV policy and a standalone draft's prefill; allocation,
top-k and softmax are left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.hardware.costs import Deployment, attention_flops, kv_bytes_per_token, slowest_shard
from magicdec.names import EVERY_TOKEN
from magicdec.predict.curves import (
    AcceptanceCurve,
    contexts_of,
    expected_tokens,
    known_gammas,
    tokens_interval,
)

CHUNK = 512  # prompt tokens of a prefill forward, the default of `--prefill_chunk`


@dataclass(frozen=True)
class SelectionCost:
    """The work of a KV policy before the first draft: it scores all keys by the queries of the
    prompt's newest `observed_tokens`, copies as many K and V as the budget if `is_copied`, and runs
    the newest `rerun_tokens` once more."""

    observed_tokens: int = 0
    is_copied: bool = False
    rerun_tokens: int = 0

    def seconds(self, model: Deployment, budget: int, B: int, S: int) -> float:
        """Seconds for drafts that read `budget` tokens a row."""
        rerun = min(self.rerun_tokens, S)
        observed = min(self.observed_tokens, S)
        total = model.seconds(B, rerun, S - rerun) if rerun else 0.0
        if not observed:
            return total
        config = model.config
        h = model.hardware
        shard = slowest_shard(model.config, model.tp)
        entry = kv_bytes_per_token(config, shard, model.dtype_bytes, model.kv_dtype)
        # Keys are half of an entry. Copied entries are read and written.
        num_bytes = B * (S * entry / 2 + 2 * min(budget, S) * entry * self.is_copied)
        # The products of queries and keys are half of what attention computes.
        flops = B * attention_flops(config, shard, observed, S - observed) / 2
        kv_rate = h.kv_bytes_per_s or h.read_bytes_per_s
        return total + max(num_bytes / kv_rate, flops / (h.attention_flops_per_s or h.flops_per_s))


def prefill_seconds(model: Deployment, B: int, S: int) -> float:
    """Seconds of prefill, prompt by prompt in chunks. Only a chunk's last token has logits."""
    chunks = ((start, min(CHUNK, S - start)) for start in range(0, S, CHUNK))
    return B * sum(model.seconds(1, size, start, num_logits=1) for start, size in chunks)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one step, and before the first (`begin_s`). `draft_s` is the sum of
    gamma forwards. Inapplicable fields are None for gamma 0; `speedup_interval` also where the
    acceptance has none."""

    gamma: int
    budget: int | None
    decode_s: float
    draft_s: float | None
    verify_s: float | None
    tokens_per_step: float
    speedup: float  # tokens per second of steps, relative to autoregressive decoding
    begin_s: float = 0.0
    speedup_interval: list[float] | None = None

    def net_speedup(self, gen_len: int, speedup: float | None = None) -> float:
        """The speedup from the end of prefill to the last of `gen_len` tokens, the first of which
        prefill emits, with steps of this `speedup` (None: the predicted one)."""
        baseline = (gen_len - 1) * self.decode_s
        steps_s = baseline / (self.speedup if speedup is None else speedup)
        return baseline / (self.begin_s + steps_s) if baseline else 1.0

    def net_speedup_interval(self, gen_len: int) -> list[float] | None:
        ends = self.speedup_interval
        return ends and [self.net_speedup(gen_len, end) for end in ends]

    @property
    def break_even_gen_len(self) -> int | None:
        """The smallest output length with a net speedup above 1, or None."""
        saved = self.decode_s - self.decode_s / self.speedup  # for each token after the first
        return None if saved <= 0 else math.floor(self.begin_s / saved) + 2


@dataclass(frozen=True)
class SpeculationCost:
    """Speculative decoding with one KV budget: the draft (in self-speculation the target) reads at
    most `budget` committed tokens per row, or all with a budget of EVERY_TOKEN."""

    target: Deployment
    draft: Deployment
    budget: int
    acceptance: AcceptanceCurve
    choice: SelectionCost = SelectionCost()

    def gammas(self, max_gamma: int) -> Sequence[int]:
        return known_gammas(self.acceptance, max_gamma)

    def begin_s(self, B: int, S: int) -> float:
        is_self = self.draft.config is self.target.config
        own = 0.0 if is_self else prefill_seconds(self.draft, B, S)
        return own + self.choice.seconds(self.draft, self.budget, B, S) + self._copy_s(B, S)

    def _copy_s(self, B: int, S: int) -> float:
        """Seconds in which every K and V is copied for drafts, read once and written in fewer
        bits."""
        if self.budget != EVERY_TOKEN:
            return 0.0
        shard = slowest_shard(self.target.config, self.target.tp)
        entries = [
            kv_bytes_per_token(model.config, shard, model.dtype_bytes, model.kv_dtype)
            for model in (self.target, self.draft)
        ]
        h = self.target.hardware
        return B * S * sum(entries) / (h.kv_bytes_per_s or h.read_bytes_per_s)

    def _reads(self, S: int) -> int:
        """Committed tokens of S that a draft reads."""
        return S if self.budget == EVERY_TOKEN else min(S, self.budget)

    def predict(self, B: int, S: int, gamma: int) -> Prediction:
        """Decoding of B rows with S cached tokens; gamma 0 is autoregressive."""
        step = self.predict_step(B, S, gamma)
        if not gamma:
            return step
        ends = tokens_interval(self.acceptance, gamma, S)
        # Of one gamma and place the speedup is a multiple of the tokens of a step.
        per_token = step.speedup / step.tokens_per_step
        return replace(
            step,
            begin_s=self.begin_s(B, S),
            speedup_interval=ends and [per_token * end for end in ends],
        )

    def predict_step(self, B: int, S: int, gamma: int) -> Prediction:
        decode = self.target.seconds(B, 1, S)
        if gamma == 0:
            return Prediction(0, None, decode, None, None, 1.0, 1.0)
        # The k-th draft forward also sees the k - 1 draft tokens before it.
        draft = sum(self.draft.seconds(B, 1, self._reads(S) + k) for k in range(gamma))
        verify = self.target.seconds(B, gamma + 1, S)
        tokens = expected_tokens(self.acceptance, gamma, S)
        speedup = tokens * decode / (draft + verify)
        return Prediction(gamma, self.budget, decode, draft, verify, tokens, speedup)


def best_gamma(candidates: Sequence[SpeculationCost], B: int, S: int, max_gamma: int) -> Prediction:
    """The prediction with the fastest steps, over `candidates` (one per KV budget) and gamma 0 to
    `max_gamma`."""
    ways = [(candidates[0], 0)]
    ways += [(way, gamma) for way in candidates for gamma in way.gammas(max_gamma)]
    way, gamma = max(ways, key=lambda w: w[0].predict_step(B, S, w[1]).speedup)
    return way.predict(B, S, gamma)


def break_even_context(
    candidates: Sequence[SpeculationCost], B: int, max_gamma: int, limit: int = 1 << 20
) -> int | None:
    """The fewest cached tokens per row from which on speculation is faster; None if it is not at
    `limit`. It may also pay below a range in which it does not: a low-bit draft gains least where
    it reads all of a full budget."""

    def pays(S: int) -> bool:
        gammas = ((way, gamma) for way in candidates for gamma in way.gammas(max_gamma))
        return any(way.predict_step(B, S, gamma).speedup > 1 for way, gamma in gammas)

    powers = (1 << n for n in range(limit.bit_length()))
    bends = {way.budget for way in candidates}
    bends |= {context for way in candidates for context in contexts_of(way.acceptance)}
    places = sorted({limit, *powers, *(S for S in bends if 0 < S < limit)})
    low = max((S for S in places if not pays(S)), default=0)
    high = next((S for S in places if low < S), None)
    return high and low + 1 + bisect_left(range(low + 1, high), True, key=pays)
