"""ServingOptions: what `magicdec inflight` asks for beside the model: the requests, how they are
batched, and the passes that follow: one for each batching, and one more with the drafter if there
is one. Imports no torch.

Owns the checks that need no model. Must not know the flags of other commands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from magicdec.config.sections import DEFAULT_GEN_LEN, WorkloadSection
from magicdec.config.setting import same, setting
from magicdec.names import BATCHINGS
from magicdec.serving.metrics import GOODPUT_OF
from magicdec.workload.request_shapes import FORMS, TRACE, ShapedOptions, make_shapes, parse_arrival

WINDOW_MS, PREFILL_TOKENS = 1000.0, 512
FLAGS = ("--prefix_len", "--gen_len")  # the lengths of a request without a trace
WINDOWED = "dynamic"  # the batching that has a time window


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """The bounds in ms by their metrics, such as ttft:200. Raises ValueError."""
    bounds: dict[str, float] = {}
    for word in words:
        name, _, most = word.partition(":")
        if name not in GOODPUT_OF:
            forms = ", ".join(f"{name}:MS" for name in GOODPUT_OF)
            raise ValueError(f"{word} is not known; choose from {forms}")
        if name in bounds:
            raise ValueError(f"names {name} twice; name each bound once")
        try:
            bounds[name] = float(most)
        except ValueError:
            bounds[name] = 0.0
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"{word}: {most!r} is no time in ms larger than 0")
    return bounds


@dataclass(frozen=True)
class ServingOptions(ShapedOptions):
    """The options of `magicdec inflight`. `gen_len` is None if a trace has the lengths, `window_ms`
    without dynamic batching."""

    arrival: str = setting(
        "poisson:100",
        f"When requests arrive: {FORMS}. MS is the mean time between two arrivals. A line of a "
        f"{TRACE} is a JSON object with arrival_ms, prompt_len and output_len.",
        metavar="PROCESS",
    )
    modes: tuple[str, ...] | None = same(ShapedOptions, "modes", choices=tuple(BATCHINGS))
    sweep_rate: tuple[float, ...] | None = setting(
        None,
        "Serve the requests in flight at each of these rates, as Poisson arrivals a second. "
        "Without a rate, find the largest one that is sustained.",
        metavar="RATE",
        above=0,
        can_be_empty=True,
    )
    max_concurrency: int = same(WorkloadSection, "batch_size")
    prefill_tokens: int | None = setting(
        None,
        "Prompt tokens that a step prefills at most, beside its decoding. Default: 512; in a ring, "
        "--prefill_chunk for each stage.",
        least=1,
    )
    window_ms: float | None = setting(
        None,
        f"How long the first request of a batch waits for others in {WINDOWED} batching. Default: "
        f"{WINDOW_MS:.0f}.",
        metavar="MS",
        least=0,
    )
    block_tokens: int = setting(
        256, "Tokens of a block of the KV cache, which a request takes as it grows.", least=1
    )
    cache_tokens: int | None = setting(
        None,
        "Tokens that the KV cache holds of all requests together. If it runs out, the youngest "
        "request is preempted. Default: enough for every request to its end.",
        least=1,
    )
    goodput: dict[str, float] | None = setting(
        None,
        "Count the requests a second that keep all of these bounds, such as ttft:500 tpot:50; of "
        f"{', '.join(GOODPUT_OF)}.",
        metavar="METRIC:MS",
        parse=parse_goodput,
    )

    @property
    def batchings(self) -> tuple[str, ...]:
        """The batchings that are compared."""
        return tuple(BATCHINGS) if self.modes is None else self.modes

    def with_shapes(self, seed: int) -> ServingOptions:
        """These options with their requests, and with every default. Raises ValueError for flags
        that exclude each other, and for a malformed trace."""
        if self.window_ms is not None and WINDOWED not in self.batchings:
            raise ValueError(
                f"--window_ms {self.window_ms} does nothing: --modes has no {WINDOWED}"
            )
        arrival = parse_arrival(self.arrival)
        shapes = make_shapes(arrival, self.num_requests, self.prefix_len, self.gen_len, seed)
        window_ms = WINDOW_MS if self.window_ms is None else self.window_ms
        return replace(
            self,
            gen_len=None if arrival.trace else self.gen_len or str(DEFAULT_GEN_LEN),
            prefill_tokens=self.prefill_tokens or PREFILL_TOKENS,
            window_ms=window_ms if WINDOWED in self.batchings else None,
            goodput=self.goodput or {},
            shapes=tuple(shapes),
        )

    def check_lengths(self, most: int, model: str) -> None:
        """Raises ValueError for a request that is longer than the `most` tokens of the model. It
        names the line of the trace, or the flags."""
        for shape in self.shapes:
            total = shape.prompt_len + shape.output_len
            if total > most:
                names = ("prompt_len", "output_len") if shape.place else FLAGS
                text = f"{names[0]} {shape.prompt_len} + {names[1]} {shape.output_len} = {total}"
                place = f"{shape.place}: " if shape.place else ""
                raise ValueError(f"{place}{text} exceeds the {most} positions of {model}")

    @property
    def counted_by(self) -> str:
        """What says how many prompts there are, for messages."""
        if self.shapes[0].place:
            return (
                f"--arrival {self.arrival}, whose longest prompt has {self.longest_prompt} tokens"
            )
        return "--num_requests"

    def check_cache(self, needed: int) -> None:
        """Raises ValueError if the KV cache is smaller than the longest request, which takes
        `needed` tokens with its drafts."""
        if self.cache_tokens is not None and self.cache_tokens < needed:
            raise ValueError(
                f"--cache_tokens {self.cache_tokens} is too small; the longest request takes "
                f"{needed} tokens"
            )

    def at_rate(self, rate: float) -> ServingOptions:
        """The same requests with Poisson arrivals at `rate` requests a second. The times between
        arrivals are those of `shapes`, stretched."""
        last_s = self.shapes[-1].arrival_ms / 1e3
        stretch = (len(self.shapes) - 1) / rate / last_s
        shapes = tuple(replace(s, arrival_ms=s.arrival_ms * stretch) for s in self.shapes)
        return replace(self, arrival=f"poisson:{1e3 / rate:.6g}", shapes=shapes)

    def describe(self) -> dict[str, Any]:
        """These options as the record's `config.workload` has them; the shapes are among its
        requests."""
        values = asdict(self)
        for name in ("shapes", "modes", "sweep_rate"):
            del values[name]
        if self.gen_len is None:  # a trace has the lengths
            values["prefix_len"] = None
        return values | {"num_requests": len(self.shapes)}


DRAFTED = "inflight"  # the batching that a drafter is measured under


@dataclass(frozen=True)
class Pass:
    """`mode` is a name of `names.BATCHINGS`."""

    mode: str
    is_drafting: bool = False

    @property
    def name(self) -> str:
        """What is shown while it is served."""
        return f"{self.mode} with drafts" if self.is_drafting else self.mode


def make_passes(modes: Sequence[str], drafts: bool) -> list[Pass]:
    """The passes in their order. The tokens of the first are the reference of the others."""
    drafted = [Pass(DRAFTED, is_drafting=True)] if drafts else []
    return [*map(Pass, modes), *drafted]
