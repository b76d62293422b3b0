"""Serves the requests of a command in each of its passes, on this rank, and makes a record of each.

Owns the order: models are loaded once, and each pass is warmed up where it is the first of its
kind. Must not know the flags, nor where records are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicdec.console import make_progress
from magicdec.request import StepOutput
from magicdec.serving.options import ServingOptions
from magicdec.serving.passes import Pass
from magicdec.serving.prepare import make_server
from magicdec.serving.record import ServingRecord
from magicdec.serving.recording import make_record
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import session_of


def measure(
    prepared: Prepared,
    options: ServingOptions,
    passes: Sequence[Pass],
    keep: Callable[[ServingRecord], None],
) -> list[ServingRecord]:
    """`keep` gets each record as soon as its pass is done, so that an interruption costs only the
    pass that runs. All ranks serve together and make the same records but for the times; those of
    the first rank count."""
    records: list[ServingRecord] = []
    progress = make_progress(prepared.launch.rank == 0)
    num_tokens = sum(shape.output_len - 1 for shape in options.shapes)
    with session_of(prepared) as session:
        prepared, server = make_server(
            prepared, options, session, progress, {p.compaction for p in passes}
        )
        server.warm_up(passes[0])
        for each in passes:
            if each.is_drafting:
                server.warm_up(each)
            with progress.task(each.mode, num_tokens) as advance:

                def observe(output: StepOutput, seconds: float) -> None:
                    advance(sum(map(len, output.token_ids)))

                served = server.serve(each, observe)
            if not records:
                reference = served
            place = prepared, options, session.describe_environment()
            records.append(make_record(*place, each, served, passes[0], reference))
            keep(records[-1])
    return records
