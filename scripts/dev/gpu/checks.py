"""Stages `tokens`, `tests` and `demo`: the tests that use a GPU, and whole checked runs of the demo
model with each attention backend."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu.in_process import words_of
from gpu.latency import run_recorded
from gpu.results import Incomplete
from gpu.scale import Suite, obstacle_of
from magicdec.model.checkpoint.source import find_model
from magicdec.records.reading import load_passes

ROOT = Path(__file__).parents[3]
OUTCOME = re.compile(r"(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED)\b.*%\]$")  # of a test, as pytest -v


def run_tests(suite: Suite, stage: str) -> None:
    """Run each file in its own pytest process, so that a hang or crash does not affect others."""
    for file in suite.scale.tests[stage]:
        suite.results.cell(file, partial(run_pytest, suite, file))


def run_pytest(suite: Suite, file: str) -> dict[str, Any]:
    """The number of tests by outcome. Raises Incomplete, with the numbers so far and the names of
    those that failed, if a test failed or time ran out."""
    call = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", file]
    with tempfile.TemporaryFile("w+") as output:
        try:
            subprocess.run(
                call,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
                timeout=suite.results.seconds_left,
            )
            problem = None
        except subprocess.TimeoutExpired:
            problem = "stopped at the stage's time limit"
        except subprocess.CalledProcessError as error:
            problem = f"pytest ended with {error.returncode}"
        output.seek(0)
        lines = output.read().strip().splitlines()
    outcomes = [match.groups() for line in lines if (match := OUTCOME.match(line))]
    counts: dict[str, Any] = dict(Counter(outcome.lower() for _, outcome in outcomes))
    if problem is None:
        return counts
    failures = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    last = "; ".join(failures or lines[-3:])
    raise Incomplete(f"{problem}: {last}", counts | {"failures": failures})


def run_demo(suite: Suite) -> None:
    """A record for each backend that is there, in float32, where tokens must be equal, and in
    bfloat16."""
    size = find_model("--model", "demo").config.cached_head_dim
    for dtype in suite.scale.demo_dtypes:
        for backend in suite.scale.demo_backends:
            why = None if backend == "auto" else obstacle_of(backend, suite.device, size, dtype)
            if why is not None:
                print(f"demo: {dtype}/{backend} is left out: {why}", file=sys.stderr)
                continue
            suite.results.cell(f"{dtype}/{backend}", partial(run_selfspec, suite, dtype, backend))


def run_selfspec(suite: Suite, dtype: str, backend: str) -> dict[str, Any]:
    """The run's record. Raises RuntimeError if the run was refused or failed its check."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "record.jsonl"
        settings = {
            "--model": "demo",
            "--dataset": "demo",
            "--device": suite.device.type,
            "--dtype": dtype,
            "--attention": backend,
            "--B": 2,
            "--num_batches": 1,
            "--prefix_len": suite.scale.demo_prefix,
            "--gen_len": 8 if suite.is_tiny else 64,
            "--gamma": 3,
            "--draft_budget": 65,
            "--out": path,
        }
        refusal = run_recorded("selfspec", words_of(settings), suite)
        record = load_passes(path)[-1]
    return asdict(record) | refusal
