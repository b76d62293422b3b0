"""The share of the cores that another load took during a measurement, from /proc. Imports no torch.

A core counts as taken only if both hold: other programs computed (all CPU time without the run's),
and ready threads of the run waited. The run may wait for itself. Steal, which a hypervisor gives to
other machines, is taken from whoever runs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from magicdec.distributed.ranks import is_launched
from magicdec.records.environment import Environment

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LEAST_S = 1.0  # a shorter time has too few ticks of the kernel's clock to be judged
BUSY = 0.1  # the share of the run's cores from which the host is called busy
IDLE = (3, 4)  # of the numbers of a CPU in /proc/stat: idle, and idle until a disk answers
# steal; from GUESTS on, numbers are parts of those before
STOLEN = 7
GUESTS = 8


@dataclass(frozen=True)
class Reading:
    """Seconds that the kernel has counted until `at_s`; `waited_s` by thread, None if uncounted."""

    at_s: float
    computed_s: float  # by anyone, on the CPUs that this process may use
    stolen_s: float  # from these CPUs
    own_s: float  # by the processes of the command, on any CPU
    waited_s: Mapping[int, float] | None  # by their threads, in the run queue


@dataclass(frozen=True)
class OtherLoad:
    """The other load, as fields of `Environment`; None if unknown."""

    cores_others: float | None = None
    cores_stolen: float | None = None
    cores_waited: float | None = None
    cores_taken: float | None = None

    @classmethod
    def between(cls, before: Reading | None, after: Reading | None) -> OtherLoad:
        if before is None or after is None or after.at_s - before.at_s < LEAST_S:
            return cls()
        seconds = after.at_s - before.at_s
        own = max(0.0, after.own_s - before.own_s) / seconds
        computed = max(0.0, after.computed_s - before.computed_s) / seconds
        others = max(0.0, computed - own)
        stolen = (after.stolen_s - before.stolen_s) / seconds
        if before.waited_s is None or after.waited_s is None:
            return cls(others, stolen)
        began = before.waited_s
        waits = (max(0.0, s - began.get(thread, 0.0)) for thread, s in after.waited_s.items())
        waited = sum(waits) / seconds
        # Of the stolen time, the run would have had the share that it has of the rest.
        own_stolen = stolen * own / (own + others) if own else 0.0
        taken = min(others, waited) + own_stolen
        share = taken / (own + taken) if own else 0.0
        return cls(*(round(value, 4) for value in (others, stolen, waited, share)))

    @classmethod
    def worst_of(cls, loads: Sequence[OtherLoad]) -> OtherLoad:
        """The load of the measurement that it took most from, as far as is known."""
        return max(loads, key=OtherLoad._badness, default=cls())

    def _badness(self) -> tuple[float, float]:
        """Without a count of waits, what others computed may have been taken."""
        found = (
            -1.0 if cores is None else cores for cores in (self.cores_taken, self.cores_others)
        )
        taken, others = found
        return taken, others

    def add_to(self, environment: Environment) -> Environment:
        return replace(environment, **vars(self))


class LoadWatch:
    """The measurement of other load from `begin` to `end`, by the first rank of a host."""

    def __init__(self, is_watching: bool = True, root: Path = PROC) -> None:
        self.is_watching = is_watching
        self.root = root
        self._before: Reading | None = None
        self.found = OtherLoad()

    def begin(self) -> None:
        self._before = read_cores(self.root) if self.is_watching else None

    def end(self) -> None:
        after = read_cores(self.root) if self.is_watching else None
        self.found = OtherLoad.between(self._before, after)

    def add_to(self, environment: Environment) -> Environment:
        return self.found.add_to(environment)


def read_cores(
    root: Path = PROC, top: int | None = None, cpus: Collection[int] | None = None
) -> Reading | None:
    """A reading now, None where the kernel does not count. `top` is the process above all of the
    command, `cpus` those that it may use."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    names = {f"cpu{cpu}" for cpu in cpus}
    try:
        lines = (root / "stat").read_text().splitlines()
        counts = [
            [int(n) for n in fields[1:]] for line in lines if (fields := line.split())[0] in names
        ]
    except (OSError, ValueError, IndexError):
        return None
    total = sum(sum(count[:GUESTS]) for count in counts)
    if total == 0 or any(len(count) <= STOLEN for count in counts):
        return None
    stolen = sum(count[STOLEN] for count in counts)
    idle = sum(count[index] for count in counts for index in IDLE)
    family = dict(_family(root, _top() if top is None else top))
    return Reading(
        time.monotonic(),
        (total - idle - stolen) / TICKS_PER_S,
        stolen / TICKS_PER_S,
        sum(family.values()),
        _waits(root, family),
    )


def _top() -> int:
    """The process above all of this command: ranks and a gate's processes have siblings."""
    has_siblings = is_launched() or multiprocessing.parent_process() is not None
    return os.getppid() if has_siblings else os.getpid()


def _family(root: Path, top: int) -> Iterator[tuple[int, float]]:
    """The processes from `top` down, with CPU seconds including ended children. A host has hundreds
    of processes, and paths as objects take longer than the kernel does."""
    children = defaultdict[int, list[int]](list)
    seconds = dict[int, float]()
    for entry in os.scandir(root):
        if not entry.name.isdigit():
            continue
        # It may just have ended.
        with suppress(OSError, ValueError, IndexError), FileIO(f"{entry.path}/stat") as file:
            after_name = file.readall().rpartition(b")")[2].split()
            pid = int(entry.name)
            children[int(after_name[1])].append(pid)
            seconds[pid] = sum(map(int, after_name[11:15])) / TICKS_PER_S
    left = [top]
    while left:
        pid = left.pop()
        yield pid, seconds.get(pid, 0.0)
        left += children[pid]


def _waits(root: Path, pids: Collection[int]) -> dict[int, float] | None:
    """Seconds that each thread of these processes was ready and waited for a core."""
    waits = dict[int, float]()
    for pid in pids:
        for path in (root / str(pid) / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                waits[int(path.parent.name)] = int(path.read_text().split()[1]) / 1e9
    return waits or None


def is_busy(cores_taken: Any) -> bool:
    return isinstance(cores_taken, float | int) and cores_taken >= BUSY


def load_text(cores_taken: Sequence[float | None], what: str, names: Sequence[str] = ()) -> str:
    """Says in one line that another load took cores, empty if it did not. `what` names the
    measurements together, and `names` each of them."""
    busy = {at: share for at, share in enumerate(cores_taken) if share and is_busy(share)}
    if not busy:
        return ""
    cores = ", ".join(f"{names[at]} {share:.0%}" for at, share in busy.items() if names)
    share_text = f"{len(busy)} of {len(cores_taken)} {what}{f' ({cores})' if cores else ''}: "
    most = "" if len(busy) == 1 else "up to "
    return (
        f"{share_text if len(cores_taken) > 1 else ''}another load took {most}"
        f"{max(busy.values()):.0%} of the cores meanwhile, so times and speedups may be "
        "off; measure again when nothing else runs"
    )


def busy_share(cores_taken: float | None) -> str:
    """The share of the cores that another load took, empty if the host was not busy."""
    return f"{cores_taken:.0%}" if is_busy(cores_taken) else ""


def warn_of_load(environments: Sequence[Environment], what: str) -> None:
    """Warns in one line if another load took cores. `what` names the measurements."""
    text = load_text([environment.cores_taken for environment in environments], what)
    if text:
        print(f"warning: {text}", file=sys.stderr, flush=True)
