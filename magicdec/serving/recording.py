"""Makes the record of one pass. It has metrics only if its tokens are those of the first pass, or
if they cannot be the same, because a drafter samples other tokens of the same distribution.

Must not measure anything; `metrics` computes.
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.names import BASELINE
from magicdec.records.environment import Environment
from magicdec.serving.metrics import serving_metrics
from magicdec.serving.options import Pass, ServingOptions
from magicdec.serving.record import ServingRecord, describe_requests, name_of, status_of
from magicdec.serving.server import Served, differing
from magicdec.setup.prepare import Prepared


def make_record(
    prepared: Prepared,
    options: ServingOptions,
    environment: Environment,
    each: Pass,
    served: Served,
    first: Pass,
    reference: Served,
    lone_s: float | None = None,
) -> ServingRecord:
    """The record of what was served in the pass `each`; `reference` was served in `first`. `lone_s`
    as in `serving_metrics`."""
    resolved = prepared.config
    num_differing: int | None = len(differing(reference.requests, served.requests))
    if resolved.sampling.temperature > 0 and each.is_drafting != first.is_drafting:
        num_differing = None
    if not each.is_drafting:
        decoding = replace(resolved.decoding, strategy=BASELINE, drafter=None)
        resolved = replace(resolved, decoding=decoding, draft=None)
    config = resolved.to_dict()
    status = status_of(num_differing, config["model"]["dtype"])
    asked = {"dataset": prepared.workload.dataset, "seed": prepared.workload.seed}
    metrics = None
    if status != "diverged":
        peak = served.peak_memory_bytes
        metrics = serving_metrics(served.requests, served.counts, options.goodput, peak, lone_s)
    of_drafts = ("draft", "kv") if each.is_drafting else ()
    kept = "model", "parallel", "attention", "decoding", "sampling", *of_drafts
    return ServingRecord(
        status=status,
        name=name_of(each.mode, config["decoding"]["drafter"], each.compaction),
        config={name: config[name] for name in kept}
        | {
            "workload": {
                "batching": each.mode,
                "compaction": each.compaction,
                **asked,
                **options.describe(),
            }
        },
        environment=environment,
        threads=list(served.threads),
        workload=prepared.describe_workload(),
        reference=first.mode,
        num_differing=num_differing,
        metrics=metrics,
        requests=describe_requests(served.requests, served.counts.moves, served.begin_s),
    )
