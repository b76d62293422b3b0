"""The CPU threads of ranks: their number is set, and measured in passes, so that compared passes
have the same resources."""

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
    """Compute with so many threads, and restore their number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RankThreads(NamedTuple):
    """The threads of one rank in one pass: configured, fewest and most; all 0 if it waits."""

    rank: int
    expected: int
    fewest: int
    most: int


class ThreadCount:
    """The measured threads of this rank in one pass; Python threads have their own numbers in
    OpenMP."""

    def __init__(self) -> None:
        self.measured: list[int] = []

    def note(self) -> None:
        self.measured += num_threads()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Measure at the begin and at the end of a computation."""
        self.note()
        yield
        self.note()

    def rank_threads(self, rank: int, expected: int) -> RankThreads:
        fewest = min(self.measured, default=0)
        most = max(self.measured, default=0)
        return RankThreads(rank, expected, fewest, most)


def num_threads() -> tuple[int, int]:
    """OpenMP's number, for native code, then PyTorch's, which sets OpenMP's when a thread first
    asks."""
    return openmp_threads()(), torch.get_num_threads()


@cache
def openmp_threads() -> Callable[[], int]:
    """OpenMP's function, or PyTorch's without an OpenMP runtime."""
    share_openmp()
    function: Callable[[], int] = getattr(
        ctypes.CDLL(None), "omp_get_max_threads", torch.get_num_threads
    )
    return function


def check_threads(name: str, ranks: Iterable[RankThreads]) -> list[int]:
    """The measured threads by rank. Raises AssertionError, naming pass and rank, if they differ
    from its config."""
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
