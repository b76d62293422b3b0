"""Makes the record of a pass. It has metrics only if its tokens are not known to be wrong.

Must not measure anything; `metrics` computes.
"""

from __future__ import annotations

from typing import Any

from magicdec.names import SEQUENTIAL
from magicdec.pipeline.measured_pass import Outcome
from magicdec.pipeline.metrics import RingMetrics, ring_metrics
from magicdec.pipeline.options import RINGS, SPECULATIVE_RING, TENSOR_PARALLEL
from magicdec.pipeline.pass_memory import of_one_process
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.record import PipelineRecord
from magicdec.records.environment import Environment
from magicdec.serving.metrics import ServingMetrics, serving_metrics
from magicdec.serving.record import describe_requests, status_of
from magicdec.serving.server import differing

KEPT = ("model", "parallel", "attention", "decoding", "sampling")
OF_DRAFTS = ("draft", "kv")


def make_record(
    prepared: PreparedRing,
    environment: Environment,
    name: str,
    outcome: Outcome,
    reference: tuple[str, Outcome] | None,
) -> PipelineRecord:
    """`reference` is the first pass of the command and its outcome; None if it has no other."""
    num_differing: int | None = None
    config = config_of(prepared, name)
    if reference is not None:
        is_sampled = prepared.run.config.sampling.temperature > 0
        if not (is_sampled and name == SPECULATIVE_RING):
            num_differing = len(differing(reference[1].requests, outcome.requests))
    status = status_of(num_differing, config["model"]["dtype"])
    metrics = None
    if status != "diverged":
        metrics = serving_metrics(outcome.requests, outcome.counts)
    kept = (*KEPT, *OF_DRAFTS) if name == SPECULATIVE_RING else KEPT
    asked = {"dataset": prepared.run.workload.dataset, "seed": prepared.run.workload.seed}
    asked |= prepared.options.describe()
    return PipelineRecord(
        status=status,
        name=name,
        config={key: config[key] for key in kept} | {"workload": asked},
        environment=environment,
        threads=list(outcome.threads),
        workload=prepared.run.describe_workload(),
        reference=None if reference is None else reference[0],
        num_differing=num_differing,
        metrics=metrics,
        ring=ring_of(prepared, outcome, metrics),
        requests=describe_requests(outcome.requests, outcome.counts.moves, outcome.begin_s),
    )


def config_of(prepared: PreparedRing, name: str) -> dict[str, Any]:
    """The resolved config that a pass ran with. That of a ring says how its messages travelled."""
    if name in RINGS:
        drafting = prepared.drafting if name == SPECULATIVE_RING else None
        config = (drafting or prepared.run).config.to_dict()
        transport = prepared.transport
        config["parallel"]["transport"] = None if transport is None else transport.to_dict()
        return config
    if name == TENSOR_PARALLEL:
        return prepared.whole.to_dict()
    num_rows = 1 if name == SEQUENTIAL else prepared.options.n_samples
    return of_one_process(prepared.whole, num_rows).to_dict()


def ring_of(
    prepared: PreparedRing, outcome: Outcome, metrics: ServingMetrics | None
) -> RingMetrics | None:
    if outcome.ring is None or metrics is None:
        return None
    ring, options = outcome.ring, prepared.options
    return ring_metrics(
        [len(layers) for layers in prepared.layers],
        prepared.grid.tensor_parallel,
        (options.num_lanes, options.asked.lane_size),
        ring.uses,
        ring.hop_bytes,
        ring.link_s,
        metrics.p50_itl_ms,
        ring.drafts,
        sum(len(request.output_ids) - 1 for request in outcome.requests),
    )
