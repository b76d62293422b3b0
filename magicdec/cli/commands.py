"""The commands by name. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import end_with_launcher, is_launched
from magicdec.names import load_object, most_like
from magicdec.output.console import escape_what_has_no_code

if TYPE_CHECKING:
    from magicdec.cli.parsing.parser import Parser

PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


# (what the command does, the function of a module of `magicdec.cli` that does it, which is imported
# only then)
COMMANDS = {
    "run": ("decode prompts with a draft, and check every token", "drivers:RUN"),
    "longdecode": ("`run` with outputs much longer than prompts", "drivers:LONG_DECODE"),
    "sweep": ("many runs, from a study file or from flags with several values", "sweep:main"),
    "latency": ("time single forwards at fixed cache lengths, over a grid", "latency:main"),
    "acceptance": (
        "count what drafts are worth at every position, by context",
        "acceptance:main",
    ),
    "audit": (
        "audit another program's server: lossless, counts, states",
        "audit:main",
    ),
    "serve": ("serve the same requests in every mode, in one table", "serve:main"),
    "inflight": ("serve requests as they arrive: in-flight and other batchings", "serve:inflight"),
    "recurrent": ("divide a model by layers among ranks; samples circulate", "serve:recurrent"),
    "pipeline": ("pipelined speculation: stages, and a draft that runs ahead", "serve:pipeline"),
    "table": ("print records as a table: text, Markdown, LaTeX or CSV", "records:table"),
    "report": ("write a page with figures and tables of records", "records:report"),
    "export": ("write records as one flat CSV or Parquet table", "records:export"),
    "compare": ("compare records with a baseline file; exit code 1 if worse", "compare:main"),
    "gate": ("run the cases of a baseline file again and compare", "gate:main"),
    "gate save": ("make or renew a baseline file", "gate:save"),
    "probe": ("measure this machine's bandwidth and speed; write them to a file", "probe:main"),
    "plan": ("predict when speculation pays, from model shape and machine", "plan:main"),
    "reproduce": (
        "published tables beside predictions and runs on this machine",
        "reproduce:main",
    ),
    "simulate": (
        "decode on a pipeline of stages in virtual time, with speculation",
        "simulate:main",
    ),
    "advise": ("probe, short runs and plan: does speculation pay here?", "advise:main"),
    "doctor": ("what works on this machine, a line each", "doctor:main"),
    "config": (
        "print a record's flags as a file for `--config` of its command",
        "config_of:main",
    ),
    "completion": (
        "print a script with which a shell completes commands and flags",
        "completion:main",
    ),
    "model get": ("get a model from the Hugging Face hub", "checkpoints:get"),
    "model check": ("compare a model with transformers", "check_model:main"),
    "model convert": ("write a checkpoint as one file", "checkpoints:convert"),
}
LAST_GROUP = "Keep and check"  # also of commands that no group names
GROUPS = {  # in which `magicdec --help` shows them
    "Start here": ("run", "advise", "doctor", "model get", "model convert"),
    "Compare ways of decoding": (
        "longdecode",
        "serve",
        "inflight",
        "recurrent",
        "pipeline",
        "sweep",
        "latency",
        "acceptance",
        "audit",
        "table",
        "report",
    ),
    "Predict": ("probe", "plan", "reproduce", "simulate"),
    LAST_GROUP: ("gate", "gate save", "compare", "export", "config", "completion"),
}
# The spellings of the original suite.
OLD_SPELLINGS = {
    "baseline": ("run --draft none", "drivers:baseline"),
    "selfspec": ("run --draft self", "drivers:selfspec"),
    "longspec": ("run --draft model:NAME, with --target and --model", "drivers:longspec"),
    "download": ("model get", "checkpoints:old_get"),
    "convert": ("model convert", "checkpoints:old_convert"),
}
KNOWN = COMMANDS | OLD_SPELLINGS


def function_of(command: str) -> Any:
    return load_object(f"magicdec.cli.{KNOWN[command][1]}")


def parser_of(command: str) -> Parser:
    """The parser of a command, which its function or its module makes."""
    module, _, _ = KNOWN[command][1].partition(":")
    if module == "serve":
        maker = load_object("magicdec.cli.serve:COMMANDS")[command]
    elif hasattr(function_of(command), "build_parser"):
        maker = function_of(command)
    else:
        maker = import_module(f"magicdec.cli.{module}")
    parser: Parser = maker.build_parser()
    return parser


def start(name: str) -> None:
    end_with_launcher()
    escape_what_has_no_code()
    with ending_at_signals():
        function_of(name)()


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Lets SIGTERM end a command as Ctrl-C does, with the signal's exit code. A second SIGTERM ends
    it at once, and so does the first one of a rank, whose launcher waits for it."""
    terminated: list[int] = []

    def interrupt(number: int, frame: object) -> NoReturn:
        terminated.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    handles = before is signal.SIG_DFL and not is_launched()
    if handles:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:  # before the command could say what it keeps
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(128 + (terminated or [signal.SIGINT])[0])
    except SystemExit:
        if terminated:
            sys.exit(128 + terminated[0])
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)


def console() -> NoReturn:
    """`magicdec <command>`: runs the command of the first argument."""
    try:
        try:
            run_words(sys.argv[1:] or ["--help"])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    sys.exit(0)


def run_words(words: Sequence[str]) -> None:
    is_action = " ".join(words[:2]) in KNOWN
    name = " ".join(words[: 1 + is_action])
    if name in ("-h", "--help", "--help_all"):
        print_commands()
        return
    if name == "--version":
        print(f"magicdec {version('magicdec')}")
        return
    if name not in KNOWN:
        close = [command for command in KNOWN if command.startswith(f"{name} ")]
        hint = f"choose from {', '.join(close)}" if close else most_like(name, KNOWN)
        print(f"magicdec: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"magicdec {name}", *words[1 + is_action :]]
    start(name)


def print_commands() -> None:
    if read_launch().rank != 0:
        return
    print("usage: magicdec COMMAND [flags]; magicdec COMMAND --help; magicdec --version\n")
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, LAST_GROUP: [*GROUPS[LAST_GROUP], *(COMMANDS.keys() - grouped)]}
    for title, names in (groups | {"In the spelling of the original suite": OLD_SPELLINGS}).items():
        print(f"{title}:\n")
        print("\n".join(f"  {name:<13} {KNOWN[name][0]}" for name in names) + "\n")
