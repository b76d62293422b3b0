"""ForwardCounts: the reads of a model's forwards, from which the roofline is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor


@dataclass
class ForwardCounts:
    """The forwards of this rank's model so far, and their reads."""

    num_forwards: int = 0
    num_tokens: int = 0
    # Visible keys including new ones, summed over rows and forwards; where layers have different
    # windows, on average over the layers.
    kv_tokens_read: int = 0
    kv_bytes_read: int = 0  # bytes of these keys and their values
    draft_kv_tokens_read: int = 0  # the part of `kv_tokens_read` that draft forwards read
    experts_read: int = 0  # experts of all layers that a forward has read, summed over forwards
    draft_rows: int = 0  # rows of draft forwards, summed over forwards
    state_bytes: int = 0  # of states of linear attention that forwards have read
    bytes_per_token: int = field(default=0, compare=False)  # of a token's key and value, all layers
    copied_bytes_per_token: int = field(default=0, compare=False)  # the same in a copy of codes
    num_layers: int = field(default=1, compare=False)
    keys_on_device: int = field(default=1, compare=False)  # keys for which the device counts one
    # int64 [3, rows, 2]: what the device has counted of the target's forwards, of drafts, and of
    # drafts that read codes, which is not yet added to the counts: for each row of the cache, keys
    # and forwards.
    on_device: Tensor | None = field(default=None, compare=False)

    def count(
        self, num_forwards: int, num_tokens: int, keys: int, draft_rows: int, bytes_per_token: int
    ) -> None:
        """Add forwards that read `keys` keys with values, summed over layers, from a cache with so
        many bytes of a token. `draft_rows` is 0 unless they were drafts."""
        self.num_forwards += num_forwards
        self.num_tokens += num_tokens
        self.kv_tokens_read += keys // self.num_layers
        self.kv_bytes_read += keys * bytes_per_token // self.num_layers
        self.draft_kv_tokens_read += keys // self.num_layers if draft_rows else 0
        self.draft_rows += draft_rows

    def copy(self) -> ForwardCounts:
        """A copy of the current counts. Waits for the device."""
        if self.on_device is not None:
            (keys, _), (draft_keys, draft_rows), (codes, code_rows) = self.on_device.sum(1).tolist()
            one = self.keys_on_device
            self.count(0, 0, keys * one, 0, self.bytes_per_token)
            self.count(0, 0, draft_keys * one, draft_rows, self.bytes_per_token)
            self.count(0, 0, codes * one, code_rows, self.copied_bytes_per_token)
            self.on_device.zero_()
        return replace(self, on_device=None)

    def go_back(self, other: ForwardCounts) -> None:
        self.copy()  # sets the counts on the device to 0
        vars(self).update({name: getattr(other, name) for name in COUNTS})

    def minus(self, other: ForwardCounts) -> ForwardCounts:
        self.copy()
        return ForwardCounts(*(getattr(self, name) - getattr(other, name) for name in COUNTS))

    def plus(self, other: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(*(getattr(self, name) + getattr(other, name) for name in COUNTS))


COUNTS = tuple(field.name for field in fields(ForwardCounts) if field.compare)
