"""Passes that were never served: their requests are drawn, and their metrics computed from them."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from conftest import ROOT

from magicdec.bench.serving.metrics import (
    acceptance_by_context,
    categories_of,
    completed,
    serving_metrics,
    times_by_turn,
)
from magicdec.bench.serving.record import ServingRecord, describe_requests
from magicdec.engine.scheduler import StepCounts
from magicdec.records.acceptance import ReportedCounts, Verification, Verifications
from magicdec.records.reading import parse_line
from magicdec.records.stalls import TimedStep
from magicdec.runner.request import Request, SamplingParams, Turn
from magicdec.systems.servers.details import ANSWERS, BOTH, COUNTERS, ServersDetails

BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
NUM_REQUESTS = 15
BEGIN_S = 1000.0
GAMMA = 3
# Those of one group by context and of the next begin between them.
PROMPT_LENS = (4097, 5, 2048, 2049, 700, 4096, 33, 5, 900)
GOODPUT = {"ttft": 300.0, "tpot": 40.0, "e2el": 900.0}
PLAIN = "plain"
STEPS = "steps"
AHEAD = "ahead"
TURNS = "turns"
OF_SERVERS = ("vllm", "sums", "histogram", "even", COUNTERS, BOTH)
KINDS = (PLAIN, STEPS, AHEAD, TURNS, *OF_SERVERS)


@cache
def measured() -> ServingRecord:
    """A record of which the rest is taken."""
    lines = BASELINES.read_text().splitlines()
    line = next(each for each in lines if json.loads(each)["kind"] == "serving")
    return replace(parse_line(line, ServingRecord), seal=None)


def served(kind: str = STEPS, seed: int = 0) -> ServingRecord:
    rng = random.Random(seed)
    requests = [drawn_request(rng, number) for number in range(NUM_REQUESTS)]
    if kind == TURNS:
        for number, request in enumerate(requests):
            request.turn = Turn(number // 3, number % 3 + 1, None, tuple)  # type: ignore[arg-type]
    counts = drawn_moves(rng, requests, kind)
    is_external = kind in OF_SERVERS
    if is_external:
        counts.num_steps = counts.num_in_flight = 0
    judged = drawn_drafts(rng, requests, kind)
    steps = [] if is_external else drawn_steps(rng)
    categories = ["maths", "code", None] * (NUM_REQUESTS // 3)
    of_requests = categories_of(requests, categories)
    peak = None if is_external else 3 << 30
    metrics = serving_metrics(requests, counts, GOODPUT, peak, judged, steps, of_requests)
    record = measured()
    config = record.config | {"workload": record.config["workload"] | {"goodput": GOODPUT}}
    return replace(
        record,
        name="endpoint" if is_external else record.name,
        config=config,
        workload=replace(record.workload, categories=categories),
        metrics=metrics,
        requests=describe_requests(requests, counts.moves, requests[0].arrived_s, judged),
        times_by_turn=times_by_turn(requests, counts.moves),
        acceptance_by_context=acceptance_by_context(requests, judged),
        details=completed(report_of(kind), metrics, judged) if is_external else None,
    )


def drawn_request(rng: random.Random, number: int) -> Request:
    """The first has one token, and the second all in one step."""
    num_tokens = 1 if number == 0 else rng.randint(4, 12)
    prompt_len = PROMPT_LENS[number % len(PROMPT_LENS)]
    request = Request(number, tuple(range(prompt_len)), SamplingParams(num_tokens))
    request.arrived_s = BEGIN_S + number * rng.uniform(0.05, 0.1)
    at_s = request.arrived_s + rng.uniform(0.2, 0.6)
    while request.finished_s is None:
        size = num_tokens if number == 1 else rng.randint(1, 3)
        request.append([7] * size, at_s)
        at_s += rng.uniform(0.03, 0.2)
    return request


def drawn_moves(rng: random.Random, requests: Sequence[Request], kind: str) -> StepCounts:
    """With drafts by steps, the last two requests are preempted once. Turns and a server of text
    have what was found of prompts."""
    counts = StepCounts(num_steps=40, num_in_flight=100)
    looks_up = kind in (TURNS, "vllm", STEPS)
    for request in requests:
        number = request.request_id
        moves = counts.moves[number]
        first_s = request.token_times_s[0]
        moves.joined_s.append(request.arrived_s + 0.3 * (first_s - request.arrived_s))
        if looks_up:
            counts.look_up(number, len(request.prompt_ids), rng.randint(0, 5))
        if kind in (STEPS, TURNS) and number >= NUM_REQUESTS - 2:
            last_s = request.token_times_s[-1]
            moves.preempted_s.append(first_s + 0.25 * (last_s - first_s))
            moves.joined_s.append(first_s + 0.5 * (last_s - first_s))
            counts.num_preemptions += 1
            emitted = sum(at_s < moves.joined_s[-1] for at_s in request.token_times_s)
            counts.look_up(number, len(request.prompt_ids) + emitted - 1, 3)
    return counts


def drawn_drafts(rng: random.Random, requests: Sequence[Request], kind: str) -> Verifications:
    """Of all requests but the first; nothing of a pass without drafts. Steps draft other numbers,
    except for a server whose histogram says all of them."""
    found = Verifications()
    for request in requests[1:] if kind != PLAIN else ():
        left = len(request.output_ids) - 1
        if kind == AHEAD:
            found.num_cancelled[request.request_id] = rng.randint(0, 4)
        while left > 0:
            drafted = GAMMA if kind in ("even", COUNTERS) else rng.randint(1, GAMMA)
            accepted = rng.randint(0, drafted)
            emitted = min(accepted + 1, left)
            position = len(request.prompt_ids) + left if kind == AHEAD else None
            found.add(request.request_id, drafted, accepted, emitted, None, position)
            left -= emitted
    return as_reported(found, kind) if kind in OF_SERVERS else found


def as_reported(found: Verifications, kind: str) -> Verifications:
    """What a server reports of these in its answers, in its counters, or in both."""
    whole = {number: ReportedCounts.of(steps) for number, steps in found.by_request.items()}
    every: list[Verification] = found.every
    of_pass = replace(ReportedCounts.of(every), steps=None, emitted=None)
    if kind == COUNTERS:
        return Verifications(reported_total=of_pass)
    if kind == "vllm":
        return Verifications(reported={n: replace(each, emitted=None) for n, each in whole.items()})
    if kind in ("sums", BOTH):
        sums = {n: ReportedCounts(each.drafted, each.accepted) for n, each in whole.items()}
        return Verifications(reported=sums, reported_total=of_pass if kind == BOTH else None)
    # Of a program whose steps all verify.
    return Verifications(
        reported={
            n: replace(each, steps=None, emitted=sum(v.emitted for v in found.by_request[n]))
            for n, each in whole.items()
        }
    )


def report_of(kind: str) -> ServersDetails:
    source = kind if kind in (COUNTERS, BOTH) else ANSWERS
    return ServersDetails(program="vllm", source=source, missing=[], problems=[])


def drawn_steps(rng: random.Random) -> list[TimedStep]:
    """Of one kind, of which two stall."""
    steps = [TimedStep(rng.uniform(9.0, 11.0), (0, GAMMA, 2)) for _ in range(30)]
    for place, ms in ((11, 90.0), (23, 60.0)):
        steps[place] = steps[place]._replace(ms=ms)
    return steps
