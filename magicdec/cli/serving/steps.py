"""The steps that all commands that serve requests have in common: from the command line to the
records, which are appended to their file one by one as they are made.

Owns how such a command ends: with which exit code, and with which line when it fails. Heavy imports
happen after the flags are read.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from magicdec.cli.flags import announce_backend, refuse, run_on_ranks
from magicdec.config.run_config import RunConfig
from magicdec.console import labelled, spinner
from magicdec.distributed.groups import Launch, read_launch
from magicdec.distributed.ranks import INTERRUPTED
from magicdec.distributed.watching.watch import naming_lost, watch_ranks
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.records.writing import append_line, to_json

if TYPE_CHECKING:
    from magicdec.serving.record import PassRecord
    from magicdec.setup.prepare import Prepared

FAILED = 1


class RecordFile:
    """The file, and how many records it got. A record that cannot be written is lost with a line
    that says so, and the command goes on: what it measures next may still be printed."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def append(self, record: Any) -> None:
        """Append the record, a dataclass, or say why it is lost."""
        try:
            append_line(self.path, to_json(record))
            self.count += 1
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; the record is lost", file=sys.stderr)


@dataclass(frozen=True)
class Experiment(ABC):
    """What the command line of a command that serves requests asks for, and how it is done. The
    `config` is that of the engine."""

    config: RunConfig

    @abstractmethod
    def check_ranks(self, nproc: int) -> None:
        """Raises ValueError if so many ranks cannot have the model, before they start."""

    @abstractmethod
    def prepare(self, launch: Launch) -> Any:
        """What `measure` needs: a `Prepared`, or what has one as its `run`."""

    @abstractmethod
    def measure(self, prepared: Any, record_file: RecordFile) -> list[Any]:
        """Serve the requests in every pass. On the first rank, keep each record when it is made."""

    @abstractmethod
    def show(self, prepared: Any, records: list[Any]) -> bool:
        """Print the tables and write the files that were asked for. Returns whether all could be
        written."""


def run_command(parse: Callable[[Sequence[str], Launch], Experiment]) -> NoReturn:
    """Do what `parse` makes of the command line, on this rank. If another rank ends while this one
    needs it, every rank that is left names it."""
    launch, words = read_launch(), sys.argv[1:]
    try:
        with naming_lost(launch):
            code = serve(parse(words, launch), words, launch)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(code)


def serve(experiment: Experiment, words: Sequence[str], launch: Launch) -> int:
    """The whole command on this rank. Returns its exit code."""
    experiment = replace(experiment, config=with_local_models(experiment.config))
    parallel, out = experiment.config.parallel, Path(experiment.config.output.results)
    run_on_ranks(parallel.nproc, words, launch, experiment.check_ranks)
    watch_ranks(launch)
    with spinner("preparing", launch.rank == 0):
        prepared = experiment.prepare(launch)
    announce(prepared, launch)
    record_file = RecordFile(out)
    try:
        records = experiment.measure(prepared, record_file)
    except KeyboardInterrupt:
        if launch.rank == 0:
            print(f"interrupted; {record_file.count} records are in {out}", file=sys.stderr)
        return INTERRUPTED
    if launch.rank != 0:
        return 0
    is_written = experiment.show(prepared, records)
    code = conclude(record_file, records)
    return code if is_written else FAILED


def announce(prepared: Any, launch: Launch) -> None:
    """Tell the user what was chosen, and what it needs of the memory."""
    split, transport = (getattr(prepared, name, None) for name in ("split", "transport"))
    if launch.rank == 0 and split:
        print(labelled("split", split))
    if launch.rank == 0 and transport is not None:
        print(labelled("messages", transport.describe()))
    run: Prepared = getattr(prepared, "run", prepared)
    announce_backend(run.config, run.launch)
    if launch.rank == 0:
        print(labelled("memory", run.memory), flush=True)


def conclude(record_file: RecordFile, records: Sequence[PassRecord]) -> int:
    """Say where the records are. Returns the exit code: `FAILED` if one was lost, or has wrong
    tokens."""
    noun = "record" if record_file.count == 1 else "records"
    print(f"{record_file.count} {noun} appended to {record_file.path}", file=sys.stderr)
    is_wrong = any(record.status == "diverged" for record in records)
    return FAILED if is_wrong or record_file.count < len(records) else 0
