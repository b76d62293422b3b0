"""Grid: the single forwards that `magicdec latency` times. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import KVSection

# The parameters of KV policies that decide which budgets are possible or what a forward reads.
KV_FIELDS = ("num_sink_tokens", "window_size", "recent_window")


@dataclass(frozen=True)
class Grid:
    """Which forwards are timed, and how often. Every (B, context) has one decode forward, a verify
    forward for each T above 1, and draft forwards for each of `drafts`."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # cached tokens in each row
    new_tokens: tuple[int, ...]  # T of the decode forward (1) and of the verify forwards
    drafts: tuple[KVSection, ...]  # a KV policy and a budget each; budget -1: the whole cache
    repeats: int
    warmup: int
