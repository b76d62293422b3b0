"""`magicdec reproduce`: a published table beside predictions and measurements.

    magicdec reproduce                                  # shows the tables
    magicdec reproduce magicdec_speedups_a100           # runs it at the published size
    magicdec reproduce magicdec_speedups_a100 --demo    # with the packaged models, on this machine

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.cli.sweep import SweepFlags
from magicdec.config.sections import OutputSection
from magicdec.config.setting import same, setting
from magicdec.distributed.ranks import is_launched
from magicdec.output.writing import check_record_file, check_writable
from magicdec.predict.published_table import TABLES

if TYPE_CHECKING:
    from magicdec.predict.published_table import PublishedTable

WRITTEN = Path("results/reproduce")


@dataclass(frozen=True)
class PublishedTableSection:
    table: str | None = setting(
        None, "The published table.", "table", choices=tuple(TABLES), metavar="TABLE"
    )
    demo: bool = setting(False, "Run the same with the packaged models, on this machine.")
    predict: bool = setting(False, "Only predict; needs no GPU.")
    dry_run: bool = same(SweepFlags, "dry_run")
    out: Path = same(OutputSection, "results", Path(OutputSection.results))
    tables: Path = setting(
        WRITTEN,
        "The folder to which tables are written. A table that it lacks begins as the packaged one.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        ways = [f"--{name}" for name in ("demo", "predict", "dry_run") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} exclude each other; give one")
        if self.table is None and ways:
            raise ValueError(f"name a table; choose from {', '.join(TABLES)}")


def reproduce(values: ParsedValues) -> int:
    """Does what the flags say. Returns the exit code. Raises ValueError for impossible flags, a
    file that cannot be read or written, and too few GPUs."""
    if is_launched():
        raise ValueError("reproduce starts the ranks itself; start it without torchrun")
    args = values[PublishedTableSection]
    if args.table is None or args.predict or args.dry_run:
        values.refuse_given(["table.out"], "nothing runs")
    from magicdec.predict.published_table import PublishedTable, print_tables

    if args.table is None:
        print_tables(args.tables)
        print("with the name of a table, --demo runs it here, and --predict predicts it")
        return 0
    table = PublishedTable(args.table, args.tables)
    num_failed = 0
    if args.dry_run:
        print("\n".join(f"magicdec {command}" for command in table.commands(is_demo=False)))
        return 0
    if not (args.demo or args.predict):
        check_hardware(table)
    check_writable("--tables", table.path)
    table.predict()
    if args.demo:
        table.make_demo()
    if not args.predict:
        check_record_file("--out", args.out)
        num_failed = table.measure(args.demo, args.out)
    table.save()
    table.print()
    print(f"\nwritten to {table.path}, whose column `exists` says what is missing and why")
    return int(num_failed > 0)


def check_hardware(table: PublishedTable) -> None:
    """Raises ValueError if the published runs need more GPUs than this machine has."""
    words = [command.split() for command in table.commands(is_demo=False)]
    needed = max(int(command[command.index("--nproc") + 1]) for command in words)
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < needed:
        raise ValueError(
            f"{table.name} needs {needed} CUDA devices, this machine has {num_gpus}; --predict and "
            "--demo need none"
        )


main = LoneCommand(
    reproduce,
    "Compare a published table with predictions and with runs, and write the comparison to its CSV "
    "file. Without --demo, --predict or --dry_run it runs at the published size, which needs GPUs "
    "like the published ones. Without a table it shows all tables.",
    {"table": PublishedTableSection()},
    gone={"--commands": "it is --dry_run"},
)
