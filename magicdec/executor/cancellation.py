"""How a forward learns between its layers that nobody needs it any more. Must not know why."""

from __future__ import annotations

from typing import Protocol


class Cancellation(Protocol):
    """Set once the int64 at `address` is `value` and the monotonic clock has reached the int64
    behind it, in ns. A native forward reads these two itself."""

    @property
    def address(self) -> int: ...

    @property
    def value(self) -> int: ...

    def is_set(self) -> bool: ...


class Cancelled(Exception):
    """A forward has ended after `num_layers` of its layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_layers = num_layers


def check(cancellation: Cancellation, num_layers: int) -> None:
    """Raises Cancelled if it is set, after so many layers."""
    if cancellation.is_set():
        raise Cancelled(num_layers)
