"""The flags of `magicdec inflight`, and the checks of them that need no model. Imports no torch.

Must not know how requests are served.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import add_section, read_sections
from magicdec.cli.front.run import MODEL_PREFIX, NONE, config_of_draft, last_value
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.serving.flover_ini import FloverIni, read_flover_ini
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.names import BATCHINGS, COMPACTION
from magicdec.records.writing import check_files
from magicdec.report.figures.style import check_picture
from magicdec.serving.metrics import GOODPUT_OF, parse_goodput
from magicdec.serving.options import (
    DRAFTED,
    WINDOWED,
    Pass,
    ServingOptions,
    check_compactions,
    check_modes,
    make_passes,
)
from magicdec.workload.arrivals import FORMS, TRACE, parse_arrival
from magicdec.workload.request_shapes import (
    DEFAULT_GEN_LEN,
    DEFAULT_NUM_REQUESTS,
    DEFAULT_PROMPT_LEN,
    make_shapes,
)
from magicdec.workload.request_shapes import FORMS as LENGTH_FORMS

WINDOW_MS = 1000.0
SWEPT = "poisson:1"  # what --sweep_rate stretches
EVERYDAY = (
    *("--model", "--dataset", "--num_requests", "--arrival", "--prefix_len", "--gen_len"),
    *("--B", "--prefill_tokens", "--modes", "--draft", "--temperature", "--goodput"),
    *("--nproc", "--out"),
)
SECTIONS = {  # of a run's config, and which of its fields have a flag here
    "model": None,
    "draft": ("rank_group", "draft_dtype"),
    "parallel": None,
    "attention": None,
    "decoding": ("num_draft_tokens", "cuda_graphs"),
    "kv": None,
    "sampling": None,
    "workload": ("dataset", "seed"),
}


@dataclass(frozen=True)
class Asked:
    """What the command line and the file of `--ini` asked for."""

    config: RunConfig
    options: ServingOptions
    passes: tuple[Pass, ...]
    rates: tuple[float, ...] | None  # of `--sweep_rate`; empty: they are searched
    out: Path
    plot: Path | None
    view: Path | None
    ini: FloverIni


def parse(argv: Sequence[str], launch: Launch) -> Asked:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    ini, file = FloverIni(), last_value(argv, "--ini")
    if file is not None:
        ini = read_flover_ini(Path(file), lambda flag: last_value(argv, flag) is not None)
    words = [*ini.words, *argv]
    base = config_of_draft(last_value(words, "--draft") or NONE)
    base = dataclasses.replace(base, decoding=dataclasses.replace(base.decoding, ignore_eos=True))
    parser = build_parser(base)
    args, given = parser.read(words)
    config = config_of(parser, base, args, given, launch)
    if args.plot is not None:
        check_picture("--plot", args.plot)
    rates = None if args.sweep_rate is None else take_rates(args, argv)
    check_modes(args.modes)
    check_compactions(args.compaction, args.modes)
    options = options_of(args, config.workload.seed)
    if rates is not None and len(options.shapes) < 2:
        raise ValueError("--num_requests 1 is too small for --sweep_rate, which needs 2")
    if rates is not None and len(args.compaction) > 1:
        raise ValueError("--compaction names several; --sweep_rate serves under one")
    if launch.rank == 0:
        check_files({"--out": args.out, "--plot": args.plot, "--view": args.view})
    passes = make_passes(args.modes, config.decoding.drafter is not None, args.compaction)
    passes = passes if rates is None else passes[-1:]
    return Asked(config, options, tuple(passes), rates, args.out, args.plot, args.view, ini)


def config_of(
    parser: Parser, base: RunConfig, args: argparse.Namespace, given: set[str], launch: Launch
) -> RunConfig:
    """The config of the engine. Raises ValueError for a flag that would do nothing."""
    config = read_sections(base, args)
    if config.decoding.drafter != "model":
        config = dataclasses.replace(config, draft=None)
    config.check(find_world_size(config.parallel.nproc, launch))
    refuse_ignored(config, parser, given)
    return config


def take_rates(args: argparse.Namespace, typed: Sequence[str]) -> tuple[float, ...]:
    """The rates of `--sweep_rate`, which replaces `--arrival` and `--modes`. Raises ValueError if
    the user typed one of these, and for a rate that is not positive."""
    for rate in args.sweep_rate:
        if not 0 < rate < math.inf:
            raise ValueError(f"--sweep_rate {rate} is out of range; it must be larger than 0")
    for flag in ("--arrival", "--modes"):
        if last_value(typed, flag) is not None:
            raise ValueError(
                f"{flag} does nothing with --sweep_rate, which serves Poisson arrivals in flight; "
                "leave it out"
            )
    args.arrival, args.modes = SWEPT, [DRAFTED]
    return tuple(args.sweep_rate)


def options_of(args: argparse.Namespace, seed: int) -> ServingOptions:
    """What is served. Raises ValueError for flags that exclude each other, and for a malformed
    trace."""
    if args.window_ms is not None and WINDOWED not in args.modes:
        raise ValueError(f"--window_ms {args.window_ms} does nothing: --modes has no {WINDOWED}")
    arrival = parse_arrival(args.arrival)
    shapes = make_shapes(arrival, args.num_requests, args.prefix_len, args.gen_len, seed)
    window_ms = WINDOW_MS if args.window_ms is None else args.window_ms
    return ServingOptions(
        arrival=args.arrival,
        gen_len=None if arrival.trace else args.gen_len or DEFAULT_GEN_LEN,
        max_concurrency=args.max_concurrency,
        prefill_tokens=args.prefill_tokens,
        window_ms=window_ms if WINDOWED in args.modes else None,
        block_tokens=args.block_tokens,
        cache_tokens=args.cache_tokens,
        goodput=parse_goodput(args.goodput or []),
        shapes=tuple(shapes),
    )


def build_parser(base: RunConfig) -> Parser:
    parser = Parser(
        description="Serve requests that arrive over time: one after the other, in static and "
        "dynamic batches, and in flight. All tokens are compared.",
        everyday=EVERYDAY,
    )
    parser.add_argument("--ini", type=Path, metavar="FILE",
        help="take the model, the requests and the sampling from a configuration file of Flover; "
        "flags on the command line win")  # fmt: skip
    for section, fields in SECTIONS.items():
        add_section(parser, section, getattr(base, section), only=fields)
    add_requests(parser)
    add_serving(parser)
    add = parser.add_argument_group("output").add_argument
    add("--view", type=Path, metavar="FILE",
        help="write the last frame of the live display of each batching to this text file. The "
        "display itself is shown on a terminal only")  # fmt: skip
    add("--plot", type=Path, metavar="FILE",
        help="draw when each request waited, was prefilled and decoded, for each batching; with "
        "--sweep_rate, the rate served and times to first token at each rate; .png, .svg or .pdf",
    )  # fmt: skip
    add("--out", type=Path, default=Path("results/runs.jsonl"), metavar="FILE",
        help="append a record for each batching, one JSON line [results/runs.jsonl]",
    )  # fmt: skip
    return parser


def add_requests(parser: Parser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--num_requests", type=int, metavar="N",
        help=f"requests to serve [{DEFAULT_NUM_REQUESTS}; with a trace, all of it]")  # fmt: skip
    add("--arrival", default="poisson:100", metavar="PROCESS",
        help=f"when requests arrive: {FORMS}. MS is the mean time between two arrivals. A line of "
        f"a {TRACE} is a JSON object with arrival_ms, prompt_len and output_len [poisson:100]",
    )  # fmt: skip
    add("--prefix_len", metavar="LENGTH",
        help=f"prompt tokens of each request: {LENGTH_FORMS} [{DEFAULT_PROMPT_LEN}; with a trace, "
        "its own]")  # fmt: skip
    add("--gen_len", metavar="LENGTH",
        help=f"output tokens of each request, past any end token: {LENGTH_FORMS} "
        f"[{DEFAULT_GEN_LEN}; with a trace, its own]")  # fmt: skip


def add_serving(parser: Parser) -> None:
    add = parser.add_argument_group("serving").add_argument
    add("--modes", nargs="+", default=list(BATCHINGS), metavar="NAME",
        help=f"batchings to compare, of {', '.join(BATCHINGS)}; the tokens of the first are the "
        f"reference [{' '.join(BATCHINGS)}]")  # fmt: skip
    add("--sweep_rate", nargs="*", type=float, metavar="RATE",
        help="serve the requests in flight at each of these rates, as Poisson arrivals a second; "
        "without a RATE, find the largest rate that is sustained")  # fmt: skip
    add("--draft", default=NONE, metavar="DRAFT",
        help=f"serve the requests once more, {DRAFTED}, with drafts by the model itself (self), by "
        f"a smaller model ({MODEL_PREFIX}NAME), or from the text so far (ngram) [{NONE}]",
    )  # fmt: skip
    add("--B", type=int, dest="max_concurrency", default=8, metavar="N",
        help="requests that are prefilled or decoded together at most [8]")  # fmt: skip
    add("--prefill_tokens", type=int, default=512, metavar="N",
        help="prompt tokens that a step prefills at most, beside its decoding [512]")  # fmt: skip
    add("--compaction", nargs="+", default=[COMPACTION], metavar="NAME",
        help="how the rows of the running batch stay dense: by an index of the rows (gather), by "
        "moving the fewest rows into a contiguous window (window), or not at all, so that rows "
        "that have ended are computed for nothing (none). Requests in flight are served under each "
        f"that is named; all else takes the first [{COMPACTION}]")  # fmt: skip
    add("--window_ms", type=float, metavar="MS",
        help=f"{WINDOWED} batching: how long the first request of a batch waits for others "
        f"[{WINDOW_MS:.0f}]")  # fmt: skip
    add("--block_tokens", type=int, default=256, metavar="N",
        help="tokens of a block of the KV cache, which a request takes as it grows [256]",
    )  # fmt: skip
    add("--cache_tokens", type=int, metavar="N",
        help="tokens that the KV cache holds of all requests together; if it runs out, the "
        "youngest request is preempted. Default: enough for every request to its end")  # fmt: skip
    add("--goodput", nargs="+", metavar="METRIC:MS",
        help="count the requests a second that keep all of these bounds, such as ttft:500 tpot:50; "
        f"of {', '.join(GOODPUT_OF)}")  # fmt: skip
