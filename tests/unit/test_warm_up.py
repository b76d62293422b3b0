"""The warm-up of a pass that serves requests is in no number of it: no count, span or time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import test_pipeline_command
import test_pipeline_options
import torch
from fake_clock import Clock
from magicdec.pipeline.passes import RingPass, serve_measured
from magicdec.pipelined_run.measured.measure import describe_use
from magicdec.pipelined_run.passes import Passes
from magicdec.serving.server import WARM_UP_TOKENS

from magicdec.config.sections import DecodingSection, SamplingSection
from magicdec.console import Silent
from magicdec.distributed.groups import Launch
from magicdec.distributed.start import make_stage_groups
from magicdec.pipeline.tracing import What
from magicdec.pipelined_run.head import Head
from magicdec.request import Request
from magicdec.serving.metrics import StepCounts
from magicdec.workload.request_shapes import RequestShape

CPU, ALONE = torch.device("cpu"), Launch(0, 1, 0, 1)
NUM_NEW, NUM_REQUESTS = 8, 2  # of the commands of `test_pipeline_command`
EMULATED = (
    *("--layer_split", "1.0/head", "--emulate_stage_ms", "0.1", "--emulate_acceptance", "0.5"),
    *("--modes", "sync", "--threads", "1"),
)


def test_pipelined_speculation_counts_and_shows_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head serves twice. What counts are the runs and drafts whose numbers come after those of
    the first time."""
    torch.set_num_threads(1)  # as EMULATED says
    prepared = test_pipeline_command.prepared(tmp_path, *EMULATED, world_size=1)
    numbers, ends_s, serve = list[tuple[int, int]](), list[float](), Head.serve
    told = list[int]()

    def watched(head: Head, *work: Any) -> None:
        numbers.append((head.first_run, head.first_draft))
        serve(head, *work)
        ends_s.append(max(request.token_times_s[-1] for request in work[1]))
        numbers.append((head.first_run, head.first_draft))

    monkeypatch.setattr(Head, "serve", watched)
    outcome = Passes(prepared, CPU, Silent()).serve("sync", told.append)
    assert outcome is not None and outcome.spans is not None and outcome.drafted is not None
    (warm_runs, warm_drafts), first, (last_run, last_draft) = numbers[1:]
    assert first == (warm_runs, warm_drafts) and warm_runs > 0 < warm_drafts
    (spans,) = outcome.spans
    of = {what: [span.run for span in spans if span.what is what] for what in What}
    assert of[What.STAGE] == of[What.RESULT] == list(range(warm_runs, last_run))
    assert sorted(of[What.PROMPT] + of[What.LAUNCH]) == of[What.STAGE]
    assert of[What.DRAFT] == list(range(warm_drafts, last_draft))
    use, _ = describe_use(prepared, "sync", outcome)
    assert use is not None and use.runs == last_run - warm_runs
    assert use.layers_computed + use.layers_skipped == 6 * use.runs
    assert {drafted.request for drafted in outcome.drafted} == set(range(NUM_REQUESTS))
    assert sum(told) == NUM_NEW * NUM_REQUESTS and set(outcome.counts.moves) == set(
        range(NUM_REQUESTS)
    )
    assert ends_s[0] <= min(request.arrived_s for request in outcome.requests)


def stub_of_run() -> Any:
    """What `make_requests` reads of a prepared run."""
    config = SimpleNamespace(
        decoding=DecodingSection(ignore_eos=True), sampling=SamplingSection(),
        attention=SimpleNamespace(prefill_chunk=4),
    )  # fmt: skip
    workload = SimpleNamespace(prompts=[(1, 2, 3, 4, 5, 6)] * 3)
    return cast(Any, SimpleNamespace(config=config, workload=workload))


def test_a_pass_is_counted_and_timed_from_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up takes 10 s, and what comes after it 5 s."""
    clock, told, served = Clock(), list[int](), list[tuple[list[Request], StepCounts]]()
    monkeypatch.setattr("time.perf_counter", clock)

    def serve(requests: list[Request], counts: StepCounts, tell: Any) -> None:
        counts.num_steps += 1
        tell(len(requests))
        served.append((requests, counts))
        clock.advance(10.0)

    shapes = [RequestShape(0.0, 6, 9)] * 3
    outcome = serve_measured(
        stub_of_run(), shapes, serve, 2, told.append, lambda: clock.advance(5.0)
    )
    (warm_up, _), (requests, counts) = served
    assert [len(r.prompt_ids) for r in warm_up] == [4] * 2
    assert {r.sampling.max_new_tokens for r in warm_up} == {WARM_UP_TOKENS}
    assert outcome.requests is requests and [len(r.prompt_ids) for r in requests] == [6] * 3
    assert outcome.counts is counts and counts.num_steps == 1 and told == [3]
    assert {r.arrived_s for r in requests} == {outcome.begin_s} == {1015.0}


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_ring_counts_what_comes_after_it(
    has_drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only stage takes 20 ms for a message. Each of two samples has a message for its prompt,
    and one for every further token or verification."""
    clock, stage_s = Clock(), 0.020
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("time.sleep", clock.advance)
    words = ("--modes", "ring", "--num_requests", "2", "--plot", str(tmp_path / "g.png"))
    words += ("--emulate_stage_ms", "20", *(("--draft", "ngram", "--gamma", "3") * has_drafts))
    prepared = test_pipeline_options.prepared(tmp_path, *words, world_size=1)
    groups = make_stage_groups(ALONE, prepared.grid, CPU, None)
    told = list[int]()
    outcome = RingPass(prepared, groups, CPU, Silent(), drafts=has_drafts).serve(told.append)
    assert outcome is not None and outcome.ring is not None and outcome.ring.trace is not None
    (use,), trace, drafts = outcome.ring.uses, outcome.ring.trace, outcome.ring.drafts
    num_later = NUM_NEW - 1
    num_messages = 2 * (1 + num_later)
    if drafts is not None:
        num_messages = 2 + drafts.num_messages
        assert drafts.num_drafted == 3 * drafts.num_verified == 3 * drafts.num_messages
    assert (drafts is not None) == has_drafts
    assert len(trace.stages[0]) == len(trace.samples) == num_messages
    assert use.total_s == pytest.approx(num_messages * stage_s)
    assert use.num_sent == num_messages + 1, "and the end"
    assert sum(told) == 2 * NUM_NEW
    begin_s = min(begin for begin, _ in trace.stages[0])
    assert {request.arrived_s for request in outcome.requests} == {begin_s}
