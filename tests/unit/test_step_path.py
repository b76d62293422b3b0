"""How many files outside the model a reader meets of one decoding step, and on the way of a request
from one token to the next, counted by a profiler in the steady state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
from conftest import Command, make_requests, make_runner, random_prompts, tiny_transformer

import magicdec
from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.speculation.steps.strategy import Setup, make_strategy

PACKAGE = Path(magicdec.__file__).parent
CARRIERS = "distributed/channels/carriers.py"  # which messages between two ranks pass, on both
DRAFT_STEP = {"systems/pipeinfer/path_drafter.py", "speculation/suffix_index.py"}


@dataclass
class Way:
    """The files of the package, without `model/`, of which some function is executed. With tokens
    `first` and `last`, only between these two of all that requests get, and without what the runner
    calls."""

    first: int = 0
    last: int = 0
    num_tokens: int = 0
    files: set[str] = field(default_factory=set)
    below: threading.local = field(default_factory=threading.local)  # frames of the runner

    def watch(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        name, is_call = str(path.relative_to(PACKAGE)), event == "call"
        depth, is_runner = getattr(self.below, "depth", 0), name == "runner/model_runner.py"
        self.num_tokens += is_call and (name, code.co_name) == ("runner/request.py", "append")
        is_there = self.first <= self.num_tokens < self.last or not self.last
        is_below = self.last > 0 and depth > 0 and not is_runner
        if is_call and is_there and not is_below and not name.startswith("model/"):
            self.files.add(name)
        self.below.depth = depth + is_runner * (1 if is_call else -1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also in threads that begin meanwhile."""
        before = sys.getprofile()
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)  # type: ignore[arg-type]


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
    way = Way()
    with way.watching():
        decoder.step(batch)
    assert {
        "speculation/steps/steps.py",
        "runner/model_runner.py",
        "attention/native.py",
    } <= way.files
    assert len(way.files) <= most, f"{len(way.files)} files: {', '.join(sorted(way.files))}"


@pytest.mark.parametrize(
    ("mode", "passed", "others"),
    [
        pytest.param("inflight", "engine/engine.py", set(), id="a request in flight"),
        pytest.param("ring", "systems/ring/recurrent.py", {CARRIERS}, id="a message of a ring"),
        pytest.param("async", "systems/pipeinfer/head.py", {CARRIERS}, id="a run of the pipeline"),
    ],
)
def test_from_one_token_to_the_next_a_request_passes_few_files(
    mode: str, passed: str, others: set[str], command: Command, tmp_path: Path
) -> None:
    """Outside of the model and of what the runner calls. One rank has all stages; messages between
    two ranks pass one file more. A draft step of the pipeline is no run, but a message of its own,
    that passes two more."""
    way, words = Way(first=6, last=7), ("--draft", "ngram") if mode == "async" else ()
    with way.watching():
        ended = command(
            "serve", "--modes", mode, "--num_requests", 1, "--arrival", "burst", "--threads", 1,
            "--prefix_len", 32, "--gen_len", 9, "--out", tmp_path / "records.jsonl", *words,
        )  # fmt: skip
    assert ended.code == 0, ended.err
    files = way.files - DRAFT_STEP | others
    assert {passed, "runner/model_runner.py", "runner/request.py"} <= files
    assert len(files) <= 12, f"{len(files)} files: {', '.join(sorted(files))}"
