"""The steps that all commands that serve requests have in common, and the file that they append
their records to, one by one as they are made.

Owns how such a command ends: with which exit code, and with which line when it fails. Must not know
what any of them serves, nor how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from magicdec.cli.flags import announce_backend, refuse
from magicdec.distributed.groups import Launch, read_launch
from magicdec.distributed.ranks import INTERRUPTED
from magicdec.distributed.watching.watch import naming_lost
from magicdec.records.writing import append_line, to_json

if TYPE_CHECKING:
    from magicdec.serving.showing.passes import PassRecord
    from magicdec.setup.prepare import Prepared


class Kept:
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


FAILED = 1


def run_command(serve: Callable[[Launch, Sequence[str]], int]) -> NoReturn:
    """Exit with what `serve`, the whole command on this rank, returns for the command line. If
    another rank ends while this one needs it, every rank that is left names it."""
    launch, words = read_launch(), sys.argv[1:]
    try:
        with naming_lost(launch):
            code = serve(launch, words)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(code)


def announce(prepared: Prepared) -> None:
    """Tell the user what was chosen, and what it needs of the memory."""
    announce_backend(prepared.config, prepared.launch)
    if prepared.launch.rank == 0:
        print(f"{'memory':<10} {prepared.memory}", flush=True)


def conclude(kept: Kept, records: Sequence[PassRecord]) -> int:
    """Say where the records are. Returns the exit code: `FAILED` if one was lost, or has wrong
    tokens."""
    noun = "record" if kept.count == 1 else "records"
    print(f"{kept.count} {noun} appended to {kept.path}", file=sys.stderr)
    is_wrong = any(record.status == "diverged" for record in records)
    return FAILED if is_wrong or kept.count < len(records) else 0
