"""The processes of all ranks, to name the one that has ended, and the line that a rank leaves to
its launcher when it ends.

Owns how the end of a rank is noticed. Must not know what was waited for.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun expects the error of a rank
NOTICE_S = 0.2  # until a process whose connection has closed is seen to have ended


class PeerLost(RuntimeError):
    """Another rank has ended, or is not heard of any more. One line, which names the rank."""


@dataclass(frozen=True)
class Processes:
    """`pids` are the processes of all ranks if they run on one host, otherwise empty."""

    pids: tuple[int, ...] = ()

    @classmethod
    def of_ranks(cls) -> Processes:
        """All ranks must call it together."""
        import torch
        import torch.distributed as dist

        host = torch.tensor([*socket.gethostname().encode()[:64].ljust(64)], dtype=torch.int64)
        ours = torch.cat([torch.tensor([os.getpid()]), host])
        theirs = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, ours)
        if not all(torch.equal(other[1:], ours[1:]) for other in theirs):
            return cls()
        return cls(tuple(int(other[0]) for other in theirs))

    def ended(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank, pid in enumerate(self.pids) if not is_alive(pid)]

    def check(self) -> None:
        """Raise PeerLost if the process of any rank has ended."""
        if ended := self.ended():
            raise PeerLost(describe(ended))

    @contextmanager
    def naming_ended(self) -> Iterator[None]:
        """If something fails inside, such as a collective, because a rank has ended: PeerLost."""
        try:
            yield
        except PeerLost:
            raise
        except RuntimeError:
            time.sleep(NOTICE_S)
            self.check()
            raise

    def lost(self, peer: int, error: Exception) -> PeerLost:
        """What to raise when the connection with `peer` has failed. A rank that has ended is named
        rather than one that stopped because of it."""
        time.sleep(NOTICE_S)
        if ended := self.ended():
            return PeerLost(describe(ended))
        reason = str(error).strip().splitlines()[0]
        return PeerLost(f"the connection with rank {peer} is lost: {reason}")


def describe(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has ended" if len(ranks) == 1 else f"ranks {names} have ended"


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie process does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


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
