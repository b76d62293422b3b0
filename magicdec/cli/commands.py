"""The commands by name, which `magicdec <command>` and the scripts in tests/ start. Imports no
torch."""

from __future__ import annotations

import difflib
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import end_with_launcher
from magicdec.names import load_named, load_object

if TYPE_CHECKING:
    from magicdec.cli.parsing.parser import Parser

PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


# (what the command does, the function that does it, which is imported only then)
COMMANDS = {
    "run": (
        "decode prompts with a draft, checked against decoding without one",
        "magicdec.cli.drivers:main",
    ),
    "sweep": (
        "many runs, from a study file or from flags with several values",
        "magicdec.cli.sweep:main",
    ),
    "latency": (
        "time single forwards at fixed cache lengths, over a grid",
        "magicdec.cli.latency:main",
    ),
    "serve": (
        "serve the same requests in every mode, in one table",
        "magicdec.cli.serve:main",
    ),
    "inflight": (
        "serve requests as they arrive: in-flight and other batchings",
        "magicdec.cli.serve:inflight",
    ),
    "recurrent": (
        "divide a model by layers among ranks; samples circulate",
        "magicdec.cli.serve:recurrent",
    ),
    "pipeline": (
        "pipelined speculation: stages on ranks, and a draft that runs ahead",
        "magicdec.cli.serve:pipeline",
    ),
    "table": (
        "print records as a table: text, Markdown, LaTeX or CSV",
        "magicdec.cli.table:main",
    ),
    "report": (
        "write a page with figures and tables of records",
        "magicdec.cli.report_page:main",
    ),
    "export": ("write records as one flat CSV or Parquet table", "magicdec.cli.export:main"),
    "compare": (
        "compare records with a baseline file; exit code 1 if worse",
        "magicdec.cli.compare:main",
    ),
    "gate": (
        "run the cases of a baseline file again and compare",
        "magicdec.cli.gate:main",
    ),
    "probe": (
        "measure this machine's bandwidth and speed; write them to a file",
        "magicdec.cli.probe:main",
    ),
    "plan": (
        "predict when speculation pays, from model shape and machine",
        "magicdec.cli.plan:main",
    ),
    "reproduce": (
        "published tables beside predictions and runs on this machine",
        "magicdec.cli.front.reproduce:main",
    ),
    "simulate": (
        "decode on a pipeline of stages in virtual time, with speculation",
        "magicdec.cli.simulate:main",
    ),
    "advise": (
        "probe, short runs and plan: does speculation pay here?",
        "magicdec.cli.front.advise:main",
    ),
    "doctor": ("what works on this machine, a line each", "magicdec.cli.front.doctor:main"),
    "config": (
        "print a record's flags as a file for `magicdec run --config`",
        "magicdec.cli.front.config_of:main",
    ),
    "completion": (
        "print a script with which a shell completes commands and flags",
        "magicdec.cli.front.completion:main",
    ),
    "nodes": (
        "check a JSON file of nodes; print each host's torchrun command",
        "magicdec.cli.front.nodes:main",
    ),
    "split": (
        "write a checkpoint as one file for each stage of a pipeline",
        "magicdec.cli.front.checkpoints:split",
    ),
    "model": (
        "get a model from the Hugging Face hub, or convert a checkpoint",
        "magicdec.cli.front.checkpoints:model",
    ),
}
# The spellings of the original suite.
OLD_SPELLINGS = {
    "baseline": ("run --draft none", "magicdec.cli.drivers:baseline"),
    "selfspec": ("run --draft self", "magicdec.cli.drivers:selfspec"),
    "longspec": (
        "run --draft model:NAME, with --target and --model",
        "magicdec.cli.drivers:longspec",
    ),
    "download": ("model get", "magicdec.cli.front.checkpoints:download"),
    "convert": ("model convert", "magicdec.cli.front.checkpoints:convert"),
}
KNOWN = COMMANDS | OLD_SPELLINGS
SERVE = "magicdec.cli.serve"  # the module of several commands
GROUPS = ("model",)  # commands that have only actions
# Actions of commands that have flags of their own.
ACTIONS = {
    "gate save": "magicdec.cli.gate:build_save_parser",
    "model get": "magicdec.cli.front.checkpoints:build_get_parser",
    "model convert": "magicdec.cli.front.checkpoints:build_convert_parser",
}


def parser_of(command: str) -> Parser:
    """The parser of a command or of one of its actions."""
    _, place = COMMANDS.get(command, ("", ""))
    module = place.partition(":")[0]
    if module == SERVE:
        parser: Parser = load_object(f"{SERVE}:COMMANDS")[command].build_parser()
        return parser
    builders = {command: f"{module}:build_parser"} | ACTIONS
    parser = load_named(builders, command)()
    return parser


def start(name: str) -> None:
    """Run that command with the arguments in `sys.argv`."""
    end_with_launcher()
    functions = {command: function for command, (_, function) in KNOWN.items()}
    load_named(functions, name)()


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
            start(name)
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
