"""What attention reads in one step of a run: its drafts and its verification, or its decode
forward.

Owns which forwards these are, on one rank and in one layer. Must not know of backends or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.policies.policy import load_policy, make_policy
from magicdec.kv.view import FULL
from magicdec.kv.visible import Visible
from magicdec.memory.working_memory import max_tokens
from magicdec.model.config import ModelConfig
from magicdec.names import FULL_KV_POLICY

MOST_BYTES = 1 << 30  # of keys and values that a measurement makes


@dataclass(frozen=True)
class Read:
    """Forwards of a step that are alike: `times` a step, `num_new` tokens a row attend to what
    `policy` shows of `context` tokens, and to those of the sliding `window`, if there is one."""

    times: int
    num_new: int
    context: int
    policy: Visible
    window: int | None = None
    returns_weights: bool = False  # where the attention goes is asked too


@dataclass(frozen=True)
class Step:
    """`reads` of `rows` by one rank's heads; `name` says what they are."""

    name: str
    reads: tuple[Read, ...]
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_layers: int
    room: int  # tokens that rows may come to hold after the context


def target_step(config: ResolvedConfig, model: ModelConfig) -> Step:
    """Of the run's own strategy. A speculative run's baseline goes by the same backend, which is
    therefore the fastest for what the run is about, and perhaps not for the baseline."""
    d = config.decoding
    context = config.workload.prefix_len
    window = _window(config, model, context)
    ranks = len(config.parallel.rank_group)
    if d.strategy == "autoregressive":
        decode = Read(1, 1, context, FULL, window)
        return _make_step("a decode forward", (decode,), config, model, ranks)
    is_self = d.drafter == "self"
    num_new = d.most_draft_tokens + 1
    watches = is_self and load_policy(config.kv.policy).needs_weights
    verification = Read(1, num_new, context, FULL, window, watches)
    name = f"a verification of {num_new} tokens"
    if not is_self:
        return _make_step(name, (verification,), config, model, ranks)
    reads = (_drafts(config, model), verification)
    return _make_step(f"{_name_drafts(config)} and {name}", reads, config, model, ranks)


def draft_step(config: ResolvedConfig, model: ModelConfig) -> Step:
    """Of a standalone draft, with heads and ranks of its own."""
    assert config.draft is not None
    reads = (_drafts(config, model),)
    return _make_step(_name_drafts(config), reads, config, model, len(config.draft.rank_group))


def _drafts(config: ResolvedConfig, model: ModelConfig) -> Read:
    """Each as the first of a step; the few tokens that later ones see more are left out."""
    policy, times = make_policy(config.kv), config.decoding.num_draft_steps
    held, visible = policy.draft_reads(config.workload.prefix_len)
    # The cache of a draft that rolls is no longer than its window.
    rolls = config.draft is not None and policy.can_roll
    return Read(times, 1, held, visible, None if rolls else _window(config, model, held))


def _name_drafts(config: ResolvedConfig) -> str:
    kv = config.kv
    of = "" if kv.policy == FULL_KV_POLICY else f", budget {kv.budget}"
    return f"{config.decoding.num_draft_steps} drafts ({kv.policy}{of})"


def _window(config: ResolvedConfig, model: ModelConfig, held: int) -> int | None:
    """The model's, where rows that hold so many tokens after the prompt grow past it."""
    window = model.sliding_window
    longest = held + _room(config)
    return None if window is None or window >= longest else window


def _make_step(
    name: str, reads: tuple[Read, ...], config: ResolvedConfig, model: ModelConfig, num_ranks: int
) -> Step:
    """The run's own batch, with fewer rows where they would take too much memory."""
    dtype = getattr(torch, config.model.dtype)
    queries, keys = Shard(0, num_ranks).heads(model.num_heads, model.num_kv_heads)
    size, kv_heads = model.cached_head_dim, keys[1] - keys[0]
    room = _room(config)
    longest = max(read.context for read in reads) + room
    row_bytes = 2 * longest * kv_heads * size * dtype.itemsize
    rows = max(1, min(config.workload.batch_size, MOST_BYTES // row_bytes))
    num_heads = queries[1] - queries[0]
    return Step(name, reads, rows, num_heads, kv_heads, size, dtype, model.num_layers, room)


def _room(config: ResolvedConfig) -> int:
    return max_tokens(config) - config.workload.prefix_len
