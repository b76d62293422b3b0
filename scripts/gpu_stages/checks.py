"""Stages `tests` and `demo`: the tests that use a GPU, and whole checked runs of the demo model
with each attention backend."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_stages.latency import run_recorded
from gpu_stages.scale import Suite
from magicdec.records.reading import load_records

ROOT = Path(__file__).parents[2]


def run_tests(suite: Suite) -> None:
    """Run each file in its own pytest process, so that a hang or crash does not affect others."""
    for file in suite.scale.tests:
        suite.results.cell(file, partial(run_pytest, suite, file))


def run_pytest(suite: Suite, file: str) -> dict[str, Any]:
    """pytest's last lines. Raises RuntimeError with the failures that pytest lists."""
    call = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", file]
    try:
        done = subprocess.run(
            call, cwd=ROOT, capture_output=True, text=True, timeout=suite.results.seconds_left
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
        raise RuntimeError(f"stopped at the stage's time limit: {output[-200:]!r}") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError(
            f"pytest ended with {done.returncode}: {'; '.join(failures or lines[-3:])}"
        )
    return {"last_lines": lines[-2:]}


def run_demo(suite: Suite) -> None:
    """A record for each backend in float32, where tokens must be equal, and in bfloat16."""
    for dtype in suite.scale.demo_dtypes:
        for backend in suite.scale.demo_backends:
            suite.results.cell(f"{dtype}/{backend}", partial(run_selfspec, suite, dtype, backend))


def run_selfspec(suite: Suite, dtype: str, backend: str) -> dict[str, Any]:
    """The run's record. Raises RuntimeError if the run was refused or failed its check."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "record.jsonl"
        flags = [
            *("--model", "demo", "--dataset", "demo", "--device", suite.device.type),
            *("--dtype", dtype, "--attention", backend, "--B", 2, "--num_batches", 1),
            *("--prefix_len", suite.scale.demo_prefix, "--gen_len", 8 if suite.is_tiny else 64),
            *("--gamma", 3, "--draft_budget", 65, "--out", path),
        ]
        refusal = run_recorded("selfspec", flags, suite)
        record = load_records(path)[-1]
    return asdict(record) | refusal
