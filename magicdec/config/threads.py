"""How many CPU threads each rank computes with, as `--threads` says it: one number for all ranks,
or one for each. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.config.machine import Machine

Threads = int | tuple[int, ...]
"""The number of each rank's threads, or that of each rank in the order of ranks."""


def parse_threads(text: str) -> Threads:
    """2, or 2,1,1."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"{text} is not known; choose a whole number, or one for each rank, such as 2,1,1"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def threads_of(threads: Threads, rank: int) -> int:
    return threads if isinstance(threads, int) else threads[rank]


def describe_threads(threads: Threads | Sequence[int]) -> str:
    """As a user writes it."""
    return str(threads) if isinstance(threads, int) else ",".join(map(str, threads))


def check_threads(threads: Threads | None, world_size: int) -> None:
    """Raises ValueError, naming the flag, if a rank has no thread, or if there are not as many
    numbers as ranks."""
    if threads is None:
        return
    numbers = threads if isinstance(threads, tuple) else (threads,) * world_size
    if len(numbers) != world_size or min(numbers) < 1:
        raise ValueError(
            f"--threads {describe_threads(threads)}: give one number for all {world_size} ranks, "
            f"or {world_size} numbers, each at least 1"
        )


def agreed_threads(value: Threads | None) -> str:
    """What all ranks must have been told alike: which rank has how many. One number, like the
    default, may differ between hosts."""
    return describe_threads(value) if isinstance(value, tuple) else "no number for each rank"


def choose_threads(value: Threads | None, machine: Machine) -> Threads:
    """By default the ranks of a host share its cores. Raises ValueError, naming the flag, if the
    ranks of this host would have more threads than it has cores. One thread for each rank is always
    allowed. Ranks of other hosts do not count."""
    ranks, cores = machine.local_ranks, machine.num_cpus
    most = max(1, cores // len(ranks))
    if value is None:
        return most
    total, limit = sum(threads_of(value, rank) for rank in ranks), max(cores, len(ranks))
    if total > limit:
        advice = f"{most} each" if isinstance(value, int) else f"{limit} in all"
        raise ValueError(
            f"--threads {describe_threads(value)}: the {len(ranks)} ranks of this host would have "
            f"{total} threads on {cores} cores; give at most {advice}"
        )
    return value if isinstance(value, int) or len(set(value)) > 1 else value[0]
