"""The traces of `bench_serving_peers.py`: random requests with their arrivals. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from magicdec.workload.request_shapes import TRACE, RequestShape, parse_arrival, read_trace
from peers.serving_peer import TimedRequest

VOCAB = 4096  # of the random model
# Shortest and longest.
PROMPT_LEN = (256, 4096)
OUTPUT_LEN = (16, 128)
CHECKED_REQUESTS = 8
CHECKED_PROMPT_LEN = (100, 700)
CHECKED_OUTPUT_LEN = (8, 24)
WARM_REQUESTS = 4
WARM_OUTPUT_LEN = 8


def make_trace(arrival: str, num_requests: int, seed: int) -> list[TimedRequest]:
    """The requests in the order of arrival. Lengths, prompts and arrivals have generators of their
    own, so that requests are the same for each process. Raises ValueError, naming the flag."""
    asked = parse_arrival(arrival)
    if asked.trace is not None:
        shapes = read_trace(f"--arrival {TRACE}", asked.trace)[:num_requests]
        begin_ms = shapes[0].arrival_ms
        shapes = [replace(shape, arrival_ms=shape.arrival_ms - begin_ms) for shape in shapes]
    else:
        times_ms = asked.times_ms(num_requests, Random(f"arrival {seed}"))
        shapes = random_shapes(times_ms, PROMPT_LEN, OUTPUT_LEN, seed)
    return with_prompts(shapes, seed)


def make_checked_trace(seed: int) -> list[TimedRequest]:
    """A burst of shorter requests. Prompts are longer than a step of OpenVINO GenAI prefills."""
    times_ms = [0.0] * CHECKED_REQUESTS
    return with_prompts(random_shapes(times_ms, CHECKED_PROMPT_LEN, CHECKED_OUTPUT_LEN, seed), seed)


def random_shapes(
    times_ms: Sequence[float], prompt_len: tuple[int, int], output_len: tuple[int, int], seed: int
) -> list[RequestShape]:
    lengths = Random(f"lengths {seed}")
    return [
        RequestShape(time_ms, lengths.randint(*prompt_len), lengths.randint(*output_len))
        for time_ms in times_ms
    ]


def with_prompts(shapes: Sequence[RequestShape], seed: int) -> list[TimedRequest]:
    """Requests with prompts of random token ids, so that no two begin alike."""
    ids = Random(f"prompts {seed}")
    return [
        TimedRequest(
            shape.arrival_ms / 1e3,
            [ids.randrange(3, VOCAB) for _ in range(shape.prompt_len)],
            shape.output_len,
        )
        for shape in shapes
    ]


def make_warm_up(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """A burst of the longest prompts with short outputs, which a peer serves before it is
    measured."""
    longest = sorted(requests, key=lambda request: -len(request.prompt))[:WARM_REQUESTS]
    return [replace(r, arrival_s=0.0, output_len=WARM_OUTPUT_LEN) for r in longest]


def describe_trace(requests: Sequence[TimedRequest]) -> list[dict[str, float]]:
    """The lines of a trace file for `--arrival trace:FILE`."""
    return [
        {"arrival_ms": 1e3 * r.arrival_s, "prompt_len": len(r.prompt), "output_len": r.output_len}
        for r in requests
    ]
