"""The commands by name, which `magicdec <command>` and the scripts in tests/ start. Imports no
torch."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from magicdec.cli.checkpoints.convert import main as convert
from magicdec.cli.checkpoints.download import main as download
from magicdec.cli.checkpoints.model import main as model
from magicdec.cli.compare import main as compare
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.export import main as export
from magicdec.cli.flags import main
from magicdec.cli.front.run import main as run
from magicdec.cli.latency import main as latency
from magicdec.cli.plan import main as plan
from magicdec.cli.probe import main as probe
from magicdec.cli.table import main as table
from magicdec.distributed.groups import read_launch

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
    "run": ("decode prompts with a draft (--draft), checked against decoding without one", run),
    "latency": ("time single forwards at fixed cache lengths, over a grid", latency),
    "table": ("print records as a table: text, Markdown, LaTeX or CSV", table),
    "compare": ("compare records with a baseline file; exit code 1 on a regression", compare),
    "probe": ("measure this machine's bandwidth and speed; write them to a file", probe),
    "plan": ("predict when speculation pays, from the model's shape and the machine", plan),
    "export": ("write records as one flat CSV or Parquet table", export),
    "model": ("get a model from the Hugging Face hub, or convert a checkpoint", model),
}
# The spellings of the original suite.
OLD_SPELLINGS: dict[str, tuple[str, Callable[[], None]]] = {
    "baseline": ("run --draft none", baseline),
    "selfspec": ("run --draft self", selfspec),
    "longspec": ("run --draft model:NAME, with --target and --model", longspec),
    "download": ("model get", download),
    "convert": ("model convert", convert),
}
KNOWN = COMMANDS | OLD_SPELLINGS


def console() -> NoReturn:
    """`magicdec <command>`: run the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "--help_all"):
        print_commands()
        sys.exit(0)
    if name == "--version":
        print(f"magicdec {version('magicdec')}")
        sys.exit(0)
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(KNOWN)}"
        print(f"magicdec: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"magicdec {name}", *sys.argv[2:]]
    try:
        try:
            KNOWN[name][1]()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    sys.exit(0)


def print_commands() -> None:
    """The commands with a line each, on one rank."""
    if read_launch().rank != 0:
        return
    print("usage: magicdec COMMAND [flags]; magicdec COMMAND --help; magicdec --version\n")
    print("\n".join(f"  {name:<10} {text}" for name, (text, _) in COMMANDS.items()))
    print("\nIn the spelling of the original suite:\n")
    print("\n".join(f"  {name:<10} {text}" for name, (text, _) in OLD_SPELLINGS.items()))
