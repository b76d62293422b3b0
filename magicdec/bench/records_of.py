"""Records of measured passes: of a run one of both passes, of `magicdec serve` one of each. It is
the only place that knows both what the spine measures and what a record is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from magicdec.bench.runner import MeasuredGroup, MeasuredPass, PlannedPass, Runner
from magicdec.bench.serving.metrics import (
    acceptance_by_context,
    categories_of,
    missing_of,
    serving_metrics,
    times_by_turn,
)
from magicdec.bench.serving.prepare import PreparedServing
from magicdec.bench.serving.record import (
    FAILED,
    ServingRecord,
    describe_requests,
    occupancy_of,
    parts_of,
    status_of,
)
from magicdec.config.resolved import ResolvedConfig
from magicdec.names import BASELINE
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.metrics import run_metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples, hash_output, to_ms
from magicdec.runner.request import Request
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.workload.answers import answer_scores


def scores_of(prepared: Prepared, requests: Sequence[Request]) -> list[float] | None:
    """The score of each answer; None without known answers. Those of a target with random weights
    would say nothing."""
    answers = None if prepared.source.is_random else prepared.workload.answers
    return answer_scores(answers, requests, prepared.tokenizer)


# --- Of a run.


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of all ranks. The last pass is the requested strategy, after the baseline,
    if any."""

    samples: dict[str, PassSamples]  # for each pass
    finished: dict[str, list[Request]]  # for each pass, the requests in the order of the prompts
    prefill: PrefillSamples
    memory: MemoryTaken

    @classmethod
    def of(cls, passes: Sequence[MeasuredPass], memory: MemoryTaken) -> MeasuredRun:
        samples = {
            each.name: PassSamples.merged([samples_of(group) for group in each.groups])
            for each in passes
        }
        samples[passes[-1].name].warmup_calibration_ms = warm_up_calibration_of(passes[-1])
        finished = {each.name: each.requests for each in passes}
        return cls(samples, finished, prefill_samples(passes[-1].groups), memory)

    @property
    def strategy(self) -> str:
        return list(self.samples)[-1]


def run_record(
    prepared: Prepared, measured: MeasuredRun, correctness: Correctness, environment: Environment
) -> RunRecord:
    """The record of a run. It has metrics only if the check of the tokens passed."""
    strategy = measured.strategy
    passed = correctness.passed
    is_random = prepared.is_random
    bandwidth = environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None, "measured in every run"
    for name, samples in measured.samples.items():
        requests = measured.finished[name]
        samples.answer_scores = scores_of(prepared, requests)
        samples.output_hashes = [hash_output(request.output_ids) for request in requests]
    categories = prepared.workload.categories
    metrics = run_metrics(measured.samples, measured.prefill, bandwidth, is_random, categories)
    return RunRecord(
        status=correctness.status,
        config=prepared.config.to_dict(),
        environment=environment,
        workload=prepared.describe_workload(),
        correctness=correctness,
        metrics=metrics[strategy] if passed else None,
        baseline_metrics=metrics.get(BASELINE) if passed and strategy != BASELINE else None,
        samples={
            name: samples.to_record(is_drafting=name != BASELINE, is_random=is_random)
            for name, samples in measured.samples.items()
        },
        prefill_samples=measured.prefill,
        memory=describe_memory(
            prepared.plan, prepared.free, measured.memory if passed else NOT_MEASURED
        ),
    )


def samples_of(group: MeasuredGroup) -> PassSamples:
    """The samples of a pass over one batch."""
    observer = group.observer
    steps = observer.steps
    samples = PassSamples.empty()
    preparation = observer.preparation
    assert preparation is not None, "a batch is prepared before its first step"
    samples.observe_begin(
        preparation.seconds, preparation.calibration_s, preparation.is_draft_prefill
    )
    samples.step_ms = [[to_ms(step.seconds) for step in steps]]
    samples.num_forwards = [[step.num_forwards for step in steps]]
    samples.padded_gamma = [[step.padded_gamma for step in steps]]
    samples.num_drafted = [[step.num_drafted or [] for step in steps]]
    samples.num_accepted = [[step.num_accepted or [] for step in steps]]
    samples.num_emitted = [[step.num_emitted for step in steps]]
    logged = [step.digests for step in steps if step.digests is not None]
    if logged:
        samples.draft_hashes = [[[hashed for hashed, _ in row] for row in logged]]
        samples.draft_keys = [[[num_read for _, num_read in row] for row in logged]]
    samples.end_batch(group.requests, observer.begun_s)
    samples.observe_phases({} if observer.phases is None else observer.phases.seconds)
    ranks = group.ranks
    samples.bytes_read = [ranks.bytes_read]
    samples.peak_memory_bytes = [ranks.peaks]
    samples.threads = [ranks.threads]
    samples.draft_kv_tokens = [ranks.draft_kv_tokens]
    samples.draft_rows = [ranks.draft_rows]
    return samples


