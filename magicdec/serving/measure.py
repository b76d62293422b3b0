"""Serves the requests of a command in each of its passes, and makes a record of each: for every
command that serves requests (`measure_passes`), and for `magicdec inflight`.

Owns the order: models are loaded once, and each pass is warmed up where it is the first of its
kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from magicdec.console import Progress, Silent, make_progress
from magicdec.hardware.threads import ThreadCount, check_threads
from magicdec.names import BASELINE
from magicdec.request import StepOutput
from magicdec.serving.live_view import Display
from magicdec.serving.metrics import Served, serving_metrics
from magicdec.serving.options import Pass, ServingOptions
from magicdec.serving.prepare import make_server
from magicdec.serving.record import ServingRecord, describe_pass, name_of
from magicdec.serving.saturation import END, is_sustained, next_rate
from magicdec.serving.server import of_first_rank
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, session_of

Keep = Callable[[ServingRecord], None]
Case = TypeVar("Case")
Outcome = TypeVar("Outcome", bound=Served)
Record = TypeVar("Record")


def measure_passes(
    cases: Iterable[Case],
    num_tokens: int,
    progress: Progress,
    serve: Callable[[Case, Callable[[int], None]], Outcome | None],
    record: Callable[[Case, Outcome, tuple[Case, Outcome]], Record],
    keep: Callable[[Record, Outcome], None],
) -> list[Record]:
    """Serve each case, whose text is shown meanwhile, and make its record. The first case is the
    reference of all. `serve` gets what it calls with the number of new tokens, of which there will
    be `num_tokens`; it gives None on a rank without records. `keep` gets each record as soon as its
    pass is done, so that what ends a later pass costs only that one."""
    records: list[Record] = []
    reference: tuple[Case, Outcome] | None = None
    for case in cases:
        with progress.task(str(case), num_tokens) as advance:
            outcome = serve(case, advance)
        if outcome is not None:
            reference = reference or (case, outcome)
            records.append(record(case, outcome, reference))
            keep(records[-1], outcome)
    return records


def measure(
    prepared: Prepared,
    options: ServingOptions,
    passes: Sequence[Pass],
    display: Display,
    keep: Keep,
) -> list[ServingRecord]:
    """`keep` gets each record as soon as its pass is done. All ranks serve together and make the
    same records but for the times; those of the first rank count."""
    with session_of(prepared) as session:
        one = Measuring(prepared, options, session, display)
        one.server.warm_up(passes[0])

        def cases() -> Iterator[ServingCase]:
            for each in passes:
                if each.is_drafting:
                    one.server.warm_up(each)
                yield ServingCase(each, options, each.name)

        return one.measure(cases(), keep)


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
    with session_of(prepared) as session:
        one = Measuring(prepared, options, session, display)
        one.server.warm_up(each)
        one.lone_s = lone_s = one.server.lone_s(each)
        group, device = session.groups.target, session.device

        def cases() -> Iterator[ServingCase]:
            measured: list[tuple[float, bool]] = []
            while rate := of_first_rank(choose(rates, measured, 1.0 / lone_s), group, device):
                yield ServingCase(each, options.at_rate(rate), f"{rate:.3g} requests/s")
                assert one.newest is not None, "that case has a record"
                if (metrics := one.newest.metrics) is None:
                    return
                measured.append((rate, is_sustained(metrics)))

        return one.measure(cases(), keep)


def choose(rates: Sequence[float], measured: Sequence[tuple[float, bool]], start: float) -> float:
    """The next of `rates` or, if there are none, the one that the search asks for."""
    if not rates:
        return next_rate(measured, start)
    return rates[len(measured)] if len(measured) < len(rates) else END


@dataclass(frozen=True)
class ServingCase:
    """A pass with the requests of `options`; `name` is shown while it is served."""

    each: Pass
    options: ServingOptions
    name: str

    def __str__(self) -> str:
        return self.name


class Measuring:
    """The loaded models of one command."""

    def __init__(
        self,
        prepared: Prepared,
        options: ServingOptions,
        session: RankSession,
        display: Display,
    ) -> None:
        progress = make_progress(session.launch.rank == 0)
        self.prepared, self.server = make_server(prepared, options, session, progress)
        self.session, self.display = session, display
        self.progress: Progress = Silent() if display.is_shown else progress
        self.lone_s: float | None = None  # the time of one request alone, if it was measured
        self.newest: ServingRecord | None = None

    def measure(self, cases: Iterable[ServingCase], keep: Keep) -> list[ServingRecord]:
        num_tokens = sum(shape.output_len - 1 for shape in self.server.shapes)
        return measure_passes(
            cases, num_tokens, self.progress, self.serve, self.record,
            lambda record, served: keep(record),
        )  # fmt: skip

    def serve(self, case: ServingCase, advance: Callable[[int], None]) -> Served:
        """Raises AssertionError if a rank has computed with other threads than its config says."""
        count, server = ThreadCount(), replace(self.server, shapes=case.options.shapes)

        def observe(output: StepOutput, seconds: float) -> None:
            advance(sum(map(len, output.token_ids)))

        view = self.display.view(case.name, case.options.max_concurrency)
        with view as shown, count.during():
            served = server.serve(case.each, observe, shown)
        rank, group = self.session.launch.rank, self.session.groups.target
        ours = count.of_rank(rank, self.prepared.config.parallel.threads_of(rank))
        threads = check_threads(case.name, group.all_gather_object(ours))
        return replace(served, threads=threads)

    def record(
        self, case: ServingCase, served: Served, reference: tuple[ServingCase, Served]
    ) -> ServingRecord:
        (first, of_first), each, options = reference, case.each, case.options
        resolved = self.prepared.config
        is_sampled = resolved.sampling.temperature > 0
        if not each.is_drafting:
            decoding = replace(resolved.decoding, strategy=BASELINE, drafter=None)
            resolved = replace(resolved, decoding=decoding, draft=None)
        self.newest = ServingRecord(
            name=name_of(each.mode, resolved.decoding.drafter),
            **describe_pass(
                self.prepared,
                self.session.describe_environment(),
                served,
                (first.each.mode, of_first),
                resolved.to_dict(),
                {"batching": each.mode, **options.describe()},
                lambda: serving_metrics(
                    served.requests, served.counts, options.goodput or {}, served.peak_memory_bytes,
                    self.lone_s,
                ),
                has_drafts=each.is_drafting,
                is_comparable=not is_sampled or each.is_drafting == first.each.is_drafting,
            ),
        )  # fmt: skip
        return self.newest
