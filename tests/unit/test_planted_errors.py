"""Errors planted in a copy of the package, one at a time, in the code that measures: a test fails.

Each case is a file, a text that occurs in it once, the text that replaces it, and the test of
`test_measurement.py` that must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from conftest import HANG, ROOT

PACKAGE, TESTS = ROOT / "magicdec", Path(__file__).with_name("test_measurement.py")
RUNNER = Path(__file__).with_name("planted.py")
Ended = tuple[int, str]
"""pytest's exit code and output."""
ERRORS = {
    "step time halved on drafting steps": (
        "engine.py",
        "output, now), now - started)",
        "output, now), (now - started) / (2 if output.num_drafted else 1))",
        "test_the_time_of_a_step_is_that_of_the_strategy",
    ),
    "speedup as the maximum over batches": (
        "records/metrics.py",
        "speedup=statistics.median(of_steps)",
        "speedup=max(of_steps)",
        "test_the_speedup_is_the_median_of_batches",
    ),
    "net speedup without what comes before the first step": (
        "records/speedup.py",
        "[added + end for",
        "[end for",
        "test_the_net_speedup_begins_at_the_end_of_prefill",
    ),
    "TPOT's clock shifted by 0.5 ms": (
        "records/samples/measured.py",
        "end - started_s)",
        "end - started_s - 0.0005)",
        "test_tpot_is_the_time_from_the_first_step_to_the_own_last_token",
    ),
    "TTFT of the first sequence for all": (
        "scheduling/scheduler.py",
        "times = [], output.emitted_s or",
        "times = [], (output.emitted_s or [])[:1] * len(batch.requests) or",
        "test_prefill_rate_and_the_ttft_of_each_sequence",
    ),
    "prefill rate doubled": (
        "records/metrics.py",
        "sum(prefill.num_tokens) / seconds",
        "2 * sum(prefill.num_tokens) / seconds",
        "test_prefill_rate_and_the_ttft_of_each_sequence",
    ),
    "bandwidth as the smaller of two": (
        "run/run.py",
        "bandwidth = max(",
        "bandwidth = min(",
        "test_the_bandwidth_is_the_larger_of_those_before_and_after",
    ),
    "bandwidth as the worst of all reads": (
        "hardware/timing.py",
        "return max(read_bandwidths(",
        "return min(read_bandwidths(",
        "test_bandwidth_is_the_best_of_all_reads_at_once",
    ),
    "the baseline always first": (
        "run/run.py",
        "self.passes if batch % 2 == 0 else reversed(self.passes)",
        "self.passes",
        "test_every_strategy_is_warmed_up_and_they_take_turns_at_going_first",
    ),
    "the baseline not warmed up": (
        "run/unmeasured.py",
        "for name in run.passes * rounds:",
        "for name in run.passes[1:] * rounds:",
        "test_every_strategy_is_warmed_up_and_they_take_turns_at_going_first",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_has_its_place(error: str) -> None:
    file, text, _, _ = ERRORS[error]
    assert (PACKAGE / file).read_text().count(text) == 1


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the test of each error has ended against a copy of the package with it. A copy consists
    of links, except for the file with the error."""
    copies: dict[str, Path] = {}
    for error, (file, text, planted, _) in ERRORS.items():
        copies[error] = tmp_path_factory.mktemp("planted")
        package = copies[error] / "magicdec"
        copytree(PACKAGE, package, ignore=ignore_patterns("__pycache__"), copy_function=os.symlink)
        (package / file).unlink()
        (package / file).write_text((PACKAGE / file).read_text().replace(text, planted))
    arguments = [str(word) for e in ERRORS for word in (copies[e], f"{TESTS}::{ERRORS[e][3]}")]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(RUNNER), *arguments],
        cwd=copies[error], env=environment, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    return {e: (codes[str(copy)], (copy / "out").read_text()) for e, copy in copies.items()}


@pytest.mark.wide
@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_fails_a_test(error: str, ended: dict[str, Ended]) -> None:
    code, output = ended[error]
    assert code == 1 and f"::{ERRORS[error][3]}" in output, output[-3000:]
