"""How many files outside the model a reader of one decoding step meets, counted by a profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from conftest import make_requests, make_runner, random_prompts, tiny_transformer

import magicdec
from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.engine import Engine

PACKAGE = Path(magicdec.__file__).parent


def files_that_run(function: Callable[[], object]) -> set[str]:
    """The files of the package, without `model/`, of which `function` executes some function."""
    found = set()

    def watch(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return {name for name in found if not name.startswith("model/")}


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        pytest.param("autoregressive", 10, id="decode"),
        pytest.param("speculative", 14, id="draft and verify"),
    ],
)
def test_a_step_runs_code_of_few_files(strategy: str, most: int) -> None:
    runner = make_runner(tiny_transformer(), 2, 128, NativeBackend())
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts((40, 41), 97), 20))
    decoding = DecodingSection("speculative", "self", num_draft_tokens=3)
    decoder = make_strategy(strategy, Setup(runner, decoding, KVSection()))
    engine.begin(decoder)
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.decoding is not None
    batch = plan.decoding
    engine.scheduler.commit(batch, decoder.step(batch), now=0.0)  # a first step loads kernels
    files = files_that_run(lambda: decoder.step(batch))
    assert {"decoding/steps.py", "runner.py", "attention/native.py"} <= files
    assert len(files) <= most, f"{len(files)} files: {', '.join(sorted(files))}"
