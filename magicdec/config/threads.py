"""How many CPU threads each rank computes with. Imports no torch."""

from __future__ import annotations

from magicdec.config.machine import Machine


def choose_threads(value: int | None, machine: Machine) -> int:
    """By default the ranks of a host share its cores. Raises ValueError, naming the flag, if the
    ranks of this host would have more threads than it has cores. One thread for each rank is always
    allowed. Ranks of other hosts do not count."""
    num_ranks, cores = len(machine.local_ranks), machine.num_cpus
    most = max(1, cores // num_ranks)
    if value is not None and value > most:
        raise ValueError(
            f"--threads {value}: the {num_ranks} ranks of this host would have {value * num_ranks} "
            f"threads on {cores} cores; give at most {most} each"
        )
    return most if value is None else value
