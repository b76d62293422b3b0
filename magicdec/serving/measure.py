"""Serves the requests of a command in each of its passes, on this rank, and makes a record of each.

Owns the order: models are loaded once, and each pass is warmed up where it is the first of its
kind. Must not know the flags, nor where records are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from magicdec.console import Progress, Silent, make_progress
from magicdec.hardware.threads import ThreadCount, check_threads
from magicdec.request import StepOutput
from magicdec.serving.group_clock import of_first_rank
from magicdec.serving.options import Pass, ServingOptions
from magicdec.serving.prepare import make_server
from magicdec.serving.record import ServingRecord
from magicdec.serving.recording import make_record
from magicdec.serving.saturation import END, is_sustained, next_rate
from magicdec.serving.server import Served
from magicdec.serving.showing.view import Display
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, session_of

Keep = Callable[[ServingRecord], None]


def measure(
    prepared: Prepared,
    options: ServingOptions,
    passes: Sequence[Pass],
    display: Display,
    keep: Keep,
) -> list[ServingRecord]:
    """`keep` gets each record as soon as its pass is done, so that an interruption costs only the
    pass that runs. All ranks serve together and make the same records but for the times; those of
    the first rank count."""
    records: list[ServingRecord] = []
    with session_of(prepared) as session:
        one = Measuring(prepared, options, passes, session, display)
        one.server.warm_up(passes[0])
        for each in passes:
            if each.is_drafting:
                one.server.warm_up(each)
            records.append(one.measure(each, each.name, passes[0], options))
            keep(records[-1])
    return records


def measure_rates(
    prepared: Prepared,
    options: ServingOptions,
    each: Pass,
    rates: Sequence[float],
    display: Display,
    keep: Keep,
) -> list[ServingRecord]:
    """Serve the requests in the pass `each` at one rate of arrivals after the other: at `rates` or,
    if there are none, at those that find the saturation rate. The tokens at the first rate are the
    reference of the others."""
    records: list[ServingRecord] = []
    with session_of(prepared) as session:
        one = Measuring(prepared, options, [each], session, display)
        one.server.warm_up(each)
        one.lone_s = one.server.lone_s(each)
        start, place = 1.0 / one.lone_s, (session.groups.target, session.device)
        measured: list[tuple[float, bool]] = []
        while rate := of_first_rank(choose(rates, measured, start), *place):
            records.append(one.measure(each, f"{rate:.3g} requests/s", each, options.at_rate(rate)))
            keep(records[-1])
            if (metrics := records[-1].metrics) is None:
                break
            measured.append((rate, is_sustained(metrics)))
    return records


def choose(rates: Sequence[float], measured: Sequence[tuple[float, bool]], start: float) -> float:
    """The next of `rates` or, if there are none, the one that the search asks for."""
    if not rates:
        return next_rate(measured, start)
    return rates[len(measured)] if len(measured) < len(rates) else END


class Measuring:
    """The loaded models of one command. What is served first is the reference of the rest."""

    def __init__(
        self,
        prepared: Prepared,
        options: ServingOptions,
        passes: Sequence[Pass],
        session: RankSession,
        display: Display,
    ) -> None:
        progress = make_progress(session.launch.rank == 0)
        compactions = {each.compaction for each in passes}
        self.prepared, self.server = make_server(prepared, options, session, progress, compactions)
        self.session, self.display = session, display
        self.progress: Progress = Silent() if display.is_shown else progress
        self.reference: Served | None = None
        self.lone_s: float | None = None  # the time of one request alone, if it was measured

    def measure(self, each: Pass, name: str, first: Pass, options: ServingOptions) -> ServingRecord:
        """Serve the requests of `options` in one pass; `name` is shown meanwhile. Raises
        AssertionError if a rank has computed with other threads than its config says."""
        count = ThreadCount()
        num_tokens = sum(shape.output_len - 1 for shape in options.shapes)
        server = replace(self.server, shapes=options.shapes)
        with (
            self.progress.task(name, num_tokens) as advance,
            self.display.view(name, options.max_concurrency) as view,
            count.during(),
        ):

            def observe(output: StepOutput, seconds: float) -> None:
                advance(sum(map(len, output.token_ids)))

            served = server.serve(each, observe, view)
        rank, group = self.session.launch.rank, self.session.groups.target
        ours = count.of_rank(rank, self.prepared.config.parallel.threads_of(rank))
        served = replace(served, threads=check_threads(name, group.all_gather_object(ours)))
        self.reference = self.reference or served
        place = self.prepared, options, self.session.describe_environment()
        return make_record(*place, each, served, first, self.reference, self.lone_s)
