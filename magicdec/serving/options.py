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

from magicdec.names import BATCHINGS, COMPACTION, COMPACTIONS
from magicdec.workload.request_shapes import ShapedOptions
from magicdec.workload.trace import RequestShape

FLAGS = ("--prefix_len", "--gen_len")  # the lengths of a request without a trace
WINDOWED = "dynamic"  # the batching that has a time window


@dataclass(frozen=True)
class ServingOptions(ShapedOptions):
    """`shapes` are all requests in the order of arrival. The other fields are the flags of the same
    names; None stands for no limit."""

    arrival: str
    gen_len: str | None  # None if a trace has the lengths
    max_concurrency: int
    prefill_tokens: int
    window_ms: float | None  # None without dynamic batching
    block_tokens: int
    cache_tokens: int | None
    goodput: dict[str, float]
    shapes: tuple[RequestShape, ...]

    def __post_init__(self) -> None:
        for flag, value in (
            ("--B", self.max_concurrency),
            ("--prefill_tokens", self.prefill_tokens),
            ("--block_tokens", self.block_tokens),
            ("--cache_tokens", self.cache_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{flag} {value} is too small; it must be at least 1")
        if self.window_ms is not None and not 0 <= self.window_ms < math.inf:
            raise ValueError(f"--window_ms {self.window_ms} is out of range; it must be at least 0")

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
        del values["shapes"]
        return values | {"num_requests": len(self.shapes)}


def check_modes(modes: Sequence[str]) -> None:
    """Raises ValueError for a batching that is not known or named twice."""
    for mode in modes:
        if mode not in BATCHINGS:
            raise ValueError(f"--modes {mode} is not known; choose from {', '.join(BATCHINGS)}")
        if modes.count(mode) > 1:
            raise ValueError(f"--modes names {mode} twice; name each once")


DRAFTED = "inflight"  # the batching that a drafter is measured under


@dataclass(frozen=True)
class Pass:
    """`mode` is a name of `names.BATCHINGS`, and `compaction` one of `names.COMPACTIONS`."""

    mode: str
    is_drafting: bool = False
    compaction: str = COMPACTION

    @property
    def name(self) -> str:
        """What is shown while it is served."""
        name = f"{self.mode} with drafts" if self.is_drafting else self.mode
        return name if self.compaction == COMPACTION else f"{name}, {self.compaction}"


def make_passes(
    modes: Sequence[str], drafts: bool, compactions: Sequence[str] = (COMPACTION,)
) -> list[Pass]:
    """The passes in their order. The tokens of the first are the reference of the others. In
    flight, requests are served under each of the `compactions`; all else takes the first."""
    passes = [
        Pass(mode, compaction=compaction)
        for mode in modes
        for compaction in (compactions if mode == DRAFTED else compactions[:1])
    ]
    drafted = Pass(DRAFTED, is_drafting=True, compaction=compactions[0])
    return [*passes, *([drafted] if drafts else [])]


def check_compactions(names: Sequence[str], modes: Sequence[str]) -> None:
    """Raises ValueError for a compaction that is not known, named twice or of no effect."""
    for name in names:
        if name not in COMPACTIONS:
            raise ValueError(
                f"--compaction {name} is not known; choose from {', '.join(COMPACTIONS)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"--compaction names {name} twice; name each once")
    if len(names) > 1 and DRAFTED not in modes:
        raise ValueError(
            f"--compaction {' '.join(names)}: several are compared under {DRAFTED}, which --modes "
            "lacks; name one"
        )
