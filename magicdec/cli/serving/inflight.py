"""`magicdec inflight`: requests that arrive over time, served one after the other, in static and
dynamic batches, and in flight.

    magicdec inflight --num_requests 32 --arrival poisson:100 --gen_len uniform:16:128
    magicdec inflight --arrival trace:requests.jsonl --modes static inflight --goodput ttft:500

Owns the steps of the command and its files. `flags` has its flags. Heavy imports happen after the
flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.flags import run_on_ranks
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.cli.serving.flags import Asked, parse
from magicdec.cli.serving.steps import Kept, announce, conclude, run_command
from magicdec.console import spinner
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import INTERRUPTED
from magicdec.distributed.watching.watch import watch_ranks

if TYPE_CHECKING:
    from magicdec.serving.record import ServingRecord
    from magicdec.setup.prepare import Prepared


def main() -> NoReturn:
    """Serve the requests under each batching, and print one table."""
    run_command(serve)


def serve(launch: Launch, words: Sequence[str]) -> int:
    """The whole command on this rank. Returns its exit code."""
    asked = parse(words, launch)
    asked = replace(asked, config=with_local_models(asked.config))
    check = partial(check_heads, asked.config)
    run_on_ranks(asked.config.parallel.nproc, words, launch, check)
    watch_ranks(launch)
    with spinner("preparing", launch.rank == 0):
        from magicdec.serving.prepare import prepare

        prepared = prepare(asked.config, asked.options, launch, asked.ini.check_model)
    announce(prepared)
    kept = Kept(asked.out)
    try:
        records = measure(prepared, asked, kept)
    except KeyboardInterrupt:
        if launch.rank == 0:
            print(f"interrupted; {kept.count} records are in {asked.out}", file=sys.stderr)
        return INTERRUPTED
    if launch.rank != 0:
        return 0
    show(records, asked)
    return conclude(kept, records)


def measure(prepared: Prepared, asked: Asked, kept: Kept) -> list[ServingRecord]:
    """Serve the requests in every pass, or at every rate. The first rank keeps each record when it
    is made."""
    from magicdec.serving.measure import measure, measure_rates
    from magicdec.serving.showing.view import Display

    is_leader = prepared.launch.rank == 0
    keep = kept.append if is_leader else lambda record: None
    display = Display.of_rank(is_leader, asked.view)
    if asked.rates is None:
        return measure(prepared, asked.options, asked.passes, display, keep)
    (each,) = asked.passes
    return measure_rates(prepared, asked.options, each, asked.rates, display, keep)


def show(records: list[ServingRecord], asked: Asked) -> None:
    """Print the table, and draw the picture that `--plot` asks for."""
    from magicdec.serving.showing.rates import draw_rates, print_rates
    from magicdec.serving.showing.table import print_table
    from magicdec.serving.showing.timeline import draw_timeline

    is_sweep = asked.rates is not None
    (print_rates if is_sweep else print_table)(records)
    if asked.plot is not None:
        (draw_rates if is_sweep else draw_timeline)(records, asked.plot)
        print(f"drawn to {asked.plot}", file=sys.stderr)
