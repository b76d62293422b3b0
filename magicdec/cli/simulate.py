"""`magicdec simulate`: what decoding on a pipeline of stages would yield, in virtual time.

Owns the checks of the flags and the choice of what is simulated. `simulator/` simulates.
The tables are 80 columns wide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.simulate_flags import build_parser, check, make_options
from magicdec.cost_model.curves import conditional_rate
from magicdec.distributed.groups import read_launch
from magicdec.pipelined_speculation.options import Options
from magicdec.records.reading import load_records
from magicdec.records.writing import append_line, to_json
from magicdec.simulator.machine import Cluster, Machine, divisions
from magicdec.simulator.measured import Measured
from magicdec.simulator.modes import STEADY_TOKENS, WITHOUT_DRAFTS, Work, run_mode
from magicdec.simulator.text import draw_ranks, replay_ranks

SCHEMA_VERSION = 1
BITS_PER_S = 1e9 / 8  # bytes a second of 1 Gbit/s
WORK = (
    *("acceptance", "conditional_acceptance", "acceptance_gamma", "draft_probs", "gen_len"),
    *("num_requests", "ring_requests", "seed"),
)
CHART_STAGES = 40  # times the slowest stage: what a chart shows
DEFAULT_STAGES, DEFAULT_STAGE_MS = 4, 20.0


@dataclass(frozen=True)
class Simulated:
    """One cluster under every mode. `nodes` is None where the stages were given by themselves."""

    nodes: int | None
    machine: Machine
    measured: dict[str, Measured]


def main() -> NoReturn:
    launch = read_launch()
    try:
        args, given = build_parser().read(sys.argv[1:])
        check(args, given)
        machines = make_machines(args)
        work, options = make_work(args), make_options(args)
        found = simulate_all(machines, options, work, args)
        if args.out is not None:
            write_lines(found, options, args)
    except ValueError as error:
        refuse(error, launch)
    from magicdec.cli.simulate import print_clusters, print_modes

    if len(found) == 1:
        print_modes(found[0].machine, found[0].measured)
    else:
        print_clusters([(f.nodes, f.machine, f.measured) for f in found])
    sys.exit(0)


def simulate_all(
    machines: Sequence[tuple[int | None, Machine]],
    options: Options,
    work: Work,
    args: argparse.Namespace,
) -> list[Simulated]:
    if len(machines) == 1:
        return [simulate(*machines[0], options, work, args)]
    # Of modes without drafts, a few tokens of each request tell the speed.
    short = replace(work, gen_len=min(work.gen_len, STEADY_TOKENS))
    works = {mode: short if mode in WITHOUT_DRAFTS else work for mode in args.modes}
    return [
        Simulated(
            nodes, machine, {m: run_mode(m, machine, options, w)[1] for m, w in works.items()}
        )
        for nodes, machine in machines
    ]


def simulate(
    nodes: int | None, machine: Machine, options: Options, work: Work, args: argparse.Namespace
) -> Simulated:
    """Simulate the modes on one machine, and draw what was asked for."""
    runs = {mode: run_mode(mode, machine, options, work) for mode in args.modes}
    if args.plot is not None:
        from magicdec.simulator.gantt import draw

        shown = args.plot_ms or 1e3 * CHART_STAGES * max(machine.stage_s)
        draw("--plot", args.plot, {mode: trace for mode, (trace, _) in runs.items()}, shown / 1e3)
    return Simulated(nodes, machine, {mode: measured for mode, (_, measured) in runs.items()})


def write_lines(found: Sequence[Simulated], options: Options, args: argparse.Namespace) -> None:
    """Append a line for each cluster and mode: what was simulated and what came out."""
    work = {name: getattr(args, name) for name in WORK}
    speculation = asdict(options)
    del speculation["mode"], speculation["lanes"]
    lines = [
        to_json(
            {
                "schema_version": SCHEMA_VERSION,
                "kind": "simulation",
                "mode": mode,
                "nodes": each.nodes,
                "machine": asdict(each.machine),
                "options": speculation,
                "work": work,
                "metrics": asdict(measured),
            }
        )
        for each in found
        for mode, measured in each.measured.items()
    ]
    try:
        append_line(args.out, "\n".join(lines))
    except OSError as error:
        raise ValueError(f"--out {args.out}: {error.strerror}") from None


def make_machines(args: argparse.Namespace) -> list[tuple[int | None, Machine]]:
    """(nodes, machine) of everything that is to be simulated. Raises ValueError."""
    base = Machine(
        stage_s=(),
        prefill_s=None if args.prefill_ms is None else args.prefill_ms / 1e3,
        row_cost=args.row_cost,
        link_s=args.link_ms / 1e3,
        bytes_per_s=None if args.link_gbit is None else args.link_gbit * BITS_PER_S,
        row_bytes=args.row_bytes,
        cancel_s=(args.link_ms if args.cancel_ms is None else args.cancel_ms) / 1e3,
        draft_s=args.draft_ms / 1e3,
    )
    if args.nodes is not None:
        cluster = Cluster(args.model_ms / 1e3, args.layers, args.all_reduce_ms / 1e3, base)
        found = [
            (n, cluster.machine(n, s)) for n, s in divisions(args.nodes, args.stages, args.layers)
        ]
        if not found:
            raise ValueError(
                f"--stages: none of these divides --nodes and is at most --layers {args.layers}"
            )
        machines: list[tuple[int | None, Machine]] = [*found]
    else:
        machines = [(None, _given_stages(base, count, args)) for count in _stage_counts(args)]
    if args.plot is not None and len(machines) > 1:
        raise ValueError(f"--plot is for one cluster, and these are {len(machines)}; leave it out")
    return machines


def _stage_counts(args: argparse.Namespace) -> Sequence[int]:
    if args.stages is not None:
        return list(args.stages)
    return [len(args.stage_ms)] if len(args.stage_ms or ()) > 1 else [DEFAULT_STAGES]


def _given_stages(base: Machine, count: int, args: argparse.Namespace) -> Machine:
    times = args.stage_ms or [DEFAULT_STAGE_MS]
    if any(not 0 < time < float("inf") for time in times):
        raise ValueError("--stage_ms must be more than 0")
    if len(times) not in (1, count):
        raise ValueError(
            f"--stage_ms has {len(times)} values for {count} --stages; give one, or one for each"
        )
    if count > args.layers:
        raise ValueError(f"--stages {count} is more than --layers {args.layers}")
    each = times * (count // len(times))
    stage_s = tuple(time / 1e3 for time in each)
    return replace(base, stage_s=stage_s, layers=max(1, args.layers // count))


def make_work(args: argparse.Namespace) -> Work:
    """What is decoded. Raises ValueError for an acceptance that cannot be."""
    length = args.gen_len * max(args.num_requests, 1)
    ranks = _ranks(args, length)
    return Work(ranks, args.draft_probs, args.gen_len, args.num_requests, args.ring_requests)


def _ranks(args: argparse.Namespace, length: int) -> list[int]:
    if args.conditional_acceptance is not None:
        return draw_ranks(args.conditional_acceptance, length, args.seed)
    try:
        rate = float(args.acceptance)
    except ValueError:
        return replay_ranks(*_recorded(Path(args.acceptance)), length, args.seed)
    if not 0 <= rate <= 1:
        raise ValueError(f"--acceptance {args.acceptance} is not between 0 and 1")
    return draw_ranks([conditional_rate(rate, args.acceptance_gamma)], length, args.seed)


def _recorded(path: Path) -> tuple[list[int], list[int]]:
    """Drafted and accepted tokens of the steps of a file's records, row by row. Raises ValueError,
    naming the flag, if no record has any."""
    drafted: list[int] = []
    accepted: list[int] = []
    for record in load_records(path):
        for samples in (record.samples or {}).values():
            batches = zip(samples.num_drafted or (), samples.num_accepted or (), strict=False)
            for counts, steps in batches:
                for row in range(max(map(len, steps), default=0)):
                    for count, rows in zip(counts, steps, strict=True):
                        if count and row < len(rows):
                            drafted.append(count)
                            accepted.append(rows[row])
    if not drafted:
        raise ValueError(f"--acceptance {path}: no record has accepted counts")
    return drafted, accepted


Found = tuple[int | None, Machine, dict[str, Measured]]
MOST_LINES = 40


def print_modes(machine: Machine, measured: dict[str, Measured]) -> None:
    """One line for each mode."""
    stages = machine.num_stages
    shown = sorted({round(1e3 * time, 3) for time in machine.stage_s})
    times = f"{shown[0]:g}" if len(shown) == 1 else f"{shown[0]:g} to {shown[-1]:g}"
    print(
        f"{stages} stages of {times} ms, links {1e3 * machine.link_s:g} ms, draft "
        f"{1e3 * machine.draft_s:g} ms a step\n"
    )
    print(
        f"{'mode':<10}{'tok/s':>8}{'ratio':>7}{'TTFT':>8}{'ITL':>7}{'p99':>7}{'busy':>7}{'useful':>8}"
        f"{'accept':>8}{'runs':>6}"
    )
    base = measured.get("iterative")
    for mode, m in measured.items():
        ratio = "-" if base is None else f"{m.tokens_per_s / base.tokens_per_s:.2f}"
        accept = "-" if m.acceptance_rate is None else f"{m.acceptance_rate:.2f}"
        itl, p99 = ("-" if ms is None else f"{ms:.1f}" for ms in (m.mean_itl_ms, m.p99_itl_ms))
        print(
            f"{mode:<10}{m.tokens_per_s:>8.2f}{ratio:>7}{m.ttft_ms:>8.1f}{itl:>7}"
            f"{p99:>7}{m.busy:>7.1%}{m.useful:>8.1%}{accept:>8}{m.runs:>6}"
        )
    print(
        "\nratio: tok/s over those of iterative. TTFT, ITL and p99 (of the ITL) are in ms.\n"
        "busy: share of time in which a stage computes; useful: without cancelled runs.\n"
        "accept: accepted / launched draft tokens."
    )
    if "async" in measured:
        m = measured["async"]
        print(
            f"async: {m.invalid_runs} runs invalid, {m.superfluous_runs} superfluous, "
            f"{m.mean_in_flight:.1f} in flight;\n{m.layers_skipped} of "
            f"{m.layers_skipped + m.layers_computed} layers skipped."
        )
    if "ring" in measured:
        print("ring: tok/s of all its requests together.")


def print_clusters(found: Sequence[Found]) -> None:
    """One line for each cluster; if these are many, the best of each number of nodes by the first
    mode that speculates asynchronously, or else by the first mode."""
    modes = list(found[0][2])
    ranked = "async" if "async" in modes else modes[0]
    lines = list(found)
    if len(found) > MOST_LINES:
        groups = groupby(found, key=lambda each: each[0] or 0)
        lines = [max(group, key=lambda f: f[2][ranked].tokens_per_s) for _, group in groups]
        print(f"Of {len(found)} clusters, the fastest {ranked} one of each size; --out has all.\n")
    print(f"{'nodes':>6}{'stages':>8}{'stage ms':>10}" + "".join(f"{m:>11}" for m in modes))
    for nodes, machine, measured in lines:
        slowest = 1e3 * max(machine.stage_s)
        rates = "".join(f"{measured[mode].tokens_per_s:>11.2f}" for mode in modes)
        print(f"{nodes or machine.num_stages:>6}{machine.num_stages:>8}{slowest:>10.2f}{rates}")
    print("\nTokens a second; of the ring, those of all its requests together.")
