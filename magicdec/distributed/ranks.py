"""Starts a command's ranks on this host, ends ranks whose launcher has ended, and runs commands in
processes of their own. Imports torch only to start ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from magicdec.distributed.groups import Launch

NOT_AVAILABLE = "<N/A>"  # torchrun's word for a rank that wrote no such file
INTERRUPTED = 130
LAUNCHER = "MAGICDEC_LAUNCHER"  # the process that started this rank with `start_ranks`
STARTER = "MAGICDEC_STARTER"  # the process that started this command with `run_command`
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def is_launched() -> bool:
    """Whether a launcher, such as torchrun, started this process as a rank."""
    return "WORLD_SIZE" in os.environ


def find_world_size(nproc: int | None, launch: Launch) -> int:
    return launch.world_size if nproc is None or is_launched() else nproc


def is_other_start(nproc: int | None, launch: Launch) -> bool:
    """Whether `nproc` ranks have to be started. Raises ValueError if others were."""
    if nproc is None or nproc == launch.world_size:
        return False
    if is_launched():
        raise ValueError(
            f"--nproc {nproc}: {launch.world_size} ranks were started already, by torchrun for "
            "example; leave --nproc out"
        )
    return True


def package_command() -> list[str]:
    """The words that start `magicdec` from this process's package, not from a folder `magicdec` in
    the current directory."""
    home = str(Path(__file__).parents[2])
    inherited = sys.path if sys.flags.safe_path else sys.path[1:]
    words = [sys.executable, "-P", "-m", "magicdec"]
    if home in inherited:
        return words
    before = os.environ.get("PYTHONPATH")
    return ["env", f"PYTHONPATH={os.pathsep.join([home, before] if before else [home])}", *words]


@contextmanager
def interrupting_no_child() -> Iterator[None]:
    """A context whose child processes never get Ctrl-C; this process gets it at the end, when the
    caller knows all its children."""
    came = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    # A child has the mask of the thread that starts it, and the signal's default action.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, None)


@contextmanager
def passing_on(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which processes that are started have these environment variables. What this
    process does later has them not: it would take itself for a rank, for example."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_ranks(nproc: int, words: Sequence[str]) -> int:
    """Run the command WORDS as `nproc` ranks on this host, through torch's launcher. Returns the
    exit code of the rank that failed first, after printing its error, or 0; or that of a signal."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from magicdec.distributed.rendezvous import register_rendezvous
    from magicdec.distributed.watching.watch import LauncherWatch, stop_watching

    logging.disable(logging.ERROR)  # the launcher's own account of processes and signals
    # Threads as torchrun sets them; a rank then sets its own.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    rank_environment = {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }
    # The launcher keeps what ranks report in a folder, which it would leave behind.
    with (
        passing_on(rank_environment),
        tempfile.TemporaryDirectory(prefix="magicdec-", ignore_cleanup_errors=True) as folder,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="magicdec",
            max_restarts=0,
            rdzv_backend=register_rendezvous(),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        LauncherWatch(nproc).start()
        try:
            elastic_launch(config, words[0])(*words[1:])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.error_file != NOT_AVAILABLE:
                message: object = failure.error_file_data["message"]
                print(message["message"] if isinstance(message, dict) else message, file=sys.stderr)
            elif failure.exitcode < 0:
                print(f"rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
            elif failure.exitcode == INTERRUPTED:
                print(f"rank {rank} was ended by SIGINT", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            return 128 + error.sigval
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            stop_watching()
    return 0


def has_lost_launcher() -> bool:
    """Whether the `start_ranks` that started this rank has ended."""
    launcher = int(os.environ.get(LAUNCHER, 0))
    return launcher != 0 and is_launched() and os.getppid() != launcher


def end_with_launcher() -> None:
    """End this rank or command when the process that started it ends without a word, as on SIGKILL.
    In a session of its own it would run on."""
    starter = os.environ.pop(STARTER, None)  # which is not that of processes that this one starts
    if starter is not None:
        end_with_parent(int(starter))
    launcher = int(os.environ.get(LAUNCHER, 0))
    if launcher == 0 or not is_launched():
        return
    end_with_parent(launcher)


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """End this process by signal `number` when process `parent` ends without a word."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_DEATH_SIGNAL, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before that
        sys.exit(128 + number)


@dataclass(frozen=True)
class Ended:
    code: int
    stderr: str

    @property
    def error(self) -> str:
        """The last line without the name of the command: the error if it failed."""
        last = (self.stderr.strip().splitlines() or [f"it ended with {self.code}"])[-1]
        name, colon, rest = last.partition(": ")
        return rest if colon and name.startswith("magicdec") else last


def run_command(words: Sequence[object]) -> Ended:
    """Run `magicdec WORDS` to its end, without stdout. It does not outlive this process."""
    command = [*package_command(), *map(str, words)]
    process = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {STARTER: str(os.getpid())},
    )
    return Ended(process.returncode, process.stderr)
