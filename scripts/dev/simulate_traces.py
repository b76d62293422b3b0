"""Serves the requests of recorded passes again in virtual time, on the scheduler of the engine, and
puts its times beside the measured ones:

    magicdec serve --modes sequential inflight inflight+draft --draft self --out FILE ...
    python scripts/dev/simulate_traces.py FILE

Of a pass in flight a row: duration, mean TTFT and TPOT and mean time of a session as measured, and
the simulated ones over these. What is simulated knows of the pass when requests came, how long they
are, what the prefix cache had of them and how many tokens each verification emitted, and two fits:
the time of a decode step over its rows and draft tokens, from the steps of this pass in which no
prompt was prefilled, and the time of a part of a prompt over its tokens and the context before
them, from the requests that were alone until their first token, of passes with as many threads. A
request that came after others of its session (or of a closed loop) comes again as long after the
last of these as it did.

Not simulated: preemptions (such passes are left out), contexts that make decode steps slower, and
what a drafter of its own does with a prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).parents[2]))

from magicdec.engine.arrivals import Arrivals
from magicdec.engine.scheduler import Scheduler
from magicdec.output.tables import Column, Table, print_tables
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.reading import load_passes
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput, Turn
from magicdec.runner.step_plan import PREFILL_TOKENS, BatchLimits

IN_FLIGHT = ("inflight", "inflight+draft")
ENGINE = ("sequential", *IN_FLIGHT)  # whose prompts are prefilled alike
TIMES = ("duration, s", "TTFT, ms", "TPOT, ms", "session, s")


def fit(rows: Sequence[Sequence[float]], times_ms: Sequence[float]) -> Any:
    """Coefficients >= 0 with the least squared errors: their mean is about 0, so that sums fit."""
    return nnls(np.array(rows, float), np.array(times_ms, float))[0]


@dataclass(frozen=True)
class StepTimes:
    """The fitted times, in ms."""

    decode: Any  # of a step, a row and a draft token
    prefill: Any  # of a part of a prompt, a token and a token of context that it reads

    def decode_ms(self, rows: int, drafted: int) -> float:
        return float(self.decode @ (1, rows, drafted))

    def prefill_ms(self, begin: int, end: int) -> float:
        return float(self.prefill @ prompt_sizes(begin, end))


def prompt_sizes(begin: int, end: int) -> tuple[float, ...]:
    return 1.0, end - begin, (end - begin) * (begin + end) / 2


def sizes_in_parts(begin: int, end: int, room: int) -> tuple[float, ...]:
    """The sums of `prompt_sizes` over the steps in which a prompt alone is prefilled."""
    parts = [prompt_sizes(part, min(part + room, end)) for part in range(begin, end, room)]
    return tuple(map(sum, zip(*parts, strict=True)))


def room_of(record: PassRecord) -> int:
    """Prompt tokens of a step."""
    return record.config["workload"].get("prefill_tokens") or PREFILL_TOKENS


def decode_fit(groups: Sequence[GroupRecord]) -> Any:
    rows = list[tuple[float, ...]]()
    times = list[float]()
    for group in groups:
        count = len(group.step_ms)
        prompt_tokens = group.step_prompt_tokens or [0] * count
        gammas = group.step_max_gamma or [0] * count
        columns = zip(group.step_ms, group.step_rows or (), gammas, prompt_tokens, strict=True)
        for ms, num_rows, gamma, num_prompt in columns:
            if not num_prompt:
                rows.append((1.0, num_rows, num_rows * gamma))
                times.append(ms)
    return fit(rows, times)


def alone(requests: Sequence[RequestRecord]) -> Iterator[RequestRecord]:
    """Those beside which nothing else was in flight until their first token."""
    for request in requests:
        others = (other for other in requests if other is not request)
        if all(
            other.finished_ms <= request.joined_ms[0]
            or other.joined_ms[0] >= request.first_token_ms
            for other in others
        ):
            yield request


def num_found(request: RequestRecord) -> int:
    return (request.joined_prefix_tokens or [0])[0]


def threads_of(record: PassRecord) -> tuple[int, ...]:
    return tuple(record.groups[0].threads)


def prefill_fit(records: Sequence[PassRecord], threads: tuple[int, ...]) -> Any:
    """Of the passes with these threads. Raises ValueError if too few of their requests were
    alone."""
    found = [
        (request, room_of(record))
        for record in records
        if threads_of(record) == threads
        for _, requests in record.groups_of_requests
        for request in alone(requests)
    ]
    sizes = [sizes_in_parts(num_found(r), r.prompt_len, room) for r, room in found]
    times = [request.first_token_ms - request.joined_ms[0] for request, _ in found]
    if len(found) < 3:
        raise ValueError("fewer than 3 requests were prefilled alone; record `sequential` as well")
    return fit(sizes, times)


def is_same_session(one: RequestRecord, other: RequestRecord) -> bool:
    return one.conversation is not None and one.conversation == other.conversation


class Replay:
    """The requests of a group in virtual time. Prompts lack what the prefix cache had of them."""

    def __init__(
        self, record: PassRecord, requests: Sequence[RequestRecord], times: StepTimes
    ) -> None:
        workload = record.config["workload"]
        rows = workload.get("n_samples") or max(workload["batch_size"], record.concurrency or 1)
        self.scheduler = Scheduler(rows, BatchLimits(prefill_tokens=room_of(record)))
        self.recorded = requests
        self.times = times
        self.steps = [
            dict(zip(r.per_step_context or (), r.verifications(), strict=True)) for r in requests
        ]
        self.requests = list[Request]()
        for number, request in enumerate(requests):
            self.requests.append(self.request_of(number, request, record.concurrency is not None))

    def request_of(self, number: int, request: RequestRecord, is_closed_loop: bool) -> Request:
        prompt = (0,) * (request.prompt_len - num_found(request))
        made = Request(number, prompt, SamplingParams(request.output_len))
        made.arrived_s = request.arrival_ms / 1e3
        earlier = [
            (other.finished_ms, place)
            for place, other in enumerate(self.recorded[:number])
            if other.finished_ms <= request.arrival_ms + 1e-3
            and (is_closed_loop or is_same_session(other, request))
        ]
        if earlier:
            end_ms, place = max(earlier)
            wait_s = max(0.0, request.arrival_ms - end_ms) / 1e3
            made.turn = Turn(number, 1, (self.requests[place],), lambda _: prompt, wait_s)
        return made

    def run(self) -> float:
        """Serves all of them. Returns the end, in seconds."""
        arrivals = Arrivals(self.requests)
        now = 0.0
        while True:
            for request in arrivals.take(arrivals.count(now)):
                self.scheduler.add([request], request.arrived_s)
            plan = self.scheduler.schedule()
            if plan is None:
                if not arrivals:
                    return now
                now = arrivals.next_s
                continue
            for part in plan.parts:
                found = num_found(self.recorded[part.request.request_id])
                now += self.times.prefill_ms(found + part.start, found + part.stop) / 1e3
            complete = tuple(part.request for part in plan.parts if part.is_last)
            self.scheduler.commit(Batch(complete), StepOutput([[0]] * len(complete)), now)
            if plan.decoding is not None:
                now += self.decode(plan.decoding, now)

    def decode(self, batch: Batch, now: float) -> float:
        emitted = []
        gammas = [0]
        for request in batch.requests:
            number = request.request_id
            context = num_found(self.recorded[number]) + len(request.prompt_ids)
            step = self.steps[number].get(context + len(request.output_ids))
            emitted.append([0] * (1 if step is None else step.emitted))
            gammas.append(0 if step is None else step.drafted)
        rows = len(batch.requests)
        seconds = self.times.decode_ms(rows, rows * max(gammas)) / 1e3
        self.scheduler.commit(batch, StepOutput(emitted), now + seconds)
        return seconds


def times_of(
    spans: Sequence[tuple[float, float, float, int]], conversations: Sequence[int | None]
) -> list[float]:
    """`TIMES` of requests with their arrivals, first and last tokens in seconds, and outputs."""
    sessions = dict[object, list[tuple[float, float]]]()
    for number, ((begin, _, end, _), name) in enumerate(zip(spans, conversations, strict=True)):
        sessions.setdefault(("alone", number) if name is None else name, []).append((begin, end))
    tpots = [1e3 * (end - first) / (count - 1) for _, first, end, count in spans if count > 1]
    return [
        max(end for _, _, end, _ in spans) - min(begin for begin, *_ in spans),
        1e3 * fmean(first - begin for begin, first, _, _ in spans),
        fmean(tpots),
        fmean(max(e for _, e in parts) - min(b for b, _ in parts) for parts in sessions.values()),
    ]


def compare(record: PassRecord, times: StepTimes) -> list[list[float]]:
    """Of each group the measured times, then the simulated ones."""
    found = []
    for _, requests in record.groups_of_requests:
        replay = Replay(record, requests, times)
        replay.run()
        names = [request.conversation for request in requests]
        measured = [
            (r.arrival_ms / 1e3, r.first_token_ms / 1e3, r.finished_ms / 1e3, r.output_len)
            for r in requests
        ]
        simulated = [
            (r.arrived_s, r.first_token_s or 0.0, r.finished_s or 0.0, len(r.output_ids))
            for r in replay.requests
        ]
        found.append([*times_of(measured, names), *times_of(simulated, names)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    loaded = [record for path in parser.parse_args().records for record in load_passes(path)]
    records = [r for r in loaded if r.passed and r.mode in ENGINE and not r.shares_prefill]
    try:
        fits = {key: prefill_fit(records, key) for key in {threads_of(r) for r in records}}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    rows = list[list[object]]()
    every = list[Any]()  # ratios
    for record in records:
        if record.mode not in IN_FLIGHT or any(r.preempted_ms for r in record.requests):
            continue
        times = StepTimes(decode_fit(record.groups), fits[threads_of(record)])
        means = np.mean(compare(record, times), axis=0)
        ratios = means[4:] / means[:4]
        every.append(ratios)
        rows.append([title_of(record), *cells(means[:4], ratios)])
    if not rows:
        raise SystemExit("no pass in flight is there without preemptions")
    geometric_means = np.exp(np.mean(np.log(every), axis=0))
    rows.append(["geometric mean", *cells([None] * 4, geometric_means)])
    columns = [Column("pass", is_text=True)]
    columns += [Column(name) for time in TIMES for name in (time, "simulated")]
    print_tables(
        [Table(columns, rows, title="Passes, and their simulation over what was measured")]
    )
    return 0


def title_of(record: PassRecord) -> str:
    drafter = record.config["decoding"]["drafter"]
    return f"{record.arrival}: {record.name}{'' if drafter is None else f', {drafter}'}"


def cells(measured: Sequence[float | None], ratios: Sequence[float]) -> Iterator[str]:
    for value, ratio in zip(measured, ratios, strict=True):
        yield "" if value is None else f"{value:.3f}"
        yield f"{ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
