"""The processes of all ranks: which have ended or stopped, and the line that this one leaves to its
launcher."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from magicdec.distributed.groups import Launch, exchange_texts

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun expects the error of a rank
STOPPED = "T"  # by a signal; a process that a debugger has stopped is in another state
NOTICE_S = 0.2  # until a process whose connection has closed is seen to have ended


class PeerLost(RuntimeError):
    """The loss of another rank, which has ended or is silent. Its one line names the rank."""


@dataclass(frozen=True)
class Processes:
    """The processes of all ranks in order, None for a rank of another host."""

    pids: tuple[int | None, ...] = ()

    def ended(self) -> list[int]:
        pids = enumerate(self.pids)
        return [rank for rank, pid in pids if pid is not None and not is_alive(pid)]

    def stopped(self) -> list[int]:
        """The ranks of this host stopped by a signal, such as SIGSTOP."""
        pids = enumerate(self.pids)
        return [rank for rank, pid in pids if pid is not None and state_of(pid) == STOPPED]

    def check(self) -> None:
        """Raises PeerLost if the process of any rank has ended."""
        if ended := self.ended():
            raise PeerLost(describe(ended))

    def lost(self, peer: int, error: Exception) -> PeerLost:
        """The error for a lost connection with `peer`: names a rank that has ended, if there is
        one."""
        time.sleep(NOTICE_S)
        if ended := self.ended():
            return PeerLost(describe(ended))
        reason = str(error).strip().splitlines()[0]
        return PeerLost(f"the connection with rank {peer} is lost: {reason}")


@cache
def processes_of(launch: Launch) -> Processes:
    """The processes of all ranks, cached. All ranks must call it, before groups exist too."""
    ours = processes_seen_here()
    texts = exchange_texts(launch, f"{os.getpid()} {ours}", "processes")
    pids = [text.partition(" ") for text in texts]
    return Processes(tuple(int(pid) if theirs == ours else None for pid, _, theirs in pids))


def processes_seen_here() -> str:
    """The machine's boot and process namespace, alike on ranks that see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def started_ranks() -> dict[int, int]:
    """The processes that this one has started as ranks, by rank."""
    found = dict[int, int]()
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and parent_of(int(path.name)) == os.getpid():
            with suppress(OSError):  # it has just ended
                variables = (path / "environ").read_bytes().split(b"\0")
                number = next((v for v in variables if v.startswith(b"RANK=")), None)
                if number is not None:
                    found[int(number.removeprefix(b"RANK="))] = int(path.name)
    return found


def describe(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has ended" if len(ranks) == 1 else f"ranks {names} have ended"


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return state_of(pid) not in (None, "Z", "X")


def state_of(pid: int) -> str | None:
    """The letter of a process's state as in proc(5); None without such a process."""
    numbers = _stat_of(pid)
    return None if numbers is None else numbers[0]


def parent_of(pid: int) -> int | None:
    numbers = _stat_of(pid)
    return None if numbers is None else int(numbers[1])


def _stat_of(pid: int) -> list[str] | None:
    """What proc(5) says of a process, from its state on; None without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()


def report_error(line: str) -> bool:
    """Leave the line to the launcher, which prints it when all ranks have ended. False without
    one."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError:
        return False
    return True
