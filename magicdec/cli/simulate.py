"""`magicdec simulate`: what decoding on a pipeline of stages would yield, in virtual time.
`simulator/` simulates, and makes the records and their tables.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    ClusterSection,
    OutputSection,
    PictureSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.cost_model.curves import AcceptanceSection, conditional_rate
from magicdec.distributed.groups import read_launch
from magicdec.figures import check_picture
from magicdec.pipelined_speculation.options import NUM_CANDIDATES, Options
from magicdec.records.reading import load_records
from magicdec.records.record import append_records
from magicdec.records.writing import check_files
from magicdec.simulator.machine import Cluster, Machine, divisions
from magicdec.simulator.run import (
    MODES,
    STEADY_TOKENS,
    WITHOUT_DRAFTS,
    SimulatedMetrics,
    SimulationRecord,
    Work,
    run_mode,
)
from magicdec.simulator.showing import draw_chart, tables
from magicdec.simulator.simulation import Trace
from magicdec.simulator.text import draw_ranks, replay_ranks
from magicdec.tables import print_tables

EVERYDAY = (
    *("--stages", "--nodes", "--stage_ms", "--model_ms", "--link_ms", "--draft_ms", "--gamma"),
    *("--np", "--acceptance", "--conditional_acceptance", "--gen_len", "--modes", "--plot"),
    "--out",
)
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
    prefill_ms: float | None = setting(
        None,
        "Ms that a stage computes for the prompt; with --model_ms, ms of one node for all of it. "
        "Default: as for one token.",
        least=0,
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
    cancel_ms: float | None = setting(
        None, "Ms until a stage knows that a run is cancelled. Default: --link_ms.", least=0
    )
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
    draft_probs: tuple[float, ...] = setting(
        (0.7, 0.2, 0.05),
        "Probabilities that the draft gives its candidates, at every place.",
        metavar="P",
        least=0,
        most=1,
    )
    gen_len: int | None = same(WorkloadSection, "gen_len", least=2)
    lanes: int = same(Options, "lanes")
    ring_requests: int | None = setting(
        None, "Requests at the same time in the ring. Default: one for each stage.", least=1
    )
    seed: int = same(WorkloadSection, "seed")
    modes: tuple[str, ...] | None = setting(
        None, "Ways to decode that are simulated. Default: all.", choices=MODES
    )
    out: Path | None = same(OutputSection, "results", None, is_default=True)

    def check(self, given: Collection[str]) -> None:
        """Raises ValueError, naming the flag, for flags that exclude each other or do nothing.
        `given` are the names of those that the user gave."""
        for name in ("draft_probs", "conditional_acceptance"):
            values = getattr(self, name) or ()
            if sum(values) > 1 + 1e-9:
                shown = " ".join(f"{value:g}" for value in values)
                raise ValueError(f"--{name} {shown}: the sum of these must be at most 1")
        if tuple(sorted(self.draft_probs, reverse=True)) != self.draft_probs:
            raise ValueError("--draft_probs must fall from the first candidate to the last")
        if len(self.draft_probs) > NUM_CANDIDATES:
            raise ValueError(
                f"--draft_probs has {len(self.draft_probs)} values; at most {NUM_CANDIDATES}"
            )
        ranks = len(self.conditional_acceptance or ())
        if ranks > len(self.draft_probs):
            raise ValueError(
                f"--conditional_acceptance has {ranks} values, more than --draft_probs"
            )
        if len(self.acceptance or ()) > 1:
            raise ValueError("--acceptance has several values; a simulation takes one")
        if (self.nodes is None) != (self.model_ms is None):
            raise ValueError("--nodes and --model_ms go together; give both or neither")
        if self.nodes is not None and self.stage_ms is not None:
            raise ValueError("--stage_ms does nothing with --model_ms; leave it out")
        if self.nodes is None and "all_reduce_ms" in given:
            raise ValueError("--all_reduce_ms does nothing without --nodes; leave it out")
        if self.plot_ms is not None and self.plot is None:
            raise ValueError("--plot_ms does nothing without --plot; leave it out")
        if self.plot is not None:
            check_picture("--plot", self.plot)
        check_files({"--plot": self.plot, "--out": self.out})


def build_parser() -> Parser:
    return Parser(
        "Simulate decoding on a pipeline of stages, in virtual time: one token after the other, "
        "synchronous speculation, asynchronous pipelined speculation, and the recurrent ring. "
        "Several values of --stages or --nodes compare clusters. No model runs.",
        {"simulation": SimulationSection(), "speculation": Options()},
        ONLY,
        everyday=EVERYDAY,
    )


BITS_PER_S = 1e9 / 8  # bytes a second of 1 Gbit/s
WORK = (
    *("acceptance", "conditional_acceptance", "acceptance_gamma", "draft_probs", "gen_len"),
    *("lanes", "ring_requests", "seed"),
)
CHART_STAGES = 40  # times the slowest stage: what a chart shows
DEFAULT_STAGES, DEFAULT_STAGE_MS, DEFAULT_ACCEPTANCE = 4, 20.0, "0.8"


Simulation = tuple[int | None, Machine, str, SimulatedMetrics]
"""The nodes (None where the stages were given by themselves), their machine, the mode, and what
came out."""


def main() -> NoReturn:
    launch = read_launch()
    try:
        values = build_parser().read(sys.argv[1:])
        args, options = values[SimulationSection], values[Options]
        args.check({name.partition(".")[2] for name in values.given})
        machines, work = make_machines(args), make_work(args)
        records = make_records(simulate_all(machines, options, work, args), options, args)
        if args.out is not None:
            append_records("--out", args.out, records)
    except ValueError as error:
        refuse(error, launch)
    print_tables(tables(records))
    sys.exit(0)


def simulate_all(
    machines: Sequence[tuple[int | None, Machine]],
    options: Options,
    work: Work,
    args: SimulationSection,
) -> Iterator[Simulation]:
    """Every mode on every machine. One machine alone is drawn if that was asked for; of several, a
    few tokens of each request tell the speed of modes without drafts."""
    short = replace(work, gen_len=min(work.gen_len, STEADY_TOKENS))
    traces: dict[str, Trace] = {}
    modes = [mode for mode in MODES if args.modes is None or mode in args.modes]
    for nodes, machine in machines:
        for mode in modes:
            is_short = len(machines) > 1 and mode in WITHOUT_DRAFTS
            traces[mode], metrics = run_mode(mode, machine, options, short if is_short else work)
            yield nodes, machine, mode, metrics
    if args.plot is not None:
        until_ms = args.plot_ms or 1e3 * CHART_STAGES * max(machines[0][1].stage_s)
        draw_chart("--plot", args.plot, traces, until_ms / 1e3)


def make_records(
    simulations: Iterable[Simulation], options: Options, args: SimulationSection
) -> list[SimulationRecord]:
    """A record for each machine and mode."""
    speculation = asdict(options)
    del speculation["mode"], speculation["lanes"]
    shared = {"options": speculation, "work": {name: getattr(args, name) for name in WORK}}
    return [
        SimulationRecord(
            config={"mode": mode, "nodes": nodes, "machine": asdict(machine), **shared},
            metrics=metrics,
        )
        for nodes, machine, mode, metrics in simulations
    ]


def make_machines(args: SimulationSection) -> list[tuple[int | None, Machine]]:
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
    if args.nodes is not None and args.model_ms is not None:
        cluster = Cluster(args.model_ms / 1e3, args.layers, args.all_reduce_ms / 1e3, base)
        machines: list[tuple[int | None, Machine]] = [
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


def _equal_stages(base: Machine, count: int, times_ms: Sequence[float], layers: int) -> Machine:
    """Stages with the same number of layers; one time stands for all of them."""
    if len(times_ms) not in (1, count):
        raise ValueError(
            f"--stage_ms has {len(times_ms)} values for {count} --stages; give one, or one for each"
        )
    if count > layers:
        raise ValueError(f"--stages {count} is more than --layers {layers}")
    stage_s = tuple(time / 1e3 for time in times_ms) * (count // len(times_ms))
    return replace(base, stage_s=stage_s, layers=max(1, layers // count))


def make_work(args: SimulationSection) -> Work:
    """What is decoded. Raises ValueError for an acceptance that cannot be."""
    gen_len = args.gen_len or DEFAULT_GEN_LEN
    ranks = _ranks(args, gen_len * args.lanes)
    return Work(ranks, args.draft_probs, gen_len, args.lanes, args.ring_requests)


def _ranks(args: SimulationSection, length: int) -> list[int]:
    if args.conditional_acceptance is not None:
        return draw_ranks(args.conditional_acceptance, length, args.seed)
    (text,) = args.acceptance or (DEFAULT_ACCEPTANCE,)
    try:
        rate = float(text)
    except ValueError:
        return replay_ranks(_recorded_steps(Path(text)), length, args.seed)
    if not 0 <= rate <= 1:
        raise ValueError(f"--acceptance {text} is not between 0 and 1")
    return draw_ranks([conditional_rate(rate, args.acceptance_gamma)], length, args.seed)


def _recorded_steps(path: Path) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each step of a file's records, row by row. Raises ValueError,
    naming the flag, if no record has any."""
    steps = [
        (count, accepted[row])
        for record in load_records(path)
        for samples in (record.samples or {}).values()
        for counts, batch in zip(
            samples.num_drafted or (), samples.num_accepted or (), strict=False
        )
        for row in range(max(map(len, batch), default=0))
        for count, accepted in zip(counts, batch, strict=True)
        if count and row < len(accepted)
    ]
    if not steps:
        raise ValueError(f"--acceptance {path}: no record has accepted counts")
    return steps
