"""CopiedKV: drafts read a copy of the context's K and V, in a cache of its own that follows the
target's.

Shapes: B rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, Rows
from magicdec.kv.view import Visible
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.speculation.draft_kv import DraftKV

NUMBERS_AT_ONCE = 1 << 20  # of the K, and as many of the V, that are copied together
# Most bytes of a number while it is copied: a slot of eight bytes, itself in float32, divided by
# its scale and rounded, and its codes.
COPYING_BYTES = 32


class CopiedKV(DraftKV):
    """A draft KV in a cache of its own, copied from `source`, which holds the whole context.

    It holds a policy's choice of the context up to some length, and all tokens that were committed
    since. Keys keep the rotation of their place in the context. `kv_dtype`: in which the copy is
    stored (None: as the source)."""

    def __init__(
        self, source: ModelRunner, visible: Visible, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(source, visible)
        self.source = source
        self.kv_dtype = kv_dtype
        self.shifts = [0] * source.num_rows  # `runner.offsets` on the host

    @property
    @abstractmethod
    def row_tokens(self) -> int:
        """Entries of a row of the copy: enough for any text, so that it never grows."""

    @abstractmethod
    def fill(self, requests: Sequence[Request]) -> None:
        """Copy what drafts read of `requests`, whose rows of the copy are empty."""

    @property
    def _offsets(self) -> Tensor:
        assert self.runner.offsets is not None, "a cache of its own has offsets"
        return self.runner.offsets

    def admit(self, requests: Sequence[Request]) -> None:
        if self.runner is self.source:
            self.runner = self.source.with_cache(self.row_tokens, self.kv_dtype)
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            self.runner.release(request.row)
            self.runner.allocate(request.row)
        self.fill(requests)

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        for request, text in zip(forks, texts, strict=True):
            assert request.row is not None and text.row is not None, "texts and forks have rows"
            row = request.row
            self._offsets[row] = self.shifts[row] = self.shifts[text.row]
            held = min(request.num_cached - self.shifts[row], self.runner.cache.lengths[text.row])
            self.runner.fork(row, text.row, held)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.runner.release(row)

    def prepare(self, requests: Sequence[Request], gamma: int) -> None:
        """Copy the tokens that `follow` would not."""
        self.catch_up(requests, gamma + 1)

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        """Copy what the rows of `requests` lack, where that is more than `most` tokens."""
        rows = [request.row for request in requests if request.row is not None]
        lengths = self.lengths(rows).bounds
        behind = [r.num_cached - n for r, n in zip(requests, lengths, strict=True)]
        # `follow` copies as many tokens of each row, and a row that is less far behind than others
        # may have no room for so many.
        for count in sorted({n for n in behind if n > most}):
            equal = [row for row, n in zip(rows, behind, strict=True) if n == count]
            batch = BatchRows.of(equal, self.source.device)
            chunk = self._tokens_at_once(len(equal))
            for start in range(0, count, chunk):
                self.follow(batch, min(chunk, count - start))

    def _tokens_at_once(self, num_rows: int) -> int:
        """Tokens of each row that are copied together."""
        shape = self.runner.cache.shape
        num_layers = len(self.source.windows.window_indices)
        numbers = num_rows * num_layers * shape.num_kv_heads * shape.head_dim
        return max(1, NUMBERS_AT_ONCE // numbers)

    def follow(self, rows: BatchRows, most: int) -> None:
        source = self.source.cache
        cache = self.runner.cache
        steps = torch.arange(most, device=self.source.device)
        num_held = cache.seq_lens[rows.index].unsqueeze(1)
        offsets = self._offsets[rows.index].unsqueeze(1)
        # Rows with fewer new tokens copy past their end too: rejected drafts, forgotten right
        # after.
        self.runner.caches.copy_from(
            self.source.caches, rows.index, num_held + offsets + steps, num_held + steps
        )
        cache.advance(rows, most)
        self.rewind(rows, source.lengths_of(rows))

    def lengths(self, rows: Rows) -> Lengths:
        rows = BatchRows.of(rows, self.source.device)
        return self._shifted(rows, self.runner.cache.lengths_of(rows), 1)

    def held(self, rows: Rows, committed: Lengths) -> Lengths:
        return self._shifted(BatchRows.of(rows, self.source.device), committed, -1)

    def _shifted(self, rows: BatchRows, lengths: Lengths, sign: int) -> Lengths:
        shifts = [sign * self.shifts[row] for row in rows.numbers]
        bounds = tuple(bound + n for bound, n in zip(lengths.bounds, shifts, strict=True))
        return Lengths(lengths.tensor.add(self._offsets[rows.index], alpha=sign), bounds)
