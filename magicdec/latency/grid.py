"""Grid: which single forwards `magicdec latency` times. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import KVSection

# The parameters of the policies that decide what fits a budget or what a forward reads.
KV_FIELDS = ("num_sink_tokens", "window_size", "recent_window")


@dataclass(frozen=True)
class Grid:
    """Which forwards are timed, and how often. Every (B, context) has a decode, a verify forward
    for each T above 1, and draft forwards for each of `drafts`."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # cached tokens a row
    new_tokens: tuple[int, ...]  # T of the decode (1) and of the verify forwards
    drafts: tuple[KVSection, ...]  # a policy and a budget each; budget -1: the whole cache
    repeats: int
    warmup: int
