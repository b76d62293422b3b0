"""LayerViews: what the layers of a model see in one forward, where they have different windows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from magicdec.kv.cache import BatchRows
from magicdec.kv.view import KVView, Visible

MakeView = Callable[[Visible, int], KVView]
"""A function from a rule and the place of a window among the distinct ones to the view of a
forward."""


@dataclass(frozen=True)
class LayerWindows:
    """The windows of a runner's layers, the widest first; None is wider than any number.

    `window_indices`: the place of each layer's window among the `distinct` ones."""

    distinct: tuple[int | None, ...]
    window_indices: tuple[int, ...]

    @cached_property
    def num_layers(self) -> tuple[int, ...]:
        """The number of layers with each of the distinct windows."""
        return tuple(map(len, self.layers))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The layers with each of the distinct windows."""
        numbers = range(len(self.window_indices))
        places = range(len(self.distinct))
        return tuple(tuple(i for i in numbers if self.window_indices[i] == at) for at in places)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each layer among those with its window."""
        return tuple(self.layers[at].index(i) for i, at in enumerate(self.window_indices))

    @cached_property
    def in_c(self) -> ctypes.Array[ctypes.c_int64]:
        """`window_indices`, then `numbers`, for the native executor."""
        return (ctypes.c_int64 * (2 * len(self.window_indices)))(
            *self.window_indices, *self.numbers
        )

    @classmethod
    def make(cls, windows: Sequence[int | None], max_tokens: int) -> LayerWindows:
        """Of layers with these windows. A window that no text of `max_tokens` gets past is none."""
        used = [None if w is None or w >= max_tokens else w for w in windows]
        # Rows have a length also where no layer has keys.
        distinct = tuple(sorted(set(used), key=lambda window: -(window or math.inf))) or (None,)
        return cls(distinct, tuple(distinct.index(window) for window in used))

    @property
    def widest(self) -> int | None:
        return self.distinct[0]

    def is_narrow(self, layer: int) -> bool:
        """Whether other layers have a wider window."""
        return self.window_indices[layer] > 0

    def views(self, rule: Visible, make: MakeView) -> LayerViews:
        others = range(1, len(self.distinct))
        narrow = rule.in_narrow_layers() if others else rule
        views = (make(rule, 0), *(make(narrow, place) for place in others))
        return LayerViews(views, self)


@dataclass(frozen=True)
class LayerViews:
    """The views of one forward, one for each distinct window of the layers."""

    distinct: tuple[KVView, ...]
    windows: LayerWindows

    @property
    def widest(self) -> KVView:
        return self.distinct[0]

    @property
    def num_keys(self) -> int:
        """Keys that one KV head sees in all layers, summed over rows; new tokens included. On the
        host: bounds for captured rows."""
        pairs = zip(self.distinct, self.windows.num_layers, strict=True)
        return sum(n * (sum(v.num_visible) + v.num_new * len(v.rows)) for v, n in pairs)

    def reads(self, rows: BatchRows) -> Tensor:
        """Counts of a captured forward, int64 [B, 2]: a row's keys, and 1; zeros for ended rows.
        Keys of one layer if all have one window, else of all layers."""
        reads = self.widest.reads(rows)
        if len(self.distinct) == 1:
            return reads
        pairs = zip(self.distinct, self.windows.num_layers, strict=True)
        keys = sum(n * view.reads(rows)[:, 0] for view, n in pairs)
        reads = reads.clone()
        reads[:, 0] = keys
        return reads
