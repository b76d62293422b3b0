"""Reader: what a drafting model reads of its context, and where its own tokens go meanwhile.

Owns the meeting of a draft forward with a KV policy. Must not know which tokens are drafted nor
why. A policy names its reader: most are views of the model's own cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.device_rows import DeviceRows, Lengths, Rows
from magicdec.kv.policy import make_policy
from magicdec.names import DRAFT_READERS, load_named
from magicdec.request import Batch
from magicdec.runner import ModelRunner, Watch


class Reader(Protocol):
    """Speaks in tokens of the context, wherever their K and V are kept."""

    runner: ModelRunner

    @property
    def memory(self) -> Tensor | None:
        """What verifications leave for drafts to come, beside the caches; None: nothing."""
        ...

    @property
    def watch(self) -> Watch | None:
        """Told where the attention of each verification went; None where that is no concern."""
        ...

    @classmethod
    def build(cls, runner: ModelRunner, policy: Any, kv_dtype: torch.dtype | None) -> Reader:
        """`kv_dtype` is of a cache that the reader keeps beside the runner's; None: as that."""
        ...

    def begin(self, batch: Batch) -> None:
        """The prompts of `batch` stand in the runner's cache."""
        ...

    def refresh(self, batch: Batch, num_draft_tokens: int, most_behind: int = 0) -> None:
        """So many tokens are about to be drafted for `batch`: time to choose anew, and to take over
        what the target has settled since, if that is more than `most_behind` tokens of a row."""
        ...

    def follow(self, rows: DeviceRows, most: int) -> None:
        """Take over what the target has settled of `rows` since, at most `most` tokens of each."""
        ...

    def lengths(self, rows: Rows) -> Lengths:
        """Tokens of context that the next forward builds on, a number a row."""
        ...

    def forward(self, token_ids: Tensor, rows: Rows, settled: Lengths) -> Tensor:
        """This rank's logits [B, T, V] of token_ids [B, T], appended to `rows`; the policy chooses
        among the first `settled` tokens of each, and all that follow are read. `settled` is one
        object for all forwards between two verifications."""
        ...

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        """Forget what `rows` hold past `lengths` tokens of context."""
        ...

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """The target holds `lengths` settled tokens of `rows` after a verification."""
        ...


def make_reader(runner: ModelRunner, kv: KVSection) -> Reader:
    """The reader of the policy that a run's KV section names."""
    policy = make_policy(kv)
    build = load_named(DRAFT_READERS, policy.reader).build
    reader: Reader = build(runner, policy, torch.int8 if kv.draft_kv_dtype == "int8" else None)
    return reader


def standalone_kv_dtype(kv: KVSection) -> torch.dtype | None:
    """Of a standalone draft's cache; None: as its weights. Where the reader keeps one of its own,
    that is what drafts read, and the draft's holds the whole context to choose from."""
    is_copied = make_policy(kv).reader == "gathered"
    return torch.int8 if kv.draft_kv_dtype == "int8" and not is_copied else None
