"""The ranks of one case as processes of this host, as torchrun would start them, except that the
end of one of them leaves the others alone.

Owns their directory, and that nothing of them is left: processes, files or shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from magicdec.distributed.loopback import LOOPBACK, serve_store
from magicdec.distributed.ranks import LAUNCHER

RANK = Path(__file__).with_name("rank.py")
SHARED = Path("/dev/shm")


class Ranks:
    """A context manager: the ranks run inside it."""

    def __init__(self, num_ranks: int, words: Sequence[str]) -> None:
        """`words` are those of `rank.py` after its directory."""
        self.num_ranks, self.words = num_ranks, words

    def __enter__(self) -> Ranks:
        # Its name says whose it is if this process is killed without a word.
        self._directory = TemporaryDirectory(prefix=f"soak-{os.getpid()}-", dir=SHARED)
        self.directory = Path(self._directory.name)
        self.segments = self.directory / "segments"
        self.segments.mkdir()
        self.store = serve_store()
        self.processes = [self._start(rank) for rank in range(self.num_ranks)]
        return self

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.num_ranks}
        numbers |= {"LOCAL_WORLD_SIZE": self.num_ranks, "MASTER_PORT": self.store.port}
        environment = {name: str(number) for name, number in numbers.items()} | {
            "MASTER_ADDR": LOOPBACK,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            LAUNCHER: str(os.getpid()),  # a rank ends with this process, however that ends
        }
        command = [sys.executable, str(RANK), str(self.directory), *self.words]
        out = ["--out", str(self.directory / "runs.jsonl")]
        with (self.directory / f"log{rank}").open("wb") as log:
            return subprocess.Popen(
                [*command, *out], stdout=log, stderr=log, env=os.environ | environment
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        del self.store
        self._directory.cleanup()

    def wait(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Wait until these have ended, or the first of them has failed. Returns those that run
        still."""
        until = time.monotonic() + seconds
        while True:
            codes = {rank: self.processes[rank].poll() for rank in ranks}
            left = [rank for rank, code in codes.items() if code is None]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def failed(self) -> list[int]:
        """The ranks that have ended with an error, or were killed."""
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)

    def log(self, rank: int) -> str:
        return (self.directory / f"log{rank}").read_text(errors="replace")

    def noted(self, rank: int) -> list[dict[str, Any]]:
        """What the rank noted after each pass."""
        return read_lines(self.directory / f"rank{rank}.jsonl")

    def records(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "runs.jsonl")

    def left(self) -> list[str]:
        """Segments that still have a name."""
        return sorted(path.name for path in self.segments.iterdir())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are complete."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
