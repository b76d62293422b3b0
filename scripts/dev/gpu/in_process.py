"""Commands of `magicdec` in this process: one import of torch and one CUDA context serve all of
them. Used by the stages of `quick`, where each second counts; a command that hangs ends its stage.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Mapping, Sequence

import torch

from magicdec.cli.commands import console


class CommandFailed(RuntimeError):
    """A command that ended with an error: its exit status and the end of what it printed."""


def words_of(settings: Mapping[str, object]) -> list[object]:
    """The words of a command line: each flag, and its value or the values of its sequence."""
    words: list[object] = []
    for flag, value in settings.items():
        words.append(flag)
        words += value if isinstance(value, list | tuple) else [value]
    return words


def call_magicdec(command: str, flags: Sequence[object]) -> str:
    """Run `magicdec <command>` and return what it printed. Raises CommandFailed if it exits with an
    error; what it raises otherwise is passed on with its traceback."""
    before = sys.argv
    sys.argv = ["magicdec", *command.split(), *map(str, flags)]
    output = io.StringIO()
    errors = io.StringIO()
    code: object = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            console()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if code:
        output_lines = [*output.getvalue().splitlines(), *errors.getvalue().splitlines()]
        last = [line for line in output_lines if line.strip()][-8:]
        raise CommandFailed(f"magicdec {command} ended with {code}: " + "\n".join(last))
    return output.getvalue()
