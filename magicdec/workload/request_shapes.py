"""The shapes of a serving workload's requests (arrival, prompt length, output length), drawn or
from a trace. Imports no torch.

An arrival process gives times in ms after the first arrival, by mean time between arrivals, number
of requests and random generator (`names.ARRIVALS`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from magicdec.config.sections import DEFAULT_GEN_LEN
from magicdec.names import ARRIVALS, TRACES, load_named
from magicdec.output.files import first_error, lines_of, open_regular

BURST = "burst"
TRACE = "trace"
PROCESSES = ", ".join(n if n == BURST else f"{n}:MS" for n in ARRIVALS)
FORMS = ", ".join([PROCESSES, *(f"{name}:FILE" for name in (TRACE, *TRACES))])
DEFAULT_NUM_REQUESTS = 8
MOST_TOKENS = 1 << 40  # that a request may ask for
UNIFORM = "uniform"


def burst(mean_ms: float, count: int, random: Random) -> list[float]:
    return [0.0] * count


def constant(mean_ms: float, count: int, random: Random) -> list[float]:
    return [mean_ms * i for i in range(count)]


def uniform(mean_ms: float, count: int, random: Random) -> list[float]:
    """Arrivals at distances uniform between 0 and twice their mean."""
    gaps = (random.uniform(0, 2 * mean_ms) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def poisson(mean_ms: float, count: int, random: Random) -> list[float]:
    """Arrivals of a Poisson process, at exponentially distributed distances."""
    gaps = (random.expovariate(1 / mean_ms) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


@dataclass(frozen=True)
class Arrival:
    """The value of `--arrival`: a process with its mean time, or a trace."""

    process: str
    mean_ms: float = 0.0
    trace: Path | None = None

    def times_ms(self, count: int, random: Random) -> list[float]:
        times: list[float] = load_named(ARRIVALS, self.process)(self.mean_ms, count, random)
        return times

    @property
    def has_sessions(self) -> bool:
        """Whether it is a trace of sessions, with what their prompts have in common."""
        return self.process in TRACES


def parse_arrival(text: str) -> Arrival:
    """The arrival of a text. Raises ValueError if it is none of `FORMS`."""
    name, _, value = text.partition(":")
    if name in (TRACE, *TRACES) and value:
        return Arrival(name, trace=Path(value))
    return parse_process("--arrival", text, FORMS)


def parse_process(flag: str, text: str, forms: str = PROCESSES) -> Arrival:
    """The arrival process of a text. Raises ValueError, naming the flag."""
    name, _, value = text.partition(":")
    if text == BURST:
        return Arrival(BURST)
    try:
        mean_ms = float(value) if name in ARRIVALS and name != BURST else math.nan
    except ValueError:
        mean_ms = math.nan
    if not 0 < mean_ms < math.inf:
        raise ValueError(
            f"{flag} {text} is not known; choose from {forms}, with a time MS larger than 0"
        )
    return Arrival(name, mean_ms)


@dataclass(frozen=True)
class RequestShape:
    """The arrival and the lengths in tokens of a request, from the trace's line `place`."""

    arrival_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    prompt_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    output_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    place: Annotated[str, Field(validation_alias="")] = ""  # a line has no such key


def read_trace(flag: str, path: Path) -> list[RequestShape]:
    """The requests of the file in the order of arrival. Raises ValueError, naming flag, file, line
    and key."""
    adapter = TypeAdapter(RequestShape)
    shapes = list[RequestShape]()
    place = f"{flag}: {path}"
    try:
        with open_regular(path) as file:
            for number, line in lines_of(file):
                place = f"{flag}: {path}, line {number}"
                shapes.append(replace(adapter.validate_json(line, strict=True), place=place))
    except ValidationError as error:
        raise ValueError(f"{place}: {first_error(error)}") from None
    except OSError as error:
        raise ValueError(f"{flag}: {path}: {error.strerror}") from None
    if not shapes:
        raise ValueError(f"{flag}: {path} has no requests")
    return sorted(shapes, key=lambda shape: shape.arrival_ms)


def make_shapes(
    arrival: Arrival,
    num_requests: int | None,
    prompt_len: str,
    gen_len: str | None,
    seed: int,
) -> list[RequestShape]:
    """The requests in the order of arrival, the first at 0 ms; of a trace the first `num_requests`,
    or all. Arrivals and lengths have separate generators with the same `seed`, so that one stays
    when the other changes. Raises ValueError, naming the flag."""
    if arrival.trace is not None:
        shapes = read_trace(f"--arrival {arrival.process}", arrival.trace)
        check_count(num_requests, len(shapes), arrival.trace)
        begin_ms = shapes[0].arrival_ms
        return [replace(s, arrival_ms=s.arrival_ms - begin_ms) for s in shapes[:num_requests]]
    count = num_requests or DEFAULT_NUM_REQUESTS
    prompts = parse_lengths("--prefix_len", prompt_len)
    outputs = parse_lengths("--gen_len", gen_len or str(DEFAULT_GEN_LEN))
    prompt_random = Random(f"prefix_len {seed}")
    output_random = Random(f"output_len {seed}")
    return [
        RequestShape(at_ms, prompt_random.randint(*prompts), output_random.randint(*outputs))
        for at_ms in arrival.times_ms(count, Random(f"arrival {seed}"))
    ]


def check_count(num_requests: int | None, num_held: int, trace: Path) -> None:
    """Raises ValueError if a trace has fewer requests, or sessions, than are asked for."""
    if num_requests is not None and num_requests > num_held:
        raise ValueError(
            f"--num_requests {num_requests}: {trace} has {num_held}; choose fewer, or leave the "
            "flag out for all"
        )


def parse_lengths(flag: str, text: str) -> tuple[int, int]:
    """The smallest and the largest length. Raises ValueError, naming the flag."""
    number = r"([1-9]\d{0,11})"  # below MOST_TOKENS
    pattern = rf"{UNIFORM}:{number}:{number}|{number}"
    if (parts := re.fullmatch(pattern, text)) is not None:
        low, high, fixed = parts.groups()
        if fixed or int(low) <= int(high):
            return int(fixed or low), int(fixed or high)
    raise ValueError(
        f"{flag} {text} is not known; choose a whole number of at least 1, or {UNIFORM}:LOW:HIGH, "
        "where LOW is at most HIGH"
    )
