"""Makes the record of what was served under one batching. It has metrics only if its tokens are
those of the first batching.

Must not measure anything; `metrics` computes.
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.names import BASELINE
from magicdec.records.environment import Environment
from magicdec.serving.metrics import serving_metrics
from magicdec.serving.options import ServingOptions
from magicdec.serving.record import ServingRecord, describe_requests, status_of
from magicdec.serving.server import Served, differing
from magicdec.setup.prepare import Prepared


def make_record(
    prepared: Prepared,
    options: ServingOptions,
    environment: Environment,
    mode: str,
    is_drafting: bool,
    served: Served,
    reference_mode: str,
    reference: Served,
) -> ServingRecord:
    """The record of what was served under the batching `mode`, with the drafter or without it."""
    num_differing = len(differing(reference.requests, served.requests))
    resolved = prepared.config
    if not is_drafting:
        decoding = replace(resolved.decoding, strategy=BASELINE, drafter=None)
        resolved = replace(resolved, decoding=decoding)
    config = resolved.to_dict()
    status = status_of(num_differing, config["model"]["dtype"])
    asked = {"dataset": prepared.workload.dataset, "seed": prepared.workload.seed}
    metrics = None
    if status != "diverged":
        metrics = serving_metrics(served.requests, served.counts, options.goodput)
    kept = ("model", "parallel", "attention", "decoding", *(["kv"] if is_drafting else []))
    return ServingRecord(
        status=status,
        config={name: config[name] for name in kept}
        | {"workload": {"batching": mode, **asked, **options.describe()}},
        environment=environment,
        workload=prepared.describe_workload(),
        reference=reference_mode,
        num_differing=num_differing,
        metrics=metrics,
        requests=describe_requests(served.requests, served.begin_s),
    )
