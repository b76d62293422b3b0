"""Compare the continuous batching of this project, OpenVINO GenAI and transformers: the same random
model, requests, greedy decoding and threads, each in a process of its own, in turn.

    python scripts/dev/bench_serving_peers.py
    python scripts/dev/bench_serving_peers.py --openvino_python VENV/bin/python --json serving.json

OpenVINO GenAI needs an environment of its own; without it, OpenVINO is left out, and an
environment that lacks something is refused with the command that installs it. The trace has 32
requests with prompts of 256 to 4096 random tokens and outputs of 16 to 128 tokens; every request is
decoded to its full output length. Requests arrive together and by a Poisson process. The ways are

    magicdec            all requests may run together; `LLM`'s defaults, 512 tokens of prompts in a
                        step
    magicdec-1024       1024 tokens of prompts in a step
    openvino            the scheduler's defaults, 256 tokens in a step
    openvino-2048       2048 tokens in a step
    openvino-u8         the same two with the 8-bit KV cache that is OpenVINO's default; they are
    openvino-2048-u8    not exact
    transformers-256x2  256 tokens and 2 requests in a step, measured once
    transformers        its defaults, 8192 tokens and all requests in a step, measured once, and
                        only if it is named in --ways, because it takes minutes

Before anything is timed, all exact ways must emit the same float32 tokens for a shorter trace,
whose prompts are prefilled in parts too. Times are for bfloat16 if this CPU multiplies bfloat16,
and on any CPU for peers that store bfloat16 and compute in float32; for the others in float32. The
random model's largest logits are close to each other, so rounding changes many tokens; the table
counts the requests of each way whose tokens are not those of float32. The KV caches have room for
all requests, and none shares prefixes. The model is that of `bench_peers.py`. The duration goes
from the first arrival to the last token of the last request; TTFT from the arrival of a request to
its first token.

Each served trace is reported on stderr with an estimate of the time that is left. `--num_requests`
and `--repetitions` make a run shorter. After Ctrl-C, what is measured so far is printed, and
written to the file of `--json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peers import ENVIRONMENTS, PEERS
from peers.measuring import describe_machine, dtypes_here
from peers.process import PeerStart, check_python, export_model, started_here
from peers.runs import HEADS, INEXACT_CAPTION, POSITIONS, marked
from peers.serving_runs import WAYS, ServingWay, check_tokens, measure, save_serving_model
from peers.serving_trace import describe_trace, make_trace
from rich.console import Console
from rich.table import Table


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line, with `traces` by arrival and `ways`. Raises ValueError for a wrong
    value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    needed = ", ".join(ENVIRONMENTS["openvino"].requirements)
    parser.add_argument(
        "--openvino_python", metavar="PATH", help=f"python of an environment with {needed}"
    )
    parser.add_argument(
        "--arrival",
        nargs="+",
        default=["burst", "poisson:100"],
        help="when requests arrive, as in `magicdec inflight` (default: %(default)s)",
    )
    parser.add_argument("--ways", nargs="+", help="what to measure (default: all but transformers)")
    for flag, default, text in (
        ("--num_requests", 32, "requests of a trace"),
        ("--repetitions", 3, "how often each way serves a trace"),
        ("--kv_heads", HEADS, "KV heads of the random model"),
        ("--seed", 0, "seed of lengths, prompts and arrivals"),
        ("--threads", 2, "CPU threads of each peer"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args(arguments)
    check_numbers(options)
    options.ways = choose_ways(options.ways, options.openvino_python)
    if any(PEERS[way.peer].environment for way in options.ways):
        check_python("openvino", options.openvino_python)
    options.traces = {
        arrival: make_trace(arrival, options.num_requests, options.seed)
        for arrival in options.arrival
    }
    lengths = [len(r.prompt) + r.output_len for trace in options.traces.values() for r in trace]
    if max(lengths) > POSITIONS:
        raise ValueError(f"--arrival: a request has {max(lengths)} tokens; at most {POSITIONS} fit")
    return options


def check_numbers(options: argparse.Namespace) -> None:
    for name in ("num_requests", "repetitions", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.kv_heads < 1 or HEADS % options.kv_heads:
        raise ValueError(f"--kv_heads {options.kv_heads}: must divide {HEADS}")
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json {options.json}: directory {options.json.parent} does not exist")


def choose_ways(names: Sequence[str] | None, openvino_python: str | None) -> list[ServingWay]:
    """The ways of these names, or the default ones that can run. Raises ValueError for a name that
    is not known or cannot run."""
    if names is None:
        default = [way for way in WAYS if way.is_default]
        return [way for way in default if openvino_python or not PEERS[way.peer].environment]
    known = {way.name: way for way in WAYS}
    for name in names:
        if name not in known:
            raise ValueError(f"--ways {name} is not known; choose from {', '.join(known)}")
        if PEERS[known[name].peer].environment and openvino_python is None:
            raise ValueError(f"--ways {name} needs --openvino_python")
    return [known[name] for name in dict.fromkeys(names)]


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    traces = {arrival: describe_trace(trace) for arrival, trace in options.traces.items()}
    measured: dict[str, Any] = {"machine": describe_machine(), "traces": traces}
    measured |= {"kv_heads": options.kv_heads, "ways": [asdict(way) for way in options.ways]}

    def report(rows: Sequence[dict[str, Any]], line: str) -> None:
        measured["serving"] = rows
        print(line, file=sys.stderr, flush=True)

    try:
        with tempfile.TemporaryDirectory() as temporary:
            print("exporting models, comparing float32 tokens", file=sys.stderr, flush=True)
            ways = prepare(options, Path(temporary))
            measured["versions"] = check_tokens(ways, options.seed, options.threads)
            print("float32 tokens of all exact ways are equal", file=sys.stderr, flush=True)
            measure(
                ways, options.traces, dtypes_here(), options.threads, options.repetitions, report
            )
    finally:
        if "serving" in measured:
            conclude(measured, options.json)


def conclude(measured: dict[str, Any], path: Path | None) -> None:
    """Print what is measured, and write it to the file."""
    console = Console(width=140)
    for arrival in dict.fromkeys(row["arrival"] for row in measured["serving"]):
        console.print(make_table(arrival, measured["serving"]))
    for version in measured["versions"].values():
        console.print(version, soft_wrap=True)
    if path is not None:
        path.write_text(json.dumps(measured, indent=1) + "\n")


def prepare(options: argparse.Namespace, directory: Path) -> list[tuple[ServingWay, PeerStart]]:
    """Each way with the start of its peer. Writes the models."""
    plain = directory / "hf"
    save_serving_model(options.kv_heads, plain)
    exported = PeerStart("openvino", options.openvino_python, directory / "openvino")
    if any(PEERS[way.peer].environment for way in options.ways):
        export_model(exported, plain)
    return [
        (
            way,
            replace(exported, name=way.peer)
            if PEERS[way.peer].environment
            else started_here(way.peer, plain),
        )
        for way in options.ways
    ]


def make_table(arrival: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of one arrival process. The ratio is the duration over that of the first way."""
    rows = [row for row in rows if row["arrival"] == arrival]
    title = f"{rows[0]['num_requests']} requests, arrival {arrival}"
    has_inexact = not all(row["is_exact"] for row in rows)
    table = Table(title=title, caption=INEXACT_CAPTION if has_inexact else None)
    columns = ("way", "dtype", "duration, s", "least-most", "ratio", "output tokens/s")
    for column in (*columns, "TTFT p50, s", "p90, s", "TPOT, ms", "unlike float32"):
        table.add_column(column, justify="right")
    for row in rows:
        durations = row["all_duration_s"]
        table.add_row(
            marked(row["way"], row["is_exact"]),
            row["dtype"],
            f"{row['duration_s']:.2f}",
            f"{min(durations):.2f}-{max(durations):.2f}",
            f"{row['duration_s'] / rows[0]['duration_s']:.2f}",
            f"{row['output_throughput']:.0f}",
            f"{row['p50_ttft_ms'] / 1e3:.2f}",
            f"{row['p90_ttft_ms'] / 1e3:.2f}",
            f"{row['mean_tpot_ms']:.1f}",
            str(row["num_differing"]),
        )
    return table


def main() -> None:
    program = Path(sys.argv[0]).name
    try:
        options = read_options()
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        run(options)
    except RuntimeError as error:  # a peer failed or emits different tokens
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
