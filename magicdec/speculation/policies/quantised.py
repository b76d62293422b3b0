"""Quantised: every token of the context, in a copy of the cache with fewer bits. The target's own
cache stays as it is, so that the output does.

Source: QuantSpec, arXiv 2502.10424, whose drafts read the upper 4 bits of an 8-bit cache and the
newest tokens unrounded. Here the copy is a cache of its own, in the codes of `--kv_dtype`, and the
newest tokens and the drafts' own are rounded too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from magicdec.config.sections import KVSection
from magicdec.kv.layout import POOL_DTYPES
from magicdec.kv.view import FULL
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.speculation.copied_kv import CopiedKV
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.policies.policy import KVPolicy


@dataclass(frozen=True)
class Quantised(KVPolicy):
    """A policy that shows every committed token, rounded to `kv_dtype`, one of `KV_DTYPES`."""

    settings: ClassVar[tuple[str, ...]] = ("draft_kv_dtype",)
    is_copied: ClassVar[bool] = True
    reads_codes: ClassVar[bool] = True
    needs_verification: ClassVar[bool] = True  # which computes what the copy is made of
    kv_dtype: str

    @classmethod
    def build(cls, kv: KVSection) -> Quantised:
        return cls(kv.draft_kv_dtype)

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return WholeCopy(runner, FULL, POOL_DTYPES[self.kv_dtype])

    def copied_tokens(self, context: int) -> int:
        return context

    @property
    def coded_copy(self) -> str | None:
        return self.kv_dtype


class WholeCopy(CopiedKV):
    """A copy of the whole context."""

    @property
    def row_tokens(self) -> int:
        return self.source.max_tokens

    def fill(self, requests: Sequence[Request]) -> None:
        self.catch_up(requests, 0)
