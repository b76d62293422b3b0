"""Serves the requests of `magicdec recurrent` in each of its passes, and makes a record of each. It
has metrics only if its tokens are not known to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from magicdec.console import make_progress
from magicdec.distributed.start import close_groups
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.metrics import PipelineRecord, RingMetrics, ring_metrics
from magicdec.pipeline.options import RINGS, SPECULATIVE_RING, TENSOR_PARALLEL
from magicdec.pipeline.passes import Outcome, Passes
from magicdec.pipeline.prepare import PreparedRing, of_one_process
from magicdec.serving.measure import measure_passes
from magicdec.serving.metrics import serving_metrics
from magicdec.serving.record import describe_pass
from magicdec.setup.session import RankSession


def measure(
    prepared: PreparedRing, keep: Callable[[PipelineRecord, Outcome], None]
) -> list[PipelineRecord]:
    """`keep` gets each record, and the requests of its pass, as soon as the pass is done. All ranks
    call it; only the first makes records. Raises PeerLost, or the RuntimeError of a collective, if
    another rank has ended."""
    launch, options = prepared.run.launch, prepared.options.flags
    session = RankSession(launch, prepared.whole.parallel)
    progress = make_progress(launch.rank == 0)
    session.begin()
    passes = Passes(prepared, session.device, progress)
    records = measure_passes(
        options.passes, sum(shape.output_len for shape in options.shapes), progress, passes.serve,
        partial(make_record, prepared, session), keep,
    )  # fmt: skip
    close_groups()
    return records


def make_record(
    prepared: PreparedRing,
    session: RankSession,
    name: str,
    outcome: Outcome,
    reference: tuple[str, Outcome],
) -> PipelineRecord:
    """`reference` is the first pass of the command and its outcome."""
    has_drafts, has_others = name == SPECULATIVE_RING, len(prepared.options.flags.passes) > 1
    fields = describe_pass(
        prepared.run, session.describe_environment(), outcome, reference if has_others else None,
        config_of(prepared, name), prepared.options.describe(),
        lambda: serving_metrics(outcome.requests, outcome.counts),
        has_drafts=has_drafts,
        is_comparable=not (has_drafts and prepared.run.config.sampling.temperature > 0),
    )  # fmt: skip
    metrics, ring = fields["metrics"], None
    if metrics is not None:
        ring = ring_of(prepared, outcome, metrics.p50_itl_ms)
    return PipelineRecord(name=name, ring=ring, **fields)


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
    prepared: PreparedRing, outcome: Outcome, measured_round_ms: float | None
) -> RingMetrics | None:
    if outcome.ring is None:
        return None
    ring, options = outcome.ring, prepared.options
    return ring_metrics(
        [len(layers) for layers in prepared.layers],
        prepared.grid.tensor_parallel,
        (options.num_lanes, options.flags.lane_size),
        ring.uses,
        ring.hop_bytes,
        ring.link_s,
        measured_round_ms,
        ring.drafts,
        sum(len(request.output_ids) - 1 for request in outcome.requests),
    )
