"""A process that has imported what ranks import, and forks them on request: starting a rank costs
milliseconds in place of the seconds that importing torch takes.

The ranks see what torchrun gives them: its environment variables, and a store at MASTER_PORT that
the launching process holds. If a rank fails, the others are ended. `RankServer` is the side of the
tests; run as a script, this file is the server. Requests and answers are lines of JSON. Tests of
torchrun itself do not use this.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

from frame_room import call_with_room

TESTS = Path(__file__).parent
# After the first failure of a rank, the others may end by themselves for NOTICE_S seconds (or for
# those of the job), and have GRACE_S in all.
NOTICE_S = 2
GRACE_S = 12
# What a run imports: `conftest` has most of the package, the libraries are imported where a
# function needs them.
IMPORTED = (
    "conftest",
    "magicdec.cli.commands",
    "magicdec.cli.report",
    "magicdec.bench.latency.forwards",
    "magicdec.bench.measure",
    "rich.progress",
    "rich.table",
    "scipy.special",
    "sentencepiece",
)


@dataclass(frozen=True)
class Job:
    """A script of tests/ with its arguments, and where its ranks write."""

    script: str
    args: Sequence[str]
    num_ranks: int
    env: Mapping[str, str]
    cwd: str
    stdout: str
    stderr: str
    notice_s: float = NOTICE_S


class RankServer:
    """Starts the server, and ends it when it is closed."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
            )
        self.socket = ours
        self.answers = ours.makefile("r")

    def run(self, job: Job, timeout: float) -> int:
        """The exit code of `job`: that of the rank which failed first, or 0. All its processes are
        gone afterwards."""
        self.socket.sendall((json.dumps(asdict(job)) + "\n").encode())
        launcher = json.loads(self.answers.readline())
        is_done, _, _ = select.select([self.socket], [], [], timeout)
        if not is_done:
            os.killpg(launcher, signal.SIGKILL)
        returncode = int(json.loads(self.answers.readline()))
        if not is_done:
            raise subprocess.TimeoutExpired([job.script, *job.args], timeout)
        return returncode

    def close(self) -> None:
        self.answers.close()
        self.socket.close()
        self.process.wait()


def serve(requests: IO[str], answers: socket.socket) -> Job | None:
    """Start a launcher for each request. Returns in a rank, with its job, and, with None, in the
    server at the end of the requests."""
    for line in requests:
        job = Job(**json.loads(line))
        launcher = os.fork()
        if launcher == 0:
            requests.close()
            answers.close()
            os.setsid()
            if launch(job):
                return job
        answers.sendall(f"{launcher}\n".encode())
        _, status = os.waitpid(launcher, 0)
        answers.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return None


def launch(job: Job) -> bool:
    """True in a rank. A launcher of several ranks waits for them and exits."""
    redirect(job)
    if job.num_ranks == 1:
        return True
    from magicdec.distributed.loopback import serve_store

    pipes = [os.pipe() for _ in range(job.num_ranks)]
    ranks = []
    for rank, (source, _) in enumerate(pipes):
        if (pid := os.fork()) == 0:
            # The store is made after the ranks, because it has threads, which a fork would lose.
            port = os.read(source, 16).decode()
            for pipe in pipes:
                os.close(pipe[0])
                os.close(pipe[1])
            os.environ.update(variables_of_torchrun(rank, job.num_ranks, port))
            return True
        ranks.append(pid)
    store = serve_store()
    for _, sink in pipes:
        os.write(sink, str(store.port).encode())
    os._exit(wait_for(ranks, job.notice_s))


def redirect(job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.env)
    os.chdir(job.cwd)
    for path, descriptor in ((job.stdout, 1), (job.stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def variables_of_torchrun(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    numbers |= {"LOCAL_WORLD_SIZE": num_ranks, "TORCHELASTIC_RESTART_COUNT": 0}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    store["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return {name: str(number) for name, number in numbers.items()} | store


def wait_for(ranks: list[int], notice_s: float) -> int:
    """0 if all `ranks` end well, else the exit code of the first failure, after which the others
    are ended."""
    failed = 0
    deadlines = {}
    while ranks:
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ranks.remove(pid)
                if status and not failed:
                    failed = os.waitstatus_to_exitcode(status)
                    now = time.monotonic()
                    deadlines = {now + notice_s: signal.SIGTERM, now + GRACE_S: signal.SIGKILL}
        for deadline in [d for d in deadlines if d < time.monotonic()]:
            end_by = deadlines.pop(deadline)
            for pid in ranks:
                os.kill(pid, end_by)
        time.sleep(0.01)
    return abs(failed)


def main() -> None:
    sys.path.insert(0, str(TESTS))
    for name in IMPORTED:
        import_module(name)
    import_module("long_texts").encode_demo_text()

    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork would lose a thread"
    gc.collect()
    gc.freeze()  # no rank has to walk through what was imported
    with socket.socket(fileno=int(sys.argv[1])) as answers:
        job = serve(answers.makefile("r"), answers)
    if job is not None:
        sys.argv = [str(TESTS / job.script), *job.args]
        sys.path.insert(0, str((TESTS / job.script).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    call_with_room(main)
