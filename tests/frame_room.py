"""Calls with room for the frames of what they call.

Since version 3.11, Python keeps frames in chunks of 16 KiB. A chunk is mapped when a frame does not
fit into the last one, and unmapped when that frame is done. A loop whose calls cross the end of a
chunk does so in each turn, which took up to half of a test's time. A chunk is as large as its first
frame needs, rounded up to a power of two. So the others find room behind a frame of more than a
MiB, which is never touched.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

Result = TypeVar("Result")
SLOTS = 140_000  # of 8 bytes; the chunk has 2 MiB


def _call(function: Callable[[], Result]) -> Result:
    return function()


_call_behind_room = FunctionType(_call.__code__.replace(co_stacksize=SLOTS), globals())


def call_with_room(function: Callable[[], Result]) -> Result:
    return _call_behind_room(function)  # type: ignore[no-any-return]