def warm_up_calibration_of(measured: MeasuredPass) -> float | None:
    system = measured.planned.system
    assert isinstance(system, PrefilledBatching), "a run keeps its prompts"
    seconds = system.warm_up_calibration_s
    return None if seconds is None else to_ms(seconds)


def prefill_samples(groups: Sequence[MeasuredGroup]) -> PrefillSamples:
    """The samples of prefill, batch by batch."""
    samples = PrefillSamples(prefill_ms=[], ttft_ms=[], num_tokens=[])
    for group in groups:
        assert group.prefill is not None, "its prompts were kept"
        samples.observe(group.prefill.snapshots, group.prefill.seconds)
    return samples


def unfinished_record(
    config: ResolvedConfig,
    prepared: Prepared | None,
    environment: Environment,
    error: str,
) -> RunRecord:
    """The record of a failed run. `prepared` is None if it was refused before."""
    return RunRecord(
        status="failed",
        config=config.to_dict(),
        environment=environment,
        error=error,
        workload=None if prepared is None else prepared.describe_workload(),
        memory=None if prepared is None else describe_memory(prepared.plan, prepared.free),
    )


# --- Of `magicdec serve`.


def serving_record(
    prepared: PreparedServing, measured: MeasuredPass, runner: Runner
) -> ServingRecord:
    """The record of a pass over its newest group, which has metrics only if its tokens are not
    known to be wrong."""
    planned = measured.planned
    system = planned.system
    reference = runner.passes[0]
    options = prepared.options
    group = measured.groups[-1]
    checked = measured.checks[-1]
    requests = group.requests
    observer = group.observer
    counts = observer.counts
    details = group.details
    trace = details.trace
    config = system.config_of(planned.serving_pass)
    is_external = system.is_external or reference.system.is_external
    dtype = config["model"]["dtype"]
    status = status_of(checked.num_differing, checked.correctness, dtype, is_external)
    is_right = status != "diverged"
    prompts = prepared.run.workload
    # With random weights a draft and its target agree by chance alone.
    judged = None if system.run.is_random else observer.verifications
    metrics = None
    if is_right:
        metrics = serving_metrics(
            requests,
            counts,
            options.goodput or {},
            group.ranks.total_peak,
            judged,
            observer.timed_steps,
            categories_of(requests, prompts.categories),
        )
    environment = runner.gpu.add_to(runner.session.describe_environment())
    return ServingRecord(
        status=status,
        name=planned.name,
        config=describe_config(prepared, planned),
        environment=group.load.add_to(environment),
        threads=group.ranks.threads,
        workload=replace(system.run, workload=prompts).describe_workload(),
        reference=reference.name if len(runner.passes) > 1 else None,
        num_differing=checked.num_differing,
        correctness=checked.correctness,
        metrics=metrics,
        ring=details.ring if is_right else None,
        speculation=details.speculation if is_right else None,
        occupancy=occupancy_of(trace.spans) if is_right and trace is not None else None,
        requests=describe_requests(requests, counts.moves, requests[0].arrived_s, judged),
        times_by_turn=times_by_turn(requests, counts.moves) if is_right else None,
        acceptance_by_context=acceptance_by_context(requests, judged) if is_right else None,
        server=missing_of(details.server, metrics, observer.verifications),
    )


def failed_serving_record(
    prepared: PreparedServing, planned: PlannedPass, runner: Runner, error: str
) -> ServingRecord:
    run = replace(planned.system.run, workload=prepared.run.workload)
    return ServingRecord(
        status=FAILED,
        name=planned.name,
        config=describe_config(prepared, planned),
        environment=runner.session.describe_environment(),
        threads=[],
        workload=run.describe_workload(),
        reference=runner.passes[0].name if len(runner.passes) > 1 else None,
        num_differing=None,
        metrics=None,
        ring=None,
        speculation=None,
        occupancy=None,
        requests=[],
        error=error,
    )


def describe_config(prepared: PreparedServing, planned: PlannedPass) -> dict[str, Any]:
    """The resolved config of a pass, and the flags of the command."""
    system = planned.system
    serving_pass = planned.serving_pass
    options = prepared.options
    config = system.config_of(serving_pass)
    asked = system.run.config.workload
    settings: dict[str, Any] = {
        "dataset": asked.dataset,
        "prompt_format": asked.prompt_format,
        "seed": prepared.run.workload.seed,
    }
    settings |= options.describe() | {
        "mode": serving_pass.mode,
        "concurrency": serving_pass.concurrency,
    }
    splits = [each.layer_split for each in (system, *prepared.systems)]
    chosen = next((split for split in splits if split is not None), options.layer_split)
    settings["layer_split"] = chosen
    has_draft = serving_pass.is_drafting and bool(config["decoding"]["drafter"] or config["draft"])
    return parts_of(config, has_draft) | {"workload": settings}
