"""The shapes of all requests of a serving workload: arrival, prompt length and output length, by a
process and a distribution or from a trace. Imports no torch.

Must not know the text of the prompts, nor how requests are served.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from magicdec.workload.arrivals import Arrival
from magicdec.workload.trace import RequestShape, read_trace

DEFAULT_NUM_REQUESTS, DEFAULT_PROMPT_LEN, DEFAULT_OUTPUT_LEN = 16, 512, "32"
UNIFORM = "uniform"


def make_shapes(
    arrival: Arrival,
    num_requests: int | None,
    prompt_len: int | None,
    output_len: str | None,
    seed: int,
) -> list[RequestShape]:
    """The requests in the order of arrival; the first arrives at 0 ms. A trace has its own lengths.
    Of its requests, the first `num_requests` count. None stands for the default, or for the whole
    trace. Arrivals and lengths are drawn from separate generators with the same `seed`, so that
    each stays the same when the other changes. Raises ValueError, naming the flag."""
    for flag, value in (("--num_requests", num_requests), ("--prefix_len", prompt_len)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} is too small; it must be at least 1")
    if arrival.trace is not None:
        for flag, given in (("--prefix_len", prompt_len), ("--output_len", output_len)):
            if given is not None:
                raise ValueError(f"{flag} {given} does nothing: the trace has the lengths")
        return _first(arrival, num_requests)
    count = num_requests or DEFAULT_NUM_REQUESTS
    low, high = parse_output_len(output_len or DEFAULT_OUTPUT_LEN)
    lengths, times = Random(f"output_len {seed}"), Random(f"arrival {seed}")
    return [
        RequestShape(at_ms, prompt_len or DEFAULT_PROMPT_LEN, lengths.randint(low, high))
        for at_ms in arrival.times_ms(count, times)
    ]


def _first(arrival: Arrival, count: int | None) -> list[RequestShape]:
    assert arrival.trace is not None
    shapes = read_trace(f"--arrival {arrival.process}", arrival.trace)
    if count is not None and count > len(shapes):
        raise ValueError(
            f"--num_requests {count}: {arrival.trace} has {len(shapes)}; "
            "choose fewer, or leave the flag out for all"
        )
    begin_ms = shapes[0].arrival_ms
    return [replace(s, arrival_ms=s.arrival_ms - begin_ms) for s in shapes[:count]]


def parse_output_len(text: str) -> tuple[int, int]:
    """The smallest and the largest output length. Raises ValueError, naming the flag."""
    name, colon, ends = text.partition(":")
    low, middle, high = ends.partition(":")
    try:
        if name == UNIFORM and middle:
            found = int(low), int(high)
        elif not colon:
            found = int(text), int(text)
        else:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--output_len {text} is not known; choose a whole number, or {UNIFORM}:LOW:HIGH"
        ) from None
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"--output_len {text}: lengths are at least 1, and LOW is at most HIGH")
    return found
