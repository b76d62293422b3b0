"""What the measuring code promises, and faults that break it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """The text occurs once in that file of the package; with the replacement it is wrong."""

    name: str
    file: str
    text: str
    replacement: str


@dataclass(frozen=True)
class Property:
    """`test` is the one of a file in a folder of `tests` (`test_x.py::test_y`) that fails with each
    of the faults."""

    name: str
    test: str
    faults: tuple[Fault, ...]
