"""The commands by name, which `magicdec <command>` and the scripts in tests/ start. Imports no
torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from magicdec.cli.compare import main as compare
from magicdec.cli.convert import main as convert
from magicdec.cli.download import main as download
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.export import main as export
from magicdec.cli.flags import main
from magicdec.cli.latency import main as latency
from magicdec.cli.plan import main as plan
from magicdec.cli.probe import main as probe
from magicdec.cli.table import main as table

PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


def baseline() -> None:
    """Autoregressive decoding of long prompts: the baseline of every comparison."""
    main(DRIVERS["baseline"], baseline.__doc__ or "")


def selfspec() -> None:
    """Self-speculation: the target drafts for itself with a small budget of its own KV cache."""
    main(DRIVERS["selfspec"], selfspec.__doc__ or "")


def longspec() -> None:
    """Speculation with a standalone draft: a smaller model (--model) on some of the ranks drafts
    for the target (--target)."""
    main(DRIVERS["longspec"], longspec.__doc__ or "")


COMMANDS: dict[str, tuple[str, Callable[[], None]]] = {
    "baseline": ("autoregressive decoding", baseline),
    "selfspec": ("self-speculation, checked against the baseline of the same run", selfspec),
    "longspec": ("speculation with a standalone draft on a subgroup of ranks", longspec),
    "compare": ("compare records with a baseline file; exit code 1 on a regression", compare),
    "probe": ("measure this machine's bandwidth and speed; write them to a file", probe),
    "latency": ("time single forwards at fixed cache lengths, over a grid", latency),
    "plan": ("predict when speculation pays, from the model's shape and the machine", plan),
    "download": ("fetch a model from the Hugging Face hub", download),
    "convert": ("write a checkpoint as one file with checksums, or check such a file", convert),
    "table": ("print records as a table: text, Markdown, LaTeX or CSV", table),
    "export": ("write records as one flat CSV or Parquet table", export),
}


def console() -> NoReturn:
    """`magicdec <command>`: run the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: magicdec <command> [flags]; magicdec <command> --help\n")
        print("\n".join(f"  {n:<10} {text}" for n, (text, _) in COMMANDS.items()))
        sys.exit(0)
    if name not in COMMANDS:
        print(
            f"magicdec: unknown command {name!r}; choose from {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv = [f"magicdec {name}", *sys.argv[2:]]
    try:
        try:
            COMMANDS[name][1]()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    sys.exit(0)
