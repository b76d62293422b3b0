"""Compare decode steps, verifications and prefill of this project with other decoders: with the
same weights, token ids and threads, in turn.

    python scripts/dev/bench_peers.py
    python scripts/dev/bench_peers.py --openvino_python VENV/bin/python \\
        --llama_cpp_python OTHER_VENV/bin/python --vllm_python THIRD_VENV/bin/python

Then compares whole generations with the packaged demo model, by default after its demo text and
after prompts from which it copies: this project without drafts, with self-speculation and with
prompt lookup, transformers' `generate` with and without its assisted generation, and vLLM with and
without its own prompt lookup (4 tokens of n-grams of 2 to 4).

`transformers` is always measured. The others are measured if their own virtual environment is
given; an environment that lacks something is refused with the command that installs it. Before
anything is timed, all exact peers must emit the same float32 tokens from the same prompts. Times
are for bfloat16 if this CPU multiplies bfloat16, and on any CPU for peers that store bfloat16 and
compute in float32; for the others in float32. llama.cpp then has a float16 KV cache, which is
faster for it. `openvino_u8` is OpenVINO GenAI with the 8-bit KV cache that is its default,
`llama_cpp_q8_0` and `llama_cpp_q4_0` are llama.cpp, and `magicdec_fp8`, `magicdec_int8` and
`magicdec_int4` this project, with KV caches of 8 and 4 bits. These are not exact, and are marked
so. A verification has 4 tokens per row. The model is random: 6 layers, hidden size 384, 6 heads of
64, FFN 1024, vocabulary 4096.

Both tables say how exact the arithmetic and the KV cache of each peer are, in the dtype in which it
is timed. The column |Δ log p| of the random model is the mean absolute difference, in nats, of the
log-probabilities of 4094 tokens to those of transformers in float32. That of whole generations is
the perplexity of 4094 tokens of the demo text. Prompts are computed in chunks that read the cache.
"-" is of peers that tell no probabilities of given tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peers import ENVIRONMENTS
from peers.measuring import describe_machine, dtypes_here
from peers.process import PeerStart, check_python
from peers.runs import (
    BATCH,
    GENERATED,
    HEADS,
    INEXACT_CAPTION,
    POSITIONS,
    ROOM,
    VERIFIED,
    PeerCase,
    check_tokens,
    log_prob_differences,
    make_starts,
    marked,
    measure,
    measure_generations,
    save_model,
)
from rich.console import Console
from rich.table import Table

CASES = (PeerCase(6, 4096), PeerCase(2, 16384), PeerCase(6, 16384))
GENERATED_PREFIX = 4096
WIDTH = 160  # of the tables


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line, with the Python interpreters in `pythons` by environment. Raises
    ValueError for a wrong value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, environment in ENVIRONMENTS.items():
        text = f"python of an environment with {', '.join(environment.requirements)}"
        parser.add_argument(f"--{name}_python", metavar="PATH", help=text)
    parser.add_argument(
        "--cases",
        nargs="*",
        metavar="KV_HEADS:PREFIX",
        default=[f"{case.kv_heads}:{case.prefix}" for case in CASES],
        help="KV heads and prefix lengths for the random model; no word: no steps are timed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--generated_prefix",
        type=int,
        default=GENERATED_PREFIX,
        help="prefix length in tokens for whole generations; 0: skip them (default: %(default)s)",
    )
    parser.add_argument(
        "--generated_texts",
        nargs="+",
        metavar="TEXT",
        default=["demo", "ruler:niah_multikey"],
        help="what whole generations follow, as --dataset of the runs (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        raise ValueError(f"--threads {options.threads}: must be at least 1")
    if options.generated_prefix < 0:
        raise ValueError(f"--generated_prefix {options.generated_prefix}: must be at least 0")
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json {options.json}: directory {options.json.parent} does not exist")
    options.cases = [read_case(text) for text in options.cases]
    pythons = {name: getattr(options, f"{name}_python") for name in ENVIRONMENTS}
    options.pythons = {name: python for name, python in pythons.items() if python}
    for name, python in options.pythons.items():
        check_python(name, python)
    return options


def read_case(text: str) -> PeerCase:
    """The case of "KV_HEADS:PREFIX". Raises ValueError for a wrong value."""
    most = POSITIONS - ROOM
    try:
        case = PeerCase(*map(int, text.split(":")))
    except (ValueError, TypeError):
        raise ValueError(f"--cases {text}: must be KV_HEADS:PREFIX, such as 6:4096") from None
    if case.kv_heads < 1 or HEADS % case.kv_heads:
        raise ValueError(f"--cases {text}: KV heads must divide {HEADS}")
    if not VERIFIED <= case.prefix <= most:
        raise ValueError(f"--cases {text}: the prefix must be from {VERIFIED} to {most}")
    return case


def measure_decode(
    cases: Sequence[PeerCase], pythons: dict[str, str], dtypes: Mapping[str, str], threads: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of `measure` for all cases, and the versions of the peers. `pythons` has the Python
    interpreters by environment."""
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    starts: dict[int, list[PeerStart]] = {}  # by the model's KV heads
    differences: dict[int, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in cases:
            if case.kv_heads not in starts:
                plain = Path(temporary) / f"hf-{case.kv_heads}"
                save_model(case.kv_heads, plain)
                starts[case.kv_heads] = make_starts(plain, pythons, lambda entry: entry.decodes)
                versions |= check_tokens(starts[case.kv_heads], threads)
                differences[case.kv_heads] = log_prob_differences(
                    starts[case.kv_heads], dtypes, threads
                )
            rows += [
                row | {"log_prob_difference": differences[case.kv_heads][row["peer"]]}
                for row in measure(case, starts[case.kv_heads], dtypes, threads)
            ]
            print(f"measured {case}", file=sys.stderr, flush=True)
    return rows, versions


def decode_table(measured: dict[str, Any]) -> Table:
    bandwidth = measured["machine"]["read_bytes_per_s"]
    title = f"decode step of {BATCH} rows; KV roofline at {bandwidth / 1e9:.1f} GB/s"
    has_inexact = not all(row["is_exact"] for row in measured["decode"])
    table = Table(title=title, caption=INEXACT_CAPTION if has_inexact else None)
    columns = ("peer", "dtype", "KV heads", "prefix", "step, ms", "10-90 %", "KV roofline")
    verify = f"verify {VERIFIED}, ms", "10-90 %"
    for column in (*columns, *verify, "prefill, tokens/s", "|Δ log p|"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in measured["decode"]:
        share = row["bytes"] / bandwidth / (row["ms"] / 1e3)
        table.add_row(
            marked(row["peer"], row["is_exact"]),
            row["dtype"],
            str(row["kv_heads"]),
            str(row["prefix"]),
            *spread(row, ""),
            f"{share:.0%}" if row["is_exact"] else "-",  # other caches have other bytes
            *spread(row, "verify_"),
            f"{row['prefill_tokens_per_s']:.0f}",
            written(row["log_prob_difference"], ".1e"),
        )
    return table


def written(value: float | None, digits: str) -> str:
    """A number, or "-" where the peer gives none."""
    return "-" if value is None else format(value, digits)


def spread(row: dict[str, Any], prefix: str) -> tuple[str, str]:
    """Median, and 10th to 90th percentile; "-" if the peer cannot do it."""
    median, low, high = (row[f"{prefix}{name}"] for name in ("ms", "ms_p10", "ms_p90"))
    return ("-", "-") if median is None else (f"{median:.2f}", f"{low:.2f}-{high:.2f}")


def generation_table(rows: Sequence[dict[str, Any]]) -> Table:
    prefix = rows[0]["prefix"]
    table = Table(title=f"{BATCH} x {GENERATED} tokens after prefixes of {prefix}, demo model")
    columns = ("text", "way", "seconds", "least-most", "after the first tokens", "least-most")
    for column in (*columns, "perplexity"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["text"],
            row["way"],
            *range_of(row["all_seconds"]),
            *range_of(row["all_decode_seconds"]),
            written(row["perplexity"], ".4f"),
        )
    return table


def range_of(seconds: Sequence[float]) -> tuple[str, str]:
    """Median, and least to most."""
    return f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}-{max(seconds):.2f}"


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    dtypes = dtypes_here()
    measured: dict[str, Any] = {"machine": describe_machine()}
    console = Console(width=WIDTH)
    if options.cases:
        measured["decode"], measured["versions"] = measure_decode(
            options.cases, options.pythons, dtypes, options.threads
        )
        console.print(decode_table(measured))
        for version in measured["versions"].values():
            console.print(version, soft_wrap=True)
    if options.generated_prefix:
        measured["generate"] = measure_generations(
            options.generated_texts,
            options.generated_prefix,
            options.pythons,
            dtypes,
            options.threads,
        )
        console.print(generation_table(measured["generate"]))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


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


if __name__ == "__main__":
    main()
