"""Runs one stage of the GPU suite. Called by `gpu_suite.sh`, which documents the usage. Writes
STAGE.json, and summary.md from the files of all stages; for the stage `summary` only the latter.

Exits with 0 if all cells of the stage are measured, with 1 if some failed or there was no time for
them (the others are written), and with 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from gpu_stages import attention, checks, latency, peers, stages, summary
from gpu_stages.results import Results
from gpu_stages.scale import Suite

STAGES: dict[str, Callable[[Suite], None]] = {  # the most important first
    "attention": attention.run,
    "llama31": latency.run,
    "tokens": partial(checks.run_tests, stage="tokens"),
    "peers": peers.run,
    "demo": checks.run_demo,
    "stages": stages.run,
    "tests": partial(checks.run_tests, stage="tests"),
    "summary": lambda suite: None,
}
SECONDS = {"attention": 150, "llama31": 400}  # of the stages that others follow in one command
OTHERS = 540


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line. Raises ValueError for a missing device or a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("stage", choices=tuple(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the suite")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), metavar="DIRECTORY")
    parser.add_argument(
        "--seconds", type=int, metavar="N",
        help="time limit in seconds: no cell is begun after it, and a running process is stopped "
        f"[attention 150, llama31 400, else {OTHERS}]",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = SECONDS.get(options.stage, OTHERS)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device found; choose cpu, with --tiny")
    if options.device == "cpu" and not options.tiny:
        raise ValueError("--device cpu is for --tiny shapes; choose cuda, or add --tiny")
    if options.seconds < 1:
        raise ValueError(f"--seconds {options.seconds} is too small; it must be at least 1")
    return options


def made_with(device: str, is_tiny: bool) -> dict[str, object]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"device": device, "gpu": gpu, "torch": torch.__version__, "tiny": is_tiny}


def main() -> None:
    try:
        options = read_options()
        options.out.mkdir(parents=True, exist_ok=True)
        results = Results(
            options.out / f"{options.stage}.json",
            made_with(options.device, options.tiny),
            options.seconds,
        )
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    suite = Suite(torch.device(options.device), options.tiny, options.out, results)
    STAGES[options.stage](suite)
    summary.run(suite)
    for name, why in results.failed.items():
        print(f"{options.stage}: {name} failed: {why}", file=sys.stderr)
    for name in results.left:
        print(f"{options.stage}: no time was left for {name}", file=sys.stderr)
    sys.exit(0 if results.is_complete else 1)


if __name__ == "__main__":
    main()
