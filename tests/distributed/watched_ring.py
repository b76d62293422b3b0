"""A ring whose ranks write what they hold whenever INTERVAL samples have ended. Started by
test_recurrent.py."""

import ctypes
import json
import os
import sys
from pathlib import Path

from magicdec.cli.serve import recurrent
from magicdec.systems.mdi_llm.ring_stage import Stage

INTERVAL = 100
MAPPED = "/dev/shm/magicdec-"
free = Stage.free
freed = 0


class Allocated(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated


def native_kb() -> int:
    """What C, C++ and Python's large objects hold now. Resident memory moves by whole arenas."""
    allocated = mallinfo2()
    return int(allocated.uordblks + allocated.hblkhd) // 1024


def number(status: str, name: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


def ring_kb(smaps: str) -> int:
    """Resident memory of the ring buffers in shared memory."""
    total = 0
    is_ring = False
    for line in smaps.splitlines():
        if "-" in line.split()[0]:
            is_ring = MAPPED in line
        elif is_ring and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def note(self: Stage, rows: list[int]) -> None:
    global freed
    free(self, rows)
    freed += len(rows)
    if freed % INTERVAL == 0:
        status = Path("/proc/self/status").read_text()
        held = {
            "threads": number(status, "Threads:"),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "native_kb": native_kb(),
            "python_blocks": sys.getallocatedblocks(),
            "anonymous_kb": number(status, "RssAnon:"),
            "shared_kb": number(status, "RssShmem:"),
            "ring_kb": ring_kb(Path("/proc/self/smaps").read_text()),
        }
        with Path(f"rank{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps({"ended": freed, **held}) + "\n")


Stage.free = note  # type: ignore[method-assign]
recurrent()
