"""The warm-up of a mode with stages is in no number of it: no count, span or time. `test_serve.py`
shows that of any system."""

from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from torch import Tensor

from magicdec.bench.measure import MeasuredPasses
from magicdec.bench.prepare import prepare
from magicdec.cli.serve import COMMANDS, RecordFile
from magicdec.distributed.groups import Launch
from magicdec.systems.mdi_llm.details import MDILLMDetails
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.pipeinfer.details import PipeInferDetails
from magicdec.systems.pipeinfer.head import Head
from magicdec.systems.stages.spans import SpanKind

ALONE = Launch(0, 1, 0, 1)
NUM_NEW = 8
NUM_REQUESTS = 2
NUM_LAYERS = 2


def measured(checkpoint: Path, folder: Path, *flags: object) -> MeasuredPasses:
    """What a command measures on one thread."""
    words = [
        "--model",
        checkpoint,
        "--dtype",
        "float32",
        "--threads",
        1,
        "--device",
        "cpu",
        "--num_requests",
        NUM_REQUESTS,
        "--prefix_len",
        12,
        "--gen_len",
        NUM_NEW,
        "--arrival",
        "burst",
        "--ignore_eos",
        "--trace",
        folder / "t.json",
        *flags,
    ]
    experiment = COMMANDS["serve"].parse(list(map(str, words)), ALONE)
    prepared = prepare(experiment.config, experiment.options, ALONE)
    return experiment.measure(prepared, RecordFile(folder / "out.jsonl"))


def test_pipelined_speculation_counts_and_shows_what_comes_after_it(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts are the runs of the second head, whose numbers come after those of the first."""
    heads = list[Head]()
    serve = Head.serve

    def watched(head: Head) -> None:
        heads.append(head)
        serve(head)

    monkeypatch.setattr(Head, "serve", watched)
    flags = "--layer_split 1.0/head --emulate_stage_ms 0.1 --emulate_acceptance 0.5"
    words = [*flags.split(), "--modes", "pipeline+draft"]
    measurement = measured(tiny_checkpoint, tmp_path, *words)
    (record,) = measurement.records
    ((trace,),) = measurement.traces
    assert (
        trace is not None
        and isinstance(record.details, PipeInferDetails)
        and record.metrics is not None
    )
    warm_up, head = heads
    first_run = head.first_run
    num_runs = head.scheduler.counts.runs
    assert first_run == warm_up.scheduler.counts.runs > 0
    (spans,) = trace.spans
    use = record.details
    runs_of = {what: [span.run for span in spans if span.what is what] for what in SpanKind}
    assert (
        runs_of[SpanKind.STAGE]
        == runs_of[SpanKind.RESULT]
        == list(range(first_run, first_run + num_runs))
    )
    assert sorted(runs_of[SpanKind.PROMPT] + runs_of[SpanKind.LAUNCH]) == runs_of[SpanKind.STAGE]
    assert runs_of[SpanKind.DRAFT] == list(range(len(runs_of[SpanKind.DRAFT]))) != []
    assert use.runs == record.metrics.num_steps == num_runs
    assert use.layers_computed + use.layers_skipped == NUM_LAYERS * use.runs
    assert [len(request.output_ids) for request in head.requests.values()] == [
        NUM_NEW
    ] * NUM_REQUESTS
    warm_s = max(request.token_times_s[-1] for request in warm_up.requests.values())
    assert warm_s <= min(request.arrived_s for request in head.requests.values())


@pytest.mark.usefixtures("lookups_of_ones")
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_ring_counts_what_comes_after_it(
    has_drafts: bool, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only stage takes 20 ms for a message. Each of two samples has a message for its prompt,
    and one for every further token or verification."""
    clock = FakeClock()
    stage_s = 0.020
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("time.sleep", clock.advance)
    drafting = "--modes ring+draft --draft ngram --gamma 3" if has_drafts else "--modes ring"
    compute = Stage.compute

    def slow(*args: Any, **more: Any) -> Tensor:
        clock.advance(stage_s)
        return compute(*args, **more)

    monkeypatch.setattr(Stage, "compute", slow)
    flags = "--B", 1, *drafting.split()
    measurement = measured(tiny_checkpoint, tmp_path, *flags)
    (record,) = measurement.records
    ((trace,),) = measurement.traces
    assert (
        trace is not None
        and isinstance(record.details, MDILLMDetails)
        and record.metrics is not None
    )
    stages = [span for span in trace.spans[0] if span.what is SpanKind.STAGE]
    num_messages = 2 * NUM_NEW
    if has_drafts:
        num_messages = record.details.sent_messages[0] - 1
        assert record.metrics.num_draft_tokens == 3 * (num_messages - 2) > 0
        rounds = num_messages - 2
        assert record.details.tokens_per_round == 2 * (NUM_NEW - 1) / rounds
    assert (record.metrics.num_draft_tokens is not None) == has_drafts
    assert len(stages) == len(trace.requests) == num_messages
    assert record.details.sent_messages == [num_messages + 1], "and the end"
    assert record.metrics.duration_s == pytest.approx(num_messages * stage_s)
    assert sum(r.output_len for r in record.requests) == 2 * NUM_NEW
    assert {r.arrival_ms for r in record.requests} == {0}
