"""Runs one stage of the GPU suite. Called by `gpu_suite.sh`, which documents the usage. Writes
STAGE.json, and summary.md from the files of all stages; for the stage `summary` only the latter.
`quick` and `again` run the parts of `gpu/quick.py`, each as a stage with `--quick`.

Exits with 0 if all cells of the stage are measured, with 1 if some failed or there was no time for
them (the others are written), and with 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu import (
    attention,
    broken,
    checks,
    demo_tokens,
    drafts,
    hybrid,
    kernels,
    latency,
    peers,
    quick,
    stages,
    summary,
    tiles,
    whole_runs,
)
from gpu.results import Results
from gpu.scale import Suite

from magicdec.distributed.ranks import end_with_parent
from magicdec.hardware.environment import device_of, release_memory

STAGES: dict[str, Callable[[Suite], None]] = {  # the most important first
    "attention": attention.run,
    "llama31": latency.run,
    "tokens": partial(checks.run_tests, stage="tokens"),
    "peers": peers.run,
    "demo": checks.run_demo,
    "stages": stages.run,
    "tests": partial(checks.run_tests, stage="tests"),
    "summary": lambda suite: None,
    "broken": broken.run,
    "demo_tokens": demo_tokens.run,
    "whole_runs": whole_runs.run,
    "drafts": drafts.run,
    "hybrid": hybrid.run,
    "tiles": tiles.run,
    "kernels": kernels.run,
}
COMMANDS = ("quick", "again")  # of several stages
BY_NAME = ("tiles", "kernels")  # stages that run only where they are named
# Of the stages that others follow in one command.
SECONDS = {
    "attention": 150,
    "llama31": 400,
    "quick": quick.QUICK_SECONDS,
    "again": quick.AGAIN_SECONDS,
}
OTHERS = 540
MOST_SECONDS = 595  # after which the process is ended
DRIVER = Path("/proc/driver/nvidia/version")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked command line. Raises ValueError for a missing device or a wrong value."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    names = (*STAGES, *COMMANDS)
    parser.add_argument("stage", choices=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("parts", nargs="*", metavar="PART", help="of `again`")
    parser.add_argument("--quick", action="store_true", help="the few cells that `quick` measures")
    parser.add_argument(
        "--cell_seconds", type=int, metavar="N", help="a cell that takes longer ends the process"
    )
    parser.add_argument(
        "--keep_failed", action="store_true", help="repeat no cell that has failed in this file"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the suite")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), metavar="DIRECTORY")
    parser.add_argument(
        "--seconds",
        type=int,
        metavar="N",
        help="time limit in seconds: no cell is begun after it, and a running process is stopped "
        f"[attention 150, llama31 400, else {OTHERS}]",
    )
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = SECONDS.get(options.stage, OTHERS)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device found; choose cpu, with --tiny")
    if options.device == "cpu" and not options.tiny:
        raise ValueError("--device cpu is for --tiny shapes; choose cuda, or add --tiny")
    if options.stage == "again" and not options.parts:
        raise ValueError(
            f"again needs a PART; choose from {', '.join(p.stage for p in quick.PARTS)}"
        )
    if options.parts and options.stage != "again":
        raise ValueError(f"PART {options.parts[0]} goes with again, not with {options.stage}")
    if options.seconds < 1:
        raise ValueError(f"--seconds {options.seconds} is too small; it must be at least 1")
    return options


def made_with(device: str, is_tiny: bool) -> dict[str, object]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    driver = driver_version() if device == "cuda" else None
    software = {"driver": driver, "torch": torch.__version__, "triton": triton_version()}
    return {"device": device, "gpu": gpu, **software, "tiny": is_tiny}


def triton_version() -> str | None:
    """The version of Triton, whose compiler makes the kernels; None if it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The version of NVIDIA's driver, from the kernel, or where a sandbox hides that from NVML;
    None where neither says it."""
    try:
        text = DRIVER.read_text()
    except OSError:
        text = nvml_driver_version()
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return None if found is None else found.group()


def nvml_driver_version() -> str:
    """Empty if NVML is not installed or does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # of a module that may be missing, and has errors of its own
        return ""


def run_command(options: argparse.Namespace) -> bool:
    """`quick` or `again`. Whether all cells are measured. Files of another GPU or torch stay as
    they are, and what is measured goes to a folder in theirs."""
    made = made_with(options.device, options.tiny)
    out = quick.folder_for(options.out, made)
    names = options.parts or [part.stage for part in quick.PARTS]
    words = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    return quick.run_parts(names, out, words, options.seconds)


def main() -> None:
    if parent := os.environ.pop(quick.PARENT, None):  # not that of what this process starts
        end_with_parent(int(parent), signal.SIGKILL)  # a command would take SIGTERM for its own
    try:
        options = read_options()
        options.out.mkdir(parents=True, exist_ok=True)
        if options.stage in COMMANDS:
            sys.exit(0 if run_command(options) else 1)
        device = device_of(options.device, 0)
        results = Results(
            options.out / f"{options.stage}.json",
            made_with(options.device, options.tiny),
            options.seconds,
            cell_seconds=options.cell_seconds,
            keeps_failed=options.keep_failed,
            after_cell=partial(release_memory, device),
        )
    except (OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    suite = Suite(device, options.tiny, options.out, results, options.quick)
    STAGES[options.stage](suite)
    if not options.quick:
        summary.run(suite)
    for name, why in results.failed.items():
        print(f"{options.stage}: {name} failed: {why}", file=sys.stderr)
    for name in results.left:
        print(f"{options.stage}: no time was left for {name}", file=sys.stderr)
    sys.exit(0 if results.is_complete else 1)


if __name__ == "__main__":
    signal.alarm(MOST_SECONDS)  # also of a process that waits for the device
    main()
