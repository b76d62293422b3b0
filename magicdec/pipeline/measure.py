"""Serves the requests of a command in each of its passes, and makes a record of each.

Owns the order of the passes. Must not know the flags, nor where records are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from magicdec.console import make_progress
from magicdec.distributed.start import close_groups
from magicdec.pipeline.measured_pass import Outcome
from magicdec.pipeline.passes import Passes
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.record import PipelineRecord
from magicdec.pipeline.recording import make_record
from magicdec.setup.session import RankSession


def measure(
    prepared: PreparedRing, keep: Callable[[PipelineRecord, Outcome], None]
) -> list[PipelineRecord]:
    """`keep` gets each record, and the requests of its pass, as soon as the pass is done, so that
    what ends a later pass costs only that one. All ranks call it; only the first makes records.
    Raises PeerLost, or the RuntimeError of a collective, if another rank has ended."""
    launch, asked = prepared.run.launch, prepared.options.asked
    session = RankSession(launch, prepared.whole.parallel)
    progress = make_progress(launch.rank == 0)
    session.begin()
    passes = Passes(prepared, session.device, progress)
    num_tokens = sum(shape.output_len for shape in asked.shapes)
    records: list[PipelineRecord] = []
    reference: tuple[str, Outcome] | None = None
    for name in asked.passes:
        with progress.task(name, num_tokens) as advance:
            outcome = passes.serve(name, advance)
        if launch.rank == 0 and outcome is not None:
            if len(asked.passes) > 1 and reference is None:
                reference = name, outcome
            environment = session.describe_environment()
            records.append(make_record(prepared, environment, name, outcome, reference))
            keep(records[-1], outcome)
    close_groups()
    return records
