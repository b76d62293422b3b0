"""What the simulator predicts for a pass that was measured: the same scheduler, with the measured
times of stages, links and drafts, and with the candidates that the drafter gave.

Where the drafter was never asked after the committed text, nothing is known of what it would have
given; there, candidates of another place of the same request are taken, drawn with the seed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.pipelined_run.head import Drafted
from magicdec.pipelined_run.measured.use import Observed, PipelineUse, link_time, stage_times
from magicdec.pipelined_speculation.messages import Candidates, Draft
from magicdec.pipelined_speculation.options import Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Request
from magicdec.simulator.machine import Machine
from magicdec.simulator.measured import measure
from magicdec.simulator.modes import PROMPT
from magicdec.simulator.pipeline import Flight
from magicdec.simulator.simulation import Simulation
from magicdec.simulator.text import SPACING, Text

Shown = tuple[int, tuple[float, ...]]
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
    shown = [shown_of(index, request, drafted, seed) for index, request in enumerate(requests)]
    scheduler = PipelinedScheduler(options)
    simulation = Simulation(machine, scheduler, Replayed(shown))
    trace = simulation.run([PROMPT] * len(requests), lengths.pop())
    return measure(machine, trace, scheduler.counts).tokens_per_s / len(requests)


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
    by_rows = {num_rows: statistics.fmean(found) for num_rows, found in times.items()}
    if not by_rows:
        return None, 0.0
    if len(by_rows) == 1 or 1 not in by_rows:
        return statistics.fmean(by_rows.values()), 0.0
    one = by_rows.pop(1)
    costs = [(several / one - 1) / (num_rows - 1) for num_rows, several in by_rows.items()]
    return one, max(0.0, statistics.fmean(costs))


def shown_of(
    index: int, request: Request, drafted: Sequence[Drafted], seed: int
) -> list[Shown | None]:
    """What the drafter gave at each place of a request's output after the right text."""
    output = request.output_ids
    found: dict[int, Shown] = {}
    for each in drafted:
        place = each.num_output + len(each.path)
        is_right = tuple(output[each.num_output : place]) == each.path
        if each.request == index and is_right and place < len(output):
            found[place] = rank_of(output[place], each.candidates)
    known, chooser = list(found.values()), random.Random(seed + index)
    others = [chooser.choice(known) if known else None for _ in output]
    return [found.get(place, others[place]) for place in range(len(output))]


def rank_of(token: int, candidates: Candidates) -> Shown:
    tokens = [candidate for candidate, _ in candidates]
    rank = tokens.index(token) if token in tokens else -1
    return rank, tuple(probability for _, probability in candidates)


@dataclass(frozen=True)
class Replayed:
    """A target and a drafter that give at every place what was given in the measured pass."""

    shown: Sequence[Sequence[Shown | None]]  # by request

    def home(self, flight: Flight) -> Sequence[int] | None:
        return None if flight.is_void else Text(0, (), ()).predict(flight.launch)

    def propose(self, draft: Draft, output: Sequence[int]) -> list[Candidates]:
        return [self._after(draft.request, len(output), path) for path in draft.paths]

    def _after(self, request: int, newest: int, path: Sequence[int]) -> Candidates:
        places, position = self.shown[request], newest + len(path) + 1
        given = places[position - 1] if position <= len(places) else None
        if given is None:
            return ()
        rank, probabilities = given
        is_right = all(token == (newest + i) * SPACING for i, token in enumerate(path, 1))
        right = position * SPACING
        return tuple(
            (right if is_right and index == rank else right + 1 + index, probability)
            for index, probability in enumerate(probabilities)
        )
