"""`magicdec probe`: measures the bandwidth and speed of this machine, and writes them to a file
that `magicdec plan` reads.

    magicdec probe --out machine.json
    magicdec probe --nproc 2 --out machine.json

Owns the command line and the table; `probe/probe.py` measures. Heavy imports happen after the flags
are read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import Parser, refuse, run_on_ranks
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection
from magicdec.console import make_console
from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import find_world_size
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.names import DEVICES
from magicdec.probe.probe import measure
from magicdec.records.writing import check_writable


def main() -> NoReturn:
    """Measure on all ranks. Rank 0 writes the file and prints the results."""
    launch = read_launch()
    try:
        out, config = parse(sys.argv[1:])
        nproc = config.parallel.nproc
        config.check(find_world_size(nproc, launch))
        run_on_ranks(nproc, sys.argv[1:], launch)
        from magicdec.hardware.environment import probe_machine

        machine = probe_machine(launch)
        resolved = resolve(config, machine)
    except ValueError as error:
        refuse(error, launch)
    found = measure(resolved, machine, launch)
    if launch.rank == 0:
        try:
            found.save(out)
        except ValueError as error:
            refuse(error, launch)
        print_machine(found, out)
    sys.exit(0)


def parse(argv: list[str]) -> tuple[Path, RunConfig]:
    """Raises ValueError for flags that do not exist or have an impossible value."""
    parser = Parser(
        description="Measure memory bandwidth, FLOP/s, all-reduce and overhead, and write them to "
        "a file. Several ranks measure at the same time.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("machine.json"),
        metavar="FILE",
        help="the file to write [machine.json]",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of each rank; default: the cores divided by the ranks",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", *DEVICES),
        help="the device to measure; auto is cuda if there is a GPU [auto]",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks to start on this host, which all measure at the same time; default: one, or "
        "those that torchrun started",
    )
    args, _ = parser.read(argv)
    check_writable("--out", args.out)
    section = ParallelSection(device=args.device, threads=args.threads, nproc=args.nproc)
    return args.out, RunConfig(parallel=section)


def print_machine(machine: MachineFile, out: Path) -> None:
    from rich.table import Table

    from magicdec.probe.ceilings import MANY

    d = machine.description
    title = f"{d['gpu'] or d['cpu']}: ranks {d['world_size']} x threads {d['threads']}, of one rank"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_row("read bandwidth, GB/s", f"{machine.read_bytes_per_s / 1e9:.1f}")
    for dtype, rate in machine.flops_per_s.items():
        table.add_row(f"matrix product, {dtype}, TFLOP/s", f"{rate / 1e12:.3f}")
    for dtype, rate in machine.kv_bytes_per_s.items():
        table.add_row(f"attention over a long cache, {dtype}, GB/s", f"{rate / 1e9:.1f}")
    for dtype, rate in machine.attention_flops_per_s.items():
        table.add_row(f"attention of {MANY} new tokens, {dtype}, TFLOP/s", f"{rate / 1e12:.3f}")
    for dtype, seconds in machine.layer_overhead_s.items():
        more = machine.token_overhead_s[dtype]
        shown = f"{seconds * 1e6:.1f} + {more * 1e6:.1f} a token"
        table.add_row(f"overhead of a layer, {dtype}, us", shown)
    for name, link in (("ranks", machine.link), ("nodes", machine.node_link)):
        if link is not None:
            label = f"all-reduce between {name} ({d['collectives']})"
            table.add_row(f"{label}, latency, us", f"{link.latency_s * 1e6:.1f}")
            table.add_row(f"{label}, GB/s", f"{link.bytes_per_s / 1e9:.2f}")
    console = make_console()
    console.print(table)
    console.print(f"written to {out}")
