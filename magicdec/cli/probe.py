"""`magicdec probe`: measures the bandwidth and speed of this machine, and writes them to a file
that `magicdec plan` reads.

    magicdec probe --out machine.json
    magicdec probe --nproc 2 --out machine.json

Owns the command line and the table; `probe/probe.py` measures. Heavy imports happen after the flags
are read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import Parser, refuse, run_on_ranks
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection
from magicdec.console import make_console
from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import INTERRUPTED, find_world_size
from magicdec.distributed.watching.watch import naming_lost
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.names import DEVICES, DTYPES
from magicdec.probe.probe import Found, measure
from magicdec.records.writing import check_writable

BUSY = 0.25  # load average for each core from which the host is called busy


def main() -> NoReturn:
    """Measure on all ranks. Rank 0 writes the file and prints the results. After Ctrl-C it does so
    with what was measured until then, and the exit code is 130."""
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
    if launch.rank == 0:
        warn_of_load(os.getloadavg()[0], machine.num_cpus)
    found, code = Found(), 0
    try:
        with naming_lost(launch):
            measure(resolved, machine, launch, found)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if launch.rank == 0:
        try:
            conclude(found, out)
        except ValueError as error:
            refuse(error, launch)
    sys.exit(code)


def conclude(found: Found, out: Path) -> None:
    """Write and print what was measured, which is not all of it if the probe was interrupted.
    Raises ValueError if the file cannot be written."""
    machine = found.machine_file()
    if machine is None:
        print("interrupted before the first dtype was measured; nothing is written")
        return
    machine.save(out)
    print_machine(machine, out)
    if list(machine.flops_per_s) != list(DTYPES):
        print(f"interrupted; the file has {', '.join(machine.flops_per_s)} only")


def warn_of_load(load: float, num_cpus: int) -> None:
    """Tell the user if other programs keep the host busy. `load` is the mean number of processes
    that ran or waited during the last minute."""
    if load > BUSY * num_cpus:
        print(
            f"warning: the host is busy (load average {load:.1f} on {num_cpus} cores); the rates "
            "will be too low. Probe again when nothing else runs.",
            file=sys.stderr,
            flush=True,
        )


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
    for label in ("measured", "spread"):
        table.add_column(label, justify="right")

    def add(label: str, shown: str, name: str) -> None:
        spread = machine.spreads.get(name)
        table.add_row(label, shown, "" if spread is None else f"{100 * spread:.0f} %")

    add("read bandwidth, GB/s", f"{machine.read_bytes_per_s / 1e9:.1f}", "read_bytes_per_s")
    for dtype, rate in machine.flops_per_s.items():
        label = f"matrix product, {dtype}, TFLOP/s"
        add(label, f"{rate / 1e12:.3f}", f"flops_per_s {dtype}")
    for dtype, rate in machine.kv_bytes_per_s.items():
        label = f"attention over a long cache, {dtype}, GB/s"
        add(label, f"{rate / 1e9:.1f}", f"kv_bytes_per_s {dtype}")
    for dtype, rate in machine.attention_flops_per_s.items():
        label = f"attention of {MANY} new tokens, {dtype}, TFLOP/s"
        add(label, f"{rate / 1e12:.3f}", f"attention_flops_per_s {dtype}")
    for dtype, seconds in machine.layer_overhead_s.items():
        more = machine.token_overhead_s[dtype]
        shown = f"{seconds * 1e6:.1f} + {more * 1e6:.1f} a token"
        add(f"overhead of a layer, {dtype}, us", shown, f"layer_overhead_s {dtype}")
    for between, link in (("ranks", machine.link), ("nodes", machine.node_link)):
        if link is not None:
            label = f"all-reduce between {between} ({d['collectives']})"
            add(f"{label}, latency, us", f"{link.latency_s * 1e6:.1f}", "link")
            add(f"{label}, GB/s", f"{link.bytes_per_s / 1e9:.2f}", "")
    console = make_console()
    console.print(table)
    console.print("spread: slowest over fastest repetition of the measurement, minus 1")
    console.print(f"written to {out}")
