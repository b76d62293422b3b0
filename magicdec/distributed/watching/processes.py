"""The processes of all ranks, to name the one that has ended, and the line that a rank leaves to
its launcher when it ends.

Owns how the end of a rank is noticed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from magicdec.distributed.groups import Launch, exchange_texts

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun expects the error of a rank
STOPPED = "T"  # by a signal; a process that a debugger has stopped is in another state
NOTICE_S = 0.2  # until a process whose connection has closed is seen to have ended


class PeerLost(RuntimeError):
    """Another rank has ended, or is not heard of any more. One line, which names the rank."""


@dataclass(frozen=True)
class Processes:
    """`pids` are the processes of all ranks in their order, None for a rank of another host."""

    pids: tuple[int | None, ...] = ()

    def ended(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        pids = enumerate(self.pids)
        return [rank for rank, pid in pids if pid is not None and not is_alive(pid)]

    def stopped(self) -> list[int]:
        """The ranks of this host whose processes are stopped, by SIGSTOP for example."""
        pids = enumerate(self.pids)
        return [rank for rank, pid in pids if pid is not None and state_of(pid) == STOPPED]

    def check(self) -> None:
        """Raise PeerLost if the process of any rank has ended."""
        if ended := self.ended():
            raise PeerLost(describe(ended))

    def lost(self, peer: int, error: Exception) -> PeerLost:
        """What to raise when the connection with `peer` has failed. A rank that has ended is named
        rather than one that stopped because of it."""
        time.sleep(NOTICE_S)
        if ended := self.ended():
            return PeerLost(describe(ended))
        reason = str(error).strip().splitlines()[0]
        return PeerLost(f"the connection with rank {peer} is lost: {reason}")


@cache
def processes_of(launch: Launch) -> Processes:
    """Those of all ranks. All ranks must call it, and it returns when all have. It goes through the
    rendezvous store, so that it needs no process group; it is cached, because a rank keeps its
    process."""
    ours = processes_seen_here()
    texts = exchange_texts(launch, f"{os.getpid()} {ours}", "processes")
    pids = [text.partition(" ") for text in texts]
    return Processes(tuple(int(pid) if theirs == ours else None for pid, _, theirs in pids))


def processes_seen_here() -> str:
    """What ranks have in common that see each other's processes under the same numbers: the machine
    since its last boot, and the namespace of its processes, which each container may have of its
    own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def describe(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has ended" if len(ranks) == 1 else f"ranks {names} have ended"


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie process does not."""
    return state_of(pid) not in (None, "Z", "X")


def state_of(pid: int) -> str | None:
    """The letter for the state of a process, as proc(5) names them; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def report_error(line: str) -> bool:
    """Leave the line to the launcher of this rank, which prints it when all ranks have ended. False
    if there is no launcher that would."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError:
        return False
    return True
