"""`magicdec inflight`: requests that arrive over time, served one after the other, in static and
dynamic batches, and in flight.

    magicdec inflight --num_requests 32 --arrival poisson:100 --output_len uniform:16:128
    magicdec inflight --arrival trace:requests.jsonl --modes static inflight --goodput ttft:500

Owns the flags and the order of the batchings. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.flags import add_section, announce_backend, read_sections, refuse
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection
from magicdec.console import make_progress, spinner
from magicdec.distributed.groups import read_launch
from magicdec.names import BASELINE, BATCHINGS
from magicdec.records.writing import append_line, check_writable, to_json
from magicdec.request import StepOutput
from magicdec.serving.metrics import GOODPUT_OF, parse_goodput
from magicdec.serving.options import WINDOWED, ServingOptions, check_modes
from magicdec.workload.arrivals import FORMS, TRACE, parse_arrival
from magicdec.workload.request_shapes import (
    DEFAULT_NUM_REQUESTS,
    DEFAULT_OUTPUT_LEN,
    DEFAULT_PROMPT_LEN,
    UNIFORM,
    make_shapes,
)

if TYPE_CHECKING:
    from magicdec.serving.record import ServingRecord
    from magicdec.setup.prepare import Prepared

WINDOW_MS = 1000.0
NO_DRAFT, DRAFTED = "none", "inflight"  # the batching that a drafter is measured under
EVERYDAY = (
    *("--model", "--dataset", "--num_requests", "--arrival", "--prefix_len", "--output_len"),
    *("--max_concurrency", "--prefill_tokens", "--modes", "--draft", "--goodput"),
    "--out",
)


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    config: RunConfig
    options: ServingOptions
    modes: tuple[str, ...]
    out: Path


def main() -> NoReturn:
    """Serve the requests under each batching, and print one table."""
    launch = read_launch()
    try:
        asked = parse(sys.argv[1:])
        asked = replace(asked, config=with_local_models(asked.config))
        with spinner("preparing", launch.rank == 0):
            from magicdec.serving.prepare import prepare

            prepared = prepare(asked.config, asked.options, launch)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(130)
    announce_backend(prepared.config, launch)
    print(f"{'memory':<10} {prepared.memory}", flush=True)
    try:
        records, num_kept = measure(prepared, asked)
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        refuse(error, launch)
    from magicdec.serving.table import print_table

    print_table(records)
    print(f"{num_kept} records appended to {asked.out}", file=sys.stderr)
    is_bad = num_kept < len(records) or any(record.metrics is None for record in records)
    sys.exit(int(is_bad))


def measure(prepared: Prepared, asked: Asked) -> tuple[list[ServingRecord], int]:
    """Serve the requests under each batching. A record is appended as soon as its batching is done,
    so that Ctrl-C costs only the one that runs. Returns the records, and how many were kept."""
    from magicdec.serving.prepare import make_server
    from magicdec.serving.recording import make_record
    from magicdec.setup.session import RankSession

    session, progress = RankSession(prepared.launch, prepared.config.parallel), make_progress(True)
    session.begin()
    prepared, server = make_server(prepared, asked.options, session.device, progress)
    server.warm_up()
    records: list[ServingRecord] = []
    num_kept = 0
    num_tokens = sum(shape.output_len - 1 for shape in asked.options.shapes)
    passes = [(mode, False) for mode in asked.modes]
    if prepared.config.decoding.drafter is not None:
        passes.append((DRAFTED, True))
    for mode, is_drafting in passes:
        if is_drafting:
            server.warm_up(is_drafting)
        with progress.task(mode, num_tokens) as advance:

            def observe(output: StepOutput, seconds: float) -> None:
                advance(sum(map(len, output.token_ids)))

            served = server.serve(mode, is_drafting, observe)
        if not records:
            reference = served
        place = prepared, asked.options, session.describe_environment()
        record = make_record(*place, mode, is_drafting, served, asked.modes[0], reference)
        num_kept += append(asked.out, record)
        records.append(record)
    return records, num_kept


def append(path: Path, record: ServingRecord) -> bool:
    """Append the record, or say why it is lost. Returns whether it was kept."""
    try:
        append_line(path, to_json(record))
    except OSError as error:
        print(f"--out {path}: {error.strerror}; the record is lost", file=sys.stderr)
        return False
    return True


def parse(argv: Sequence[str]) -> Asked:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    parser = build_parser()
    args, given = parser.read(argv)
    drafter = None if args.draft == NO_DRAFT else args.draft
    strategy = BASELINE if drafter is None else "speculative"
    base = RunConfig(decoding=DecodingSection(strategy, drafter, ignore_eos=True))
    config, modes = read_sections(base, args), tuple(args.modes)
    config.check(world_size=1)
    for dest in sorted(given):
        reason = why_ignored(config, dest)
        if "." in dest and reason is not None:
            raise ValueError(f"{parser.flag_of(dest)} does nothing here: {reason}; leave it out")
    check_modes(modes)
    if args.window_ms is not None and WINDOWED not in modes:
        raise ValueError(f"--window_ms {args.window_ms} does nothing: --modes has no {WINDOWED}")
    arrival = parse_arrival(args.arrival)
    sizes = args.num_requests, args.prefix_len, args.output_len
    shapes = make_shapes(arrival, *sizes, config.workload.seed)
    window_ms = WINDOW_MS if args.window_ms is None else args.window_ms
    options = ServingOptions(
        arrival=args.arrival,
        output_len=None if arrival.trace else args.output_len or DEFAULT_OUTPUT_LEN,
        max_concurrency=args.max_concurrency,
        prefill_tokens=args.prefill_tokens,
        window_ms=window_ms if WINDOWED in modes else None,
        block_tokens=args.block_tokens,
        cache_tokens=args.cache_tokens,
        goodput=parse_goodput(args.goodput or []),
        shapes=tuple(shapes),
    )
    check_writable("--out", args.out)
    return Asked(config, options, modes, args.out)


def build_parser() -> Parser:
    parser = Parser(
        description="Serve requests that arrive over time: one after the other, in static and "
        "dynamic batches, and in flight. All tokens are compared. Decoding is greedy, on "
        "one rank.",
        everyday=EVERYDAY,
    )
    config = RunConfig()
    add_section(parser, "model", config.model)
    add_section(parser, "parallel", config.parallel, only=("device", "threads"))
    add_section(parser, "attention", config.attention)
    add_section(parser, "decoding", config.decoding, only=("num_draft_tokens", "cuda_graphs"))
    add_section(parser, "kv", config.kv)
    add_section(parser, "workload", config.workload, only=("dataset", "seed"))
    add = parser.add_argument_group("requests").add_argument
    add("--num_requests", type=int, metavar="N",
        help=f"requests to serve [{DEFAULT_NUM_REQUESTS}; with a trace, all of it]")  # fmt: skip
    add("--arrival", default="poisson:100", metavar="PROCESS",
        help=f"when requests arrive: {FORMS}. MS is the mean time between two arrivals. A line of "
        f"a {TRACE} is a JSON object with arrival_ms, prompt_len and output_len [poisson:100]",
    )  # fmt: skip
    add("--prefix_len", type=int, metavar="N",
        help=f"prompt tokens of each request [{DEFAULT_PROMPT_LEN}; with a trace, its own]",
    )  # fmt: skip
    add("--output_len", metavar="LENGTH",
        help="output tokens of each request, past any end token: a number, or "
        f"{UNIFORM}:LOW:HIGH [{DEFAULT_OUTPUT_LEN}; with a trace, its own]")  # fmt: skip
    add = parser.add_argument_group("serving").add_argument
    add("--modes", nargs="+", default=list(BATCHINGS), metavar="NAME",
        help=f"batchings to compare, of {', '.join(BATCHINGS)}; the tokens of the first are the "
        f"reference [{' '.join(BATCHINGS)}]")  # fmt: skip
    add("--draft", default=NO_DRAFT, choices=(NO_DRAFT, "self", "ngram"),
        help=f"serve the requests once more, {DRAFTED}, with drafts by the model itself (self) or "
        f"from the text so far (ngram) [{NO_DRAFT}]")  # fmt: skip
    add("--max_concurrency", "--B", type=int, default=8, metavar="N",
        help="requests that are prefilled or decoded together at most [8]")  # fmt: skip
    add("--prefill_tokens", type=int, default=512, metavar="N",
        help="prompt tokens that a step prefills at most, beside its decoding [512]")  # fmt: skip
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
    output = parser.add_argument_group("output").add_argument
    output("--out", type=Path, default=Path("results/serving.jsonl"), metavar="FILE",
        help="append a record for each batching, one JSON line [results/serving.jsonl]",
    )  # fmt: skip
    return parser
