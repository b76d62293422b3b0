"""Threads that share loops (kernels/team.h): numbers are those of one thread, however late some of
the threads are."""

import ctypes
from functools import cache
from pathlib import Path

import pytest

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp

SOURCE = Path(__file__).with_name("team_on_trial.cpp")


@cache
def library():
    share_openmp()
    return load_library(SOURCE, ("-fopenmp",), (SHARED_HEADERS / "team.h",))


def try_team(threads, width, steps, loops, rounds, percent, longest_us):
    """How many of the rounds were wrong, and how many parts were computed again."""
    repeated = ctypes.c_int64()
    numbers = threads, width, steps, loops, rounds, 1, percent, longest_us
    call = library().try_team
    call.restype = ctypes.c_int64
    wrong = call(*map(ctypes.c_int64, numbers), ctypes.byref(repeated))
    return wrong, repeated.value


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_late_threads_change_no_number(threads, width):
    wrong, repeated = try_team(threads, width, 3, 8, 4, 2, 400)
    assert wrong == 0
    assert threads > 1 or repeated == 0


def test_parts_of_late_threads_are_computed_by_others():
    wrong, repeated = try_team(2, 16, 2, 10, 10, 4, 2000)
    assert wrong == 0
    assert repeated > 0


def test_threads_that_are_never_late_agree():
    wrong, _ = try_team(2, 100, 5, 100, 20, 0, 1)
    assert wrong == 0
