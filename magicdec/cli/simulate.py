"""`magicdec simulate`: decoding on a pipeline of stages in virtual time (`predict/simulator/`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.cli.parsing.record_files import given_flags
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    ClusterSection,
    OutputSection,
    PictureSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.output.figures import check_picture
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_files, check_record_file
from magicdec.predict.curves import AcceptanceSection, conditional_rate, parse_acceptance
from magicdec.predict.simulator.run import (
    MODES,
    STEADY_TOKENS,
    WITHOUT_DRAFTS,
    SimulationRecord,
    Work,
    draw_chart,
    run_mode,
    tables,
)
from magicdec.predict.simulator.simulation import (
    Cluster,
    SimulatedMachine,
    SimulationTrace,
    divisions,
)
from magicdec.records.record import append_records
from magicdec.systems.modes import parse_names
from magicdec.systems.pipeinfer.drawn_drafts import draw_right
from magicdec.systems.pipeinfer.options import Options

EVERYDAY = (
    *("--stages", "--nodes", "--stage_ms", "--model_ms", "--link_ms", "--draft_ms", "--gamma"),
    *("--acceptance", "--conditional_acceptance", "--gen_len", "--modes", "--plot", "--out"),
)
BITS_PER_S = 1e9 / 8  # bytes a second of 1 Gbit/s
MOST_TOKENS = 1_000_000  # of all requests; every token is simulated
WORK = ("acceptance", "conditional_acceptance", "acceptance_gamma", "gen_len", "lanes", "seed")
CHART_STAGES = 40  # times the slowest stage: what a chart shows
DEFAULT_STAGES = 4
DEFAULT_STAGE_MS = 20.0
DEFAULT_ACCEPTANCE = "0.8"
ONLY = {"speculation": [name for name in vars(Options()) if name != "lanes"]}


@dataclass(frozen=True)
class SimulationSection(PictureSection, AcceptanceSection, ClusterSection):
    """The machine, the work and the files of a simulation."""

    stage_ms: tuple[float, ...] | None = setting(
        None,
        "Ms that a stage computes for one token: one value for all stages, or one for each. "
        "Default: 20.",
        above=0,
    )
    layers: int = setting(
        32, "Layers of the model. A stage looks for cancellations between its layers.", least=1
    )
    row_cost: float = setting(
        0.0, "Share of the time of one token that each further token of a run adds.", least=0
    )
    link_ms: float = setting(
        1.0,
        "Delay of a message between stages, and from the last stage to the head, in ms.",
        least=0,
    )
    link_gbit: float | None = setting(
        None, "Bandwidth of a link in Gbit/s. Default: without limit.", above=0
    )
    row_bytes: int = setting(8192, "Bytes of the hidden states of one token.", least=1)
    draft_ms: float = setting(4.0, "Ms of one step of the drafter.", least=0)
    model_ms: float | None = setting(
        None,
        "Ms of one node for one token through the whole model; needed with --nodes.",
        above=0,
    )
    all_reduce_ms: float = setting(
        0.05,
        "Ms of an all-reduce between the nodes of a stage, two of which each layer needs.",
        least=0,
    )
    gen_len: int | None = same(WorkloadSection, "gen_len", least=2)
    lanes: int = same(Options, "lanes")
    seed: int = same(WorkloadSection, "seed")
    modes: tuple[str, ...] | None = setting(
        None, "Ways to decode that are simulated. Default: all.", choices=MODES, parse=parse_names
    )
    out: Path | None = same(OutputSection, "results", None, is_default=True)


def check(args: SimulationSection, values: ParsedValues) -> None:
    """Raises ValueError, naming the flag, for flags that exclude each other or do nothing."""
    for flag, rates in (
        ("--acceptance", args.acceptance),
        ("--conditional_acceptance", args.conditional_acceptance),
    ):
        if len(rates or ()) > 1:
            raise ValueError(f"{flag} has several values; a simulation takes one")
    if (args.nodes is None) != (args.model_ms is None):
        raise ValueError("--nodes and --model_ms go together; give both or neither")
    if args.nodes is None:
        values.refuse_given(["simulation.all_reduce_ms"], "it is for --nodes")
    else:
        values.refuse_given(["simulation.stage_ms"], "--model_ms says it")
    if args.plot is None:
        values.refuse_given(["simulation.plot_ms"], "it is for --plot")
    else:
        check_picture("--plot", args.plot)
    check_files({"--plot": args.plot})
    if args.out is not None:
        check_record_file("--out", args.out)


def simulate(values: ParsedValues) -> int:
    args = values[SimulationSection]
    options = values[Options]
    check(args, values)
    machines = make_machines(args)
    work = make_work(args)
    records = list(simulate_all(machines, options, work, args, given_flags(values)))
    if args.out is not None:
        append_records("--out", args.out, records)
    print_tables(tables(records))
    return 0


def simulate_all(
    machines: Sequence[tuple[int | None, SimulatedMachine]],
    options: Options,
    work: Work,
    args: SimulationSection,
    flags: dict[str, Any],
) -> Iterator[SimulationRecord]:
    """Yields the record of every mode on every machine. One machine alone is drawn, if asked for;
    of several, a few tokens of each request tell the speed of modes without drafts."""
    short = replace(work, gen_len=min(work.gen_len, STEADY_TOKENS))
    traces: dict[str, SimulationTrace] = {}
    modes = [mode for mode in MODES if args.modes is None or mode in args.modes]
    speculation = asdict(options)
    del speculation["mode"], speculation["lanes"]
    work_of_user = {name: getattr(args, name) for name in WORK}
    shared = {"options": speculation, "work": work_of_user, "flags": flags}
    for nodes, machine in machines:
        place = {"nodes": nodes, "machine": asdict(machine)}
        for mode in modes:
            is_short = len(machines) > 1 and mode in WITHOUT_DRAFTS
            traces[mode], metrics = run_mode(mode, machine, options, short if is_short else work)
            yield SimulationRecord(config={"mode": mode, **place, **shared}, metrics=metrics)
    if args.plot is not None:
        until_ms = args.plot_ms or 1e3 * CHART_STAGES * max(machines[0][1].stage_s)
        draw_chart("--plot", args.plot, traces, until_ms / 1e3)


def make_machines(args: SimulationSection) -> list[tuple[int | None, SimulatedMachine]]:
    """(nodes, machine) pairs to simulate. Raises ValueError."""
    base = SimulatedMachine(
        stage_s=(),
        row_cost=args.row_cost,
        link_s=args.link_ms / 1e3,
        bytes_per_s=None if args.link_gbit is None else args.link_gbit * BITS_PER_S,
        row_bytes=args.row_bytes,
        cancel_s=args.link_ms / 1e3,
        draft_s=args.draft_ms / 1e3,
    )
    if args.nodes is not None and args.model_ms is not None:
        cluster = Cluster(args.model_ms / 1e3, args.layers, args.all_reduce_ms / 1e3, base)
        machines: list[tuple[int | None, SimulatedMachine]] = [
            (n, cluster.machine(n, s)) for n, s in divisions(args.nodes, args.stages, args.layers)
        ]
        if not machines:
            raise ValueError(
                f"--stages: none of these divides --nodes and is at most --layers {args.layers}"
            )
    else:
        times = args.stage_ms or (DEFAULT_STAGE_MS,)
        counts = args.stages or [len(times) if len(times) > 1 else DEFAULT_STAGES]
        machines = [(None, _equal_stages(base, count, times, args.layers)) for count in counts]
    if args.plot is not None and len(machines) > 1:
        raise ValueError(f"--plot is for one cluster, and these are {len(machines)}; leave it out")
    return machines


def _equal_stages(
    base: SimulatedMachine, count: int, times_ms: Sequence[float], layers: int
) -> SimulatedMachine:
    """A machine with equal layers a stage; one time stands for all stages."""
    if len(times_ms) not in (1, count):
        raise ValueError(
            f"--stage_ms has {len(times_ms)} values for {count} --stages; give one, or one for each"
        )
    if count > layers:
        raise ValueError(f"--stages {count} is more than --layers {layers}")
    stage_s = tuple(time / 1e3 for time in times_ms) * (count // len(times_ms))
    return replace(base, stage_s=stage_s, layers=max(1, layers // count))


def make_work(args: SimulationSection) -> Work:
    """The work. Raises ValueError for an impossible acceptance."""
    gen_len = args.gen_len or DEFAULT_GEN_LEN
    if args.conditional_acceptance is not None:
        (rate,) = args.conditional_acceptance
    else:
        (text,) = args.acceptance or (DEFAULT_ACCEPTANCE,)
        rate = conditional_rate(parse_acceptance(text), args.acceptance_gamma)
    if gen_len * args.lanes > MOST_TOKENS:
        raise ValueError(
            f"--gen_len {gen_len} x --lanes {args.lanes} are more than {MOST_TOKENS} tokens, and "
            "every token is simulated; choose fewer"
        )
    return Work(draw_right(rate, gen_len * args.lanes, args.seed), gen_len, args.lanes)


main = LoneCommand(
    simulate,
    "Simulate decoding on a pipeline of stages, in virtual time: one token after the other, "
    "synchronous speculation, asynchronous pipelined speculation, and the recurrent ring. Several "
    "values of --stages or --nodes compare clusters. No model runs.",
    {"file": ConfigFile(), "simulation": SimulationSection(), "speculation": Options()},
    only=ONLY,
    everyday=EVERYDAY,
)
