"""The shapes of all requests of a serving workload: arrival, prompt length and output length, by a
process and a distribution or from a trace, and what follows from them (`ShapedOptions`). Imports no
torch.

Must not know the text of the prompts, nor how requests are served.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from magicdec.config.sections import WorkloadSection
from magicdec.workload.arrivals import Arrival
from magicdec.workload.trace import RequestShape, read_trace

DEFAULT_NUM_REQUESTS, DEFAULT_PROMPT_LEN, DEFAULT_GEN_LEN = 16, "512", "32"
UNIFORM = "uniform"
FORMS = f"a number, or {UNIFORM}:LOW:HIGH"


def make_shapes(
    arrival: Arrival,
    num_requests: int | None,
    prompt_len: str | None,
    gen_len: str | None,
    seed: int,
) -> list[RequestShape]:
    """The requests in the order of arrival; the first arrives at 0 ms. A trace has its own lengths.
    Of its requests, the first `num_requests` count. None stands for the default, or for the whole
    trace. Arrivals and lengths are drawn from separate generators with the same `seed`, so that
    each stays the same when the other changes. Raises ValueError, naming the flag."""
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"--num_requests {num_requests} is too small; it must be at least 1")
    if arrival.trace is not None:
        for flag, given in (("--prefix_len", prompt_len), ("--gen_len", gen_len)):
            if given is not None:
                raise ValueError(f"{flag} {given} does nothing: the trace has the lengths")
        return _first(arrival, num_requests)
    count = num_requests or DEFAULT_NUM_REQUESTS
    prompts = parse_lengths("--prefix_len", prompt_len or DEFAULT_PROMPT_LEN)
    outputs = parse_lengths("--gen_len", gen_len or DEFAULT_GEN_LEN)
    of_prompts, of_outputs = Random(f"prefix_len {seed}"), Random(f"output_len {seed}")
    return [
        RequestShape(at_ms, of_prompts.randint(*prompts), of_outputs.randint(*outputs))
        for at_ms in arrival.times_ms(count, Random(f"arrival {seed}"))
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


def parse_lengths(flag: str, text: str) -> tuple[int, int]:
    """The smallest and the largest length. Raises ValueError, naming the flag."""
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
            f"{flag} {text} is not known; choose a whole number, or {UNIFORM}:LOW:HIGH"
        ) from None
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{flag} {text}: lengths are at least 1, and LOW is at most HIGH")
    return found


class ShapedOptions:
    """A base of the options of commands that serve requests of several shapes."""

    shapes: tuple[RequestShape, ...]

    @property
    def longest_prompt(self) -> int:
        return max(shape.prompt_len for shape in self.shapes)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(shape.prompt_len + shape.output_len for shape in self.shapes)

    @property
    def mean_context(self) -> int:
        """Cached tokens of a request, halfway through its output, in the mean over requests."""
        total = sum(shape.prompt_len + shape.output_len // 2 for shape in self.shapes)
        return total // len(self.shapes)

    def batch_of(self, asked: WorkloadSection, rows: int, spare: int = 0) -> WorkloadSection:
        """`asked` with one batch of so many rows. A row has room for the longest request, which
        need not have the longest prompt, and for `spare` tokens. The longest output may be that of
        another request."""
        prompt = self.longest_prompt
        new = self.longest - prompt
        extra = max(shape.output_len for shape in self.shapes) - new
        return replace(
            asked, batch_size=rows, prefix_len=prompt, gen_len=new + spare, num_batches=1,
            extra_new_tokens=extra,
        )  # fmt: skip
