"""The CPU threads that ranks compute with: setting their number, and measuring it where a pass
computes, so that passes that are compared have the same resources.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from magicdec.kernels.build import share_openmp


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Compute with so many threads; afterwards their number is what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RankThreads(NamedTuple):
    """The threads of one rank in one pass: what its config says, and the fewest and the most that
    were measured. All are 0 if the rank waits."""

    rank: int
    expected: int
    fewest: int
    most: int


class ThreadCount:
    """Measures the threads of this rank in one pass, where it computes. A rank may compute in
    several threads of Python; each of them has a number of its own in OpenMP."""

    def __init__(self) -> None:
        self.measured: list[int] = []

    def note(self) -> None:
        self.measured += num_threads()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Measure at the begin and at the end of something that computes."""
        self.note()
        yield
        self.note()

    def of_rank(self, rank: int, expected: int) -> RankThreads:
        fewest = min(self.measured, default=0)
        most = max(self.measured, default=0)
        return RankThreads(rank, expected, fewest, most)


def num_threads() -> tuple[int, int]:
    """The number that native code takes from OpenMP, then PyTorch's. PyTorch sets that of OpenMP
    when a thread of Python asks it first; before, it is that of the environment."""
    return openmp_threads()(), torch.get_num_threads()


@cache
def openmp_threads() -> Callable[[], int]:
    """OpenMP's function, or PyTorch's where no runtime of OpenMP is loaded."""
    share_openmp()
    function: Callable[[], int] = getattr(
        ctypes.CDLL(None), "omp_get_max_threads", torch.get_num_threads
    )
    return function


def check_threads(name: str, ranks: Iterable[RankThreads]) -> list[int]:
    """The measured threads in the pass of that name, in the order of ranks. Raises AssertionError,
    naming the pass, the rank and the numbers, if they are not what the rank's config says."""
    threads = []
    for rank, expected, fewest, most in sorted(ranks):
        if not fewest == expected == most:
            number = str(most) if fewest == most else f"{fewest} to {most}"
            raise AssertionError(
                f"{name}: rank {rank} computed with {number} threads, but its config says "
                f"{expected}"
            )
        threads.append(most)
    return threads
