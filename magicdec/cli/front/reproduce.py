"""`magicdec reproduce`: a published table beside what the plan predicts and what runs here measure.

    magicdec reproduce                                  # lists the tables
    magicdec reproduce magicdec_speedups_a100           # runs it at the published size
    magicdec reproduce magicdec_speedups_a100 --demo    # with the packaged models, on this machine

Owns the flags, and the refusal of a machine with too few GPUs. Heavy imports happen after the flags
are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.flags import Parser, refuse
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import INTERRUPTED, is_launched
from magicdec.records.writing import check_writable
from magicdec.reproduce.setting import TABLES

if TYPE_CHECKING:
    from magicdec.reproduce.published_table import PublishedTable

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
PUBLISHED = Path("results/paper")
DESCRIPTION = (
    "Compare a published table with predictions and with runs, and write the comparison to its CSV "
    "file. Without --demo, --predict or --commands it runs at the published size, which needs GPUs "
    "like the published ones. Without a table it lists the tables."
)


def main() -> NoReturn:
    """`magicdec reproduce`"""
    try:
        args = read(sys.argv[1:])
        sys.exit(reproduce(args))
    except ValueError as error:
        refuse(error, ALONE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises ValueError for what cannot be."""
    if is_launched():
        raise ValueError("reproduce starts the ranks itself; start it without torchrun")
    args = build_parser().read(argv)[0]
    if args.table is None and (args.predict or args.demo or args.commands or args.out):
        raise ValueError(f"name a table; choose from {', '.join(TABLES)}")
    if args.out is not None and (args.predict or args.commands):
        raise ValueError("--out does nothing here: nothing runs; leave it out")
    return args


def build_parser() -> Parser:
    parser = Parser(description=DESCRIPTION)
    parser.add_argument(
        "table", nargs="?", choices=tuple(TABLES), metavar="TABLE", help="the published table"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--demo", action="store_true",
        help="run the same with the packaged models, on this machine")  # fmt: skip
    ways.add_argument("--predict", action="store_true", help="only predict; needs no GPU")
    ways.add_argument("--commands", action="store_true",
        help="print the commands of the published size, and run nothing")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
        help="the file that the records of the runs are appended to; default: "
        "results/reproduce/TABLE.jsonl")  # fmt: skip
    parser.add_argument("--tables", type=Path, default=PUBLISHED, metavar="DIR",
        help=f"the folder of the published tables, whose files are rewritten [{PUBLISHED}]",
    )  # fmt: skip
    return parser


def reproduce(args: argparse.Namespace) -> int:
    """Do what the flags say. Returns the exit code. Raises ValueError if a file cannot be read or
    written, or if there are too few GPUs."""
    from magicdec.reproduce.measuring import measure, shown
    from magicdec.reproduce.printed import print_table, print_tables
    from magicdec.reproduce.published_table import PublishedTable

    if args.table is None:
        print_tables(args.tables)
        return 0
    table, num_failed = PublishedTable(args.table, args.tables), 0
    if args.commands:
        print("\n".join(shown(command) for command in table.commands(is_demo=False)))
        return 0
    if not (args.demo or args.predict):
        check_hardware(table)
    check_writable("--tables", table.path)
    table.predict()
    if args.demo:
        table.make_demo()
    if not args.predict:
        out = args.out or Path("results/reproduce") / f"{table.name}.jsonl"
        check_writable("--out", out)
        num_failed = measure(table, args.demo, out)
    table.save()
    print_table(table)
    print(f"\nwritten to {table.path}, whose column `exists` says what is missing and why")
    return int(num_failed > 0)


def check_hardware(table: PublishedTable) -> None:
    """Raises ValueError if the published runs need several hosts, or more GPUs than this machine
    has."""
    hosts = max(line.setting.num_hosts for line in table.part(is_demo=False))
    if hosts > 1:
        raise ValueError(
            f"{table.name} needs {hosts} hosts, and this command starts runs on one; --commands "
            "prints what they run, --predict and --demo need no others"
        )
    needed = max(line.setting.num_gpus for line in table.part(is_demo=False))
    if not needed:
        return
    import torch

    found = torch.cuda.device_count()
    if found < needed:
        raise ValueError(
            f"{table.name} needs {needed} CUDA devices, this machine has {found}; --predict and "
            "--demo need none"
        )
