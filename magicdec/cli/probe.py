"""`magicdec probe`: measures the rates of this machine into a file for `magicdec plan`.

    magicdec probe --nproc 2 --out machine.json

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from magicdec.cli.flags import run_on_ranks, run_ranks
from magicdec.cli.parsing.parser import Parser
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection, WrittenSection
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.output.tables import Column, Table
from magicdec.output.writing import check_writable
from magicdec.records.metric_tables import fixed


def run(words: Sequence[str], launch: Launch) -> int:
    """Measures on all ranks. Rank 0 writes the file and prints the results."""
    out, config = parse(words)
    nproc = config.parallel.nproc
    config.check(find_world_size(nproc, launch))
    run_on_ranks(nproc, words, launch)
    from magicdec.hardware.environment import probe_machine
    from magicdec.predict.probe import measure

    machine = probe_machine(launch)
    resolved = resolve(config, machine)
    results = measure(resolved, machine, launch)
    if launch.rank == 0:
        results.save(out)
        print_machine(results, out)
        if results.busy:
            print(
                f"warning: {results.busy}; the rates will be too low. Probe again when nothing "
                "else runs.",
                file=sys.stderr,
                flush=True,
            )
    return 0


main = partial(run_ranks, run)


def build_parser() -> Parser:
    return Parser(
        "Measure memory bandwidth, FLOP/s, all-reduce and overhead, and write them to a file. "
        "Several ranks measure at the same time.",
        {"probe": WrittenSection(), "parallel": ParallelSection()},
        {"parallel": ("threads", "device", "nproc")},
        gone={
            "--attention": "`magicdec latency --attention A B` measures attention backends, in "
            "whole forwards"
        },
    )


def parse(words: Sequence[str]) -> tuple[Path, RunConfig]:
    """The file to write, and the ranks. Raises ValueError for unknown and impossible flags."""
    values = build_parser().read(words)
    out = values[WrittenSection].out or Path("machine.json")
    check_writable("--out", out)
    return out, RunConfig(parallel=values[ParallelSection])


def print_machine(machine: MachineFile, out: Path) -> None:
    from magicdec.predict.probe import MANY

    by_dtype = (  # (label, name of the rates, digits, scale)
        ("matrix product, {}, TFLOP/s", "flops_per_s", 3, 1e-12),
        ("attention over a long cache, {}, GB/s", "kv_bytes_per_s", 1, 1e-9),
        (f"attention of {MANY} new tokens, {{}}, TFLOP/s", "attention_flops_per_s", 3, 1e-12),
        ("overhead of a layer, {}, us", "layer_overhead_s", 1, 1e6),
        ("overhead of a layer for each further token, {}, us", "token_overhead_s", 1, 1e6),
    )
    d = machine.description
    rows: list[tuple[object, ...]] = []

    def add(label: str, value: float, digits: int, scale: float, spread: str) -> None:
        spread_cell = fixed(machine.spreads.get(spread), 0, " %", 100)
        rows.append((label, fixed(value, digits, scale=scale), spread_cell))

    add("read bandwidth, GB/s", machine.read_bytes_per_s, 1, 1e-9, "read_bytes_per_s")
    for label, name, digits, scale in by_dtype:
        for dtype, rate in getattr(machine, name).items():
            add(label.format(dtype), rate, digits, scale, f"{name} {dtype}")
    for between, link in (("ranks", machine.link), ("nodes", machine.node_link)):
        if link is not None:
            label = f"all-reduce between {between} ({d['collectives']})"
            add(f"{label}, latency, us", link.latency_s, 1, 1e6, "link")
            add(f"{label}, GB/s", link.bytes_per_s, 2, 1e-9, "")
    Table(
        [Column("", is_text=True), "measured", "spread"],
        rows,
        f"{d['gpu'] or d['cpu']}: ranks {d['world_size']} x threads {d['threads']}, of one rank",
        below=[
            "spread: slowest over fastest repetition of the measurement, minus 1",
            f"written to {out}",
        ],
    ).print()
