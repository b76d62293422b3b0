"""Serves the requests of `magicdec pipeline` in each of its passes, and makes a record of each.

Owns the order of the passes. Must not know the flags, nor where records are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicdec.console import make_progress
from magicdec.distributed.start import close_groups
from magicdec.names import SEQUENTIAL
from magicdec.pipelined_run.measured.metrics import SpeculationRecord, speculation_metrics
from magicdec.pipelined_run.measured.prediction import machine_of, predict_tokens_per_s
from magicdec.pipelined_run.measured.use import Observed, PipelineUse, pipeline_use
from magicdec.pipelined_run.passes import Outcome, Passes
from magicdec.pipelined_run.prepare import PreparedPipeline
from magicdec.pipelined_run.spans import Span
from magicdec.records.environment import Environment
from magicdec.serving.record import describe_requests, status_of
from magicdec.serving.server import differing
from magicdec.setup.session import RankSession

KEPT = ("model", "parallel", "attention", "decoding", "sampling")
OF_DRAFTS = ("draft", "kv")
Traces = dict[str, Sequence[Sequence[Span]]]
"""The spans of each rank, by the pass."""


def measure(
    prepared: PreparedPipeline, keep: Callable[[SpeculationRecord], None]
) -> tuple[list[SpeculationRecord], Traces]:
    """`keep` gets each record as soon as its pass is done, so that what ends a later pass costs
    only that one. All ranks call it; only the first makes records. Raises PeerLost if another rank
    has ended."""
    launch, options = prepared.run.launch, prepared.options
    session = RankSession(launch, prepared.whole.parallel)
    progress = make_progress(launch.rank == 0)
    session.begin()
    passes = Passes(prepared, session.device, progress)
    num_tokens = sum(shape.output_len for shape in options.shapes)
    records: list[SpeculationRecord] = []
    traces: Traces = {}
    reference: Outcome | None = None
    for name in options.passes:
        with progress.task(name, num_tokens) as advance:
            outcome = passes.serve(name, advance)
        if outcome is None:
            continue
        reference = outcome if options.has_baseline and reference is None else reference
        environment = session.describe_environment()
        records.append(make_record(prepared, environment, name, outcome, reference))
        keep(records[-1])
        if outcome.spans is not None:
            traces[name] = outcome.spans
    passes.close()
    close_groups()
    return records, traces


def make_record(
    prepared: PreparedPipeline,
    environment: Environment,
    name: str,
    outcome: Outcome,
    reference: Outcome | None,
) -> SpeculationRecord:
    """`reference` is the outcome of the baseline, if there is one."""
    num_differing: int | None = None
    config, transport = prepared.run.config.to_dict(), prepared.transport
    if reference is not None:
        num_differing = len(differing(reference.requests, outcome.requests))
    status = status_of(num_differing, config["model"]["dtype"])
    kept = {key: config[key] for key in KEPT}
    if outcome.spans is not None:  # by stages
        kept["parallel"]["transport"] = None if transport is None else transport.to_dict()
    if prepared.drafting is not None and outcome.spans is not None:
        config = prepared.drafting.config.to_dict()
        kept |= {key: config[key] for key in OF_DRAFTS}
    metrics = None
    if status != "diverged":
        described = describe_use(prepared, name, outcome)
        metrics = speculation_metrics(outcome.requests, outcome.moves, *described)
    asked = {"dataset": prepared.run.workload.dataset, "seed": prepared.run.workload.seed}
    asked |= prepared.options.describe()
    begin_s = outcome.requests[0].arrived_s
    return SpeculationRecord(
        status=status,
        name=name,
        config=kept | {"workload": asked},
        environment=environment,
        threads=list(outcome.threads),
        workload=prepared.run.describe_workload(),
        reference=None if reference is None else SEQUENTIAL,
        num_differing=num_differing,
        metrics=metrics,
        requests=describe_requests(outcome.requests, outcome.moves, begin_s),
    )


def describe_use(
    prepared: PreparedPipeline, name: str, outcome: Outcome
) -> tuple[PipelineUse | None, float | None]:
    """How the ranks spent their time in a mode, and the tokens a second that the simulator
    predicts for it."""
    if outcome.spans is None or outcome.counts is None or outcome.drafted is None:
        return None, None
    options, observed = prepared.options, observe(prepared, outcome)
    use = pipeline_use(observed, outcome.counts, options.needs_drafts)
    machine = machine_of(observed, use, None if options.link is None else options.link.delay_s)
    if machine is None:
        return use, None
    predicted = predict_tokens_per_s(
        outcome.requests, outcome.drafted, machine, options.of_mode(name),
        prepared.run.workload.seed,
    )  # fmt: skip
    return use, predicted


def observe(prepared: PreparedPipeline, outcome: Outcome) -> Observed:
    """What counts is the time from the first token of any request to the last."""
    assert outcome.spans is not None, "not the baseline"
    begin_s = min(request.token_times_s[0] for request in outcome.requests)
    end_s = max(request.token_times_s[-1] for request in outcome.requests)
    return Observed(prepared.layout, outcome.spans, begin_s, end_s)
