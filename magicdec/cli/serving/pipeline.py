"""`magicdec pipeline`: pipelined speculation on ranks that hold a model's layers (Butler et al.
2024, PipeInfer), beside synchronous speculation and plain decoding on the same stages.

    magicdec pipeline --nproc 3 --layer_split 0.5,0.5/1.0 --modes sequential sync async
    torchrun --nproc_per_node 2 tests/pipeline_benchmark.py --layer_split 0,1.0/head

Owns the flags of the command and its steps. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.flags import add_section, read_sections, run_on_ranks
from magicdec.cli.front.run import last_value
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_roles
from magicdec.cli.serving.common_flags import add_files, add_requests
from magicdec.cli.serving.drafter import (
    DEFAULT_DRAFTER,
    DRAFTERS,
    config_of_drafter,
    settle_draft,
    without_model,
)
from magicdec.cli.serving.steps import Kept, announce, conclude, run_command
from magicdec.cli.simulate_flags import add_speculation, make_options
from magicdec.config.run_config import RunConfig
from magicdec.console import labelled, spinner
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.watching.watch import watch_ranks
from magicdec.names import SEQUENTIAL
from magicdec.pipelined_run.options import SpeculationOptions, read_modes
from magicdec.pipelined_run.spans import trace_events
from magicdec.pipelined_speculation.options import MODES
from magicdec.records.writing import check_files, write_text
from magicdec.report.figures.style import check_picture
from magicdec.workload.arrivals import BURST, Arrival
from magicdec.workload.request_shapes import make_shapes

if TYPE_CHECKING:
    from magicdec.pipelined_run.layout import Layout
    from magicdec.pipelined_run.measured.measure import Traces

EVERYDAY = (
    *("--model", "--draft", "--dataset", "--layer_split", "--modes", "--gamma", "--pa"),
    *("--num_requests", "--prefix_len", "--gen_len", "--temperature", "--nproc", "--plot"),
    *("--trace", "--out"),
)
SECTIONS = {  # of a run's config, and which of its fields have a flag here
    "model": None,
    "parallel": ("device", "collectives", "threads", "nproc"),
    "attention": None,
    "decoding": ("ignore_eos",),
    "draft": ("draft_dtype",),
    "kv": None,
    "sampling": ("temperature", "top_k", "top_p", "min_p", "seed"),
    "workload": ("dataset", "seed"),
}
FILES = (  # (flag, metavar, help text)
    ("--plot", "FILE",
     "draw the passes of this command as bars: the speed of a request, its time to the first "
     "token, and the time between commits; .png, .svg or .pdf"),
    ("--trace", "FILE",
     "write what every rank did when in the Chrome trace format, for chrome://tracing or "
     "ui.perfetto.dev"),
)  # fmt: skip
EMULATION = (  # (flag, metavar, help text)
    ("emulate_stage_ms", "MS", "stages sleep for so long for a run of any size, in place of "
     "computing. Default: stages compute"),
    ("emulate_link_ms", "MS", "messages and cancellations arrive later by so much. Default: as "
     "fast as the link is"),
    ("emulate_draft_ms", "MS", "a step of the emulated drafter takes so long. Default: no time"),
    ("emulate_acceptance", "A", "in place of --draft: each drafted token is what the target "
     "writes with this probability, which needs the baseline or emulated stages. Default: "
     "--draft drafts"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    config: RunConfig
    options: SpeculationOptions
    out: Path
    plot: Path | None
    trace: Path | None


def main() -> NoReturn:
    """Serve the requests in every pass, and print one table."""
    run_command(serve)


def serve(launch: Launch, words: Sequence[str]) -> int:
    """The whole command on this rank. Returns its exit code."""
    asked = parse(words, launch)
    asked = replace(asked, config=with_local_models(asked.config))
    check = partial(check_roles, asked.config, asked.options.layer_split)
    run_on_ranks(asked.config.parallel.nproc, words, launch, check)
    watch_ranks(launch)
    with spinner("preparing", launch.rank == 0):
        from magicdec.pipelined_run.prepare import prepare

        prepared = prepare(asked.config, asked.options, launch)
    if launch.rank == 0 and prepared.split:
        print(labelled("split", prepared.split))
    if launch.rank == 0 and prepared.transport is not None:
        print(labelled("messages", prepared.transport.describe()))
    announce(prepared.run)
    from magicdec.pipelined_run.measured.measure import measure

    kept = Kept(asked.out)
    records, traces = measure(prepared, kept.append)
    if launch.rank != 0:
        return 0
    from magicdec.pipelined_run.measured.bars import print_table

    print_table(records)
    if asked.plot is not None:
        from magicdec.pipelined_run.measured.bars import draw_bars

        draw_bars("--plot", asked.plot, [records])
    if asked.trace is not None:
        write_trace(asked.trace, traces, prepared.layout)
    return conclude(kept, records)


def write_trace(path: Path, traces: Traces, layout: Layout) -> None:
    """Raises ValueError if the file cannot be written."""
    names = [f"rank {rank}: {layout.describe(rank)}" for rank in range(layout.world_size)]
    write_text("--trace", path, json.dumps({"traceEvents": trace_events(traces, names)}))


def parse(argv: Sequence[str], launch: Launch) -> Asked:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    base = config_of_drafter(last_value(argv, "--draft") or DEFAULT_DRAFTER)
    parser = build_parser(base)
    args, given = parser.read(argv)
    config = settle_draft(read_sections(base, args), args.draft)
    has_baseline, modes = read_modes(args.modes)
    if args.emulate_acceptance is not None:
        config = without_model(config, parser, given, "--emulate_acceptance drafts")
    elif set(modes) == {"iterative"}:
        config = without_model(config, parser, given, "--modes iterative drafts nothing")
    config.check(find_world_size(config.parallel.nproc, launch))
    refuse_ignored(config, parser, given)
    if args.emulate_stage_ms is not None and config.sampling.temperature > 0:
        raise ValueError(
            f"--temperature {config.sampling.temperature:g} does nothing with --emulate_stage_ms, "
            "whose stages choose no tokens; leave it out"
        )
    if args.emulate_stage_ms is not None:  # emulated tokens are numbers of positions
        config = replace(config, decoding=replace(config.decoding, ignore_eos=True))
    lengths = args.num_requests, args.prefix_len, args.gen_len
    shapes = make_shapes(Arrival(BURST), *lengths, config.workload.seed)
    options = SpeculationOptions(
        layer_split=args.layer_split,
        modes=modes,
        draft=args.draft,
        speculation=replace(make_options(args), lanes=args.lanes),
        has_baseline=has_baseline,
        gen_len=args.gen_len,
        shapes=tuple(shapes),
        machine=args.machine,
        **{name: getattr(args, name) for name, _, _ in EMULATION},
    )
    if args.plot is not None:
        check_picture("--plot", args.plot)
    if launch.rank == 0:
        check_files({"--out": args.out, "--plot": args.plot, "--trace": args.trace})
    return Asked(config, options, args.out, args.plot, args.trace)


def build_parser(base: RunConfig) -> Parser:
    parser = Parser(
        description="Divide a model by its layers among ranks, and let a draft run ahead of it: "
        "asynchronous pipelined speculation, whose wrong runs are cancelled inside the stages, "
        "beside synchronous speculation and plain decoding. All tokens are compared with those of "
        "one process.",
        everyday=EVERYDAY,
    )
    for section, fields in SECTIONS.items():
        add_section(parser, section, getattr(base, section), only=fields)
    add_requests(parser)
    add_pipeline(parser)
    add_speculation(parser.add_argument_group("speculation"))
    add = parser.add_argument_group("emulation").add_argument
    for name, metavar, text in EMULATION:
        add(f"--{name}", type=float, metavar=metavar, help=text)
    add_files(parser, "results/runs.jsonl", FILES)
    return parser


def add_pipeline(parser: Parser) -> None:
    add = parser.add_argument_group("pipeline").add_argument
    add("--layer_split", metavar="SPLIT",
        help="layers of each rank as counts or shares, then a slash and the place of the draft: "
        "0.1,0.4,0.5/1.0 has the draft on a rank of its own, which is the last, 0.5,0.5/0.5,0.5 on "
        "the last two, which share its layers by tensor parallelism, and 0.5,0.5/head on the "
        "first. A first share of 0 is a head without layers. auto in place of "
        "the stages measures times of layers before the run and minimises the slowest stage "
        "(auto/1.0). Default: equal shares of all ranks, the draft on the head")  # fmt: skip
    add("--machine", type=Path, metavar="FILE",
        help="the file that `magicdec probe` wrote with as many ranks: --layer_split auto takes "
        "its times from there. Default: it measures them")  # fmt: skip
    add("--modes", nargs="+", default=[SEQUENTIAL, "async"], metavar="NAME",
        help=f"ways to decode, of {', '.join((SEQUENTIAL, *MODES))}. {SEQUENTIAL} is one process "
        "that decodes one request after the other; the tokens of the others are compared with its "
        f"tokens, and are not checked without it [{SEQUENTIAL} async]")  # fmt: skip
    add("--draft", default=DEFAULT_DRAFTER, metavar="NAME",
        help=f"what drafts, of {DRAFTERS}: a smaller model, the whole target on the draft's ranks, "
        "or a lookup in the text. The first two read what --kv_policy says of a KV cache of their "
        f"own [{DEFAULT_DRAFTER}]")  # fmt: skip
    add("--lanes", type=int, default=1, metavar="N",
        help="requests at the same time; the others wait [1]")  # fmt: skip
