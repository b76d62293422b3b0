"""Serves the requests of `magicdec pipeline` in each of its passes, and makes a record of each,
with what the simulator predicts for the pass: the same scheduler, with the measured times of
stages, links and drafts, and with the candidates that the drafter gave.

Where the drafter was never asked after the committed text, nothing is known of what it would have
given; there, candidates of another place of the same request are taken, drawn with the seed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from magicdec.console import make_progress
from magicdec.distributed.start import close_groups
from magicdec.pipeline.tracing import Span
from magicdec.pipelined_run.head import Drafted
from magicdec.pipelined_run.measured.metrics import (
    Observed,
    PipelineUse,
    SpeculationMetrics,
    SpeculationRecord,
    link_time,
    pipeline_use,
    speculation_metrics,
    stage_times,
)
from magicdec.pipelined_run.passes import Outcome, Passes
from magicdec.pipelined_run.prepare import PreparedPipeline
from magicdec.pipelined_speculation.messages import Candidates, Draft
from magicdec.pipelined_speculation.options import Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Request
from magicdec.serving.measure import measure_passes
from magicdec.serving.record import OF_DRAFTS, describe_pass
from magicdec.setup.session import RankSession
from magicdec.simulator.machine import Flight, Machine
from magicdec.simulator.run import PROMPT
from magicdec.simulator.run import measure as measure_simulated
from magicdec.simulator.simulation import Simulation
from magicdec.simulator.text import SPACING, Text

Traces = dict[str, Sequence[Sequence[Span]]]
"""The spans of each rank, by the pass."""


def measure(
    prepared: PreparedPipeline, keep: Callable[[SpeculationRecord], None]
) -> tuple[list[SpeculationRecord], Traces]:
    """`keep` gets each record as soon as its pass is done. All ranks call it; only the first makes
    records. Raises PeerLost if another rank has ended."""
    launch, options, traces = prepared.run.launch, prepared.options, Traces()

    def keep_trace(record: SpeculationRecord, outcome: Outcome) -> None:
        keep(record)
        if outcome.spans is not None:
            traces[record.name] = outcome.spans

    session = RankSession(launch, prepared.whole.parallel)
    progress = make_progress(launch.rank == 0)
    session.begin()
    passes = Passes(prepared, session.device, progress)
    records = measure_passes(
        options.passes, sum(shape.output_len for shape in options.shapes), progress, passes.serve,
        partial(make_record, prepared, session), keep_trace,
    )  # fmt: skip
    passes.close()
    close_groups()
    return records, traces


def make_record(
    prepared: PreparedPipeline,
    session: RankSession,
    name: str,
    outcome: Outcome,
    reference: tuple[str, Outcome],
) -> SpeculationRecord:
    """`reference` is the first pass and its outcome."""
    config, transport, drafting = prepared.run.config.to_dict(), prepared.transport, None
    if outcome.spans is not None:  # by stages
        config["parallel"]["transport"] = None if transport is None else transport.to_dict()
        drafting = prepared.drafting
    if drafting is not None:
        of_draft = drafting.config.to_dict()
        config |= {name: of_draft[name] for name in OF_DRAFTS}

    def metrics() -> SpeculationMetrics:
        use, predicted = describe_use(prepared, name, outcome)
        return speculation_metrics(outcome.requests, outcome.counts.moves, use, predicted)

    return SpeculationRecord(
        name=name,
        **describe_pass(
            prepared.run, session.describe_environment(), outcome,
            reference if prepared.options.has_baseline else None,
            config, prepared.options.describe(), metrics, has_drafts=drafting is not None,
        ),
    )  # fmt: skip


def describe_use(
    prepared: PreparedPipeline, name: str, outcome: Outcome
) -> tuple[PipelineUse | None, float | None]:
    """How the ranks spent their time in a mode, and the tokens a second that the simulator
    predicts for it."""
    if outcome.spans is None or outcome.scheduled is None or outcome.drafted is None:
        return None, None
    options, observed = prepared.options, observe(prepared, outcome)
    use = pipeline_use(observed, outcome.scheduled, options.needs_drafts)
    machine = machine_of(observed, use, None if options.link is None else options.link.delay_s)
    if machine is None:
        return use, None
    predicted = predict_tokens_per_s(
        outcome.requests, outcome.drafted, machine, options.of_mode(name),
        prepared.run.workload.seed,
    )  # fmt: skip
    return use, predicted


def observe(prepared: PreparedPipeline, outcome: Outcome) -> Observed:
    """What counts is the time from the first token of any request to the last."""
    assert outcome.spans is not None, "not the baseline"
    begin_s = min(request.token_times_s[0] for request in outcome.requests)
    end_s = max(request.token_times_s[-1] for request in outcome.requests)
    return Observed(prepared.layout, outcome.spans, begin_s, end_s)


Place = tuple[int, tuple[float, ...]]
"""The rank of the target's token among the candidates of a place, -1 if it is none of them, and
their probabilities."""


def predict_tokens_per_s(
    requests: Sequence[Request],
    drafted: Sequence[Drafted],
    machine: Machine,
    options: Options,
    seed: int,
) -> float | None:
    """The tokens/s of a request, mean over the requests. None if these have several output
    lengths, which the simulator does not know."""
    lengths = {len(request.output_ids) for request in requests}
    if len(lengths) > 1 or min(lengths) < 2:
        return None
    places = [places_of(index, request, drafted, seed) for index, request in enumerate(requests)]
    scheduler = PipelinedScheduler(options)
    simulation = Simulation(machine, scheduler, Replayed(places))
    trace = simulation.run([PROMPT] * len(requests), lengths.pop())
    return measure_simulated(machine, trace, scheduler.counts).tokens_per_s / len(requests)


def machine_of(observed: Observed, use: PipelineUse, delay_s: float | None) -> Machine | None:
    """The machine that was measured; `delay_s` is that of an emulated link, to which comes what
    sending and receiving take. None if a stage computed no run of decoding."""
    stages = observed.layout.stages
    times = [decode_times(observed, rank) for rank in stages]
    if any(stage_s is None for stage_s, _ in times):
        return None
    is_apart = observed.layout.draft_rank != 0
    link_s = link_time(observed)
    if link_s is None:
        link_s = delay_s or 0.0
    return Machine(
        tuple(stage_s for stage_s, _ in times if stage_s is not None),
        layers=max(1, round(statistics.fmean(len(observed.layout.layers[r]) for r in stages))),
        row_cost=statistics.fmean(row_cost for _, row_cost in times),
        link_s=link_s,
        cancel_s=link_s if delay_s is None else delay_s,
        draft_s=(use.draft_ms or 0.0) / 1e3 + (2 * link_s if is_apart else 0.0),
    )


def decode_times(observed: Observed, rank: int) -> tuple[float | None, float]:
    """Seconds of a stage for one row, and the share of it that each further row adds."""
    times = stage_times(observed, rank)
    by_rows = {num_rows: statistics.fmean(each) for num_rows, each in times.items()}
    if not by_rows:
        return None, 0.0
    if len(by_rows) == 1 or 1 not in by_rows:
        return statistics.fmean(by_rows.values()), 0.0
    one = by_rows.pop(1)
    costs = [(several / one - 1) / (num_rows - 1) for num_rows, several in by_rows.items()]
    return one, max(0.0, statistics.fmean(costs))


def places_of(
    index: int, request: Request, drafted: Sequence[Drafted], seed: int
) -> list[Place | None]:
    """What the drafter gave at each place of a request's output after the right text."""
    output = request.output_ids
    known: dict[int, Place] = {}
    for each in drafted:
        place = each.num_output + len(each.path)
        is_right = tuple(output[each.num_output : place]) == each.path
        if each.request == index and is_right and place < len(output):
            known[place] = rank_of(output[place], each.candidates)
    values, chooser = list(known.values()), random.Random(seed + index)
    others = [chooser.choice(values) if values else None for _ in output]
    return [known.get(place, others[place]) for place in range(len(output))]


def rank_of(token: int, candidates: Candidates) -> Place:
    tokens = [candidate for candidate, _ in candidates]
    rank = tokens.index(token) if token in tokens else -1
    return rank, tuple(probability for _, probability in candidates)


@dataclass(frozen=True)
class Replayed:
    """A target and a drafter that give at every place what was given in the measured pass."""

    places: Sequence[Sequence[Place | None]]  # by request

    def home(self, flight: Flight) -> Sequence[int] | None:
        return None if flight.is_void else Text(0, (), ()).predict(flight.launch)

    def propose(self, draft: Draft, output: Sequence[int]) -> list[Candidates]:
        return [self._after(draft.request, len(output), path) for path in draft.paths]

    def _after(self, request: int, newest: int, path: Sequence[int]) -> Candidates:
        places, position = self.places[request], newest + len(path) + 1
        place = places[position - 1] if position <= len(places) else None
        if place is None:
            return ()
        rank, probabilities = place
        is_right = all(token == (newest + i) * SPACING for i, token in enumerate(path, 1))
        right = position * SPACING
        return tuple(
            (right if is_right and index == rank else right + 1 + index, probability)
            for index, probability in enumerate(probabilities)
        )
