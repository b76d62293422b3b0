"""StepPlan: what one step does, and the limits within which it is decided. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magicdec.kv.prefix_cache import Beginning
from magicdec.runner.request import Batch, Request

# Prompt tokens of a step unless asked for otherwise. From 256 to 2048 the duration was the same
# within the noise, while decoding requests waited longer in larger steps (docs/log/serving.md).
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class BatchLimits:
    """The limits of a running batch; by default none.

    With `num_blocks`, rows take blocks of `block_size` tokens as they grow, from `num_blocks` in
    all."""

    max_tokens: int | None = None  # cached tokens of a row at most
    block_size: int = 1
    num_blocks: int | None = None
    step_tokens: int = 1  # tokens that a decode step appends to a row at most, drafts included
    prefill_tokens: int | None = None  # tokens that a step prefills at most

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request can never be served."""
        prompt = len(request.prompt_ids)
        new = request.sampling.max_new_tokens
        # The newest token is never cached. Before the last step it is the last but one.
        num_tokens = prompt + max(new, 2) - 2 + self.step_tokens
        text = (
            f"request {request.request_id} needs {num_tokens} tokens of KV cache ({prompt} of its "
            f"prompt, {new} new ones, and room for a step of {self.step_tokens})"
        )
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise ValueError(f"{text}; a row holds at most {self.max_tokens}")
        if self.num_blocks is not None and self.num_blocks_of(num_tokens) > self.num_blocks:
            size = self.block_size
            raise ValueError(f"{text}; the cache holds {self.num_blocks} blocks of {size}")


@dataclass(frozen=True)
class PrefillChunk:
    """The tokens `start` to `stop` - 1 of a request's text, which a step prefills."""

    request: Request
    row: int
    start: int
    stop: int
    num_shared: int = 0  # tokens of its text that the row has from others
    keeps_state: bool = False  # other texts begin with these tokens too, and with their state

    @property
    def is_first(self) -> bool:
        return self.start == self.num_shared

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_cached

    @classmethod
    def whole(cls, requests: Sequence[Request]) -> tuple[PrefillChunk, ...]:
        rows = Batch(tuple(requests)).rows
        pairs = zip(requests, rows, strict=True)
        return tuple(cls(request, row, 0, request.num_cached) for request, row in pairs)


@dataclass(frozen=True)
class StepPlan:
    """A step: rows are freed and given, blocks reserved, parts prefilled, and requests that were
    complete before decode, in this order. Sequences are in row order."""

    decoding: Batch | None = None
    preempted: tuple[tuple[Request, int], ...] = ()  # with the row that it leaves
    cancelled: tuple[tuple[Request, int], ...] = ()  # with the row that it leaves
    admitted: tuple[tuple[Request, int], ...] = ()  # with its new row
    # (row, what it begins with of a prefix cache); None: there is no such cache
    shared: tuple[tuple[int, Beginning], ...] | None = None
    reserved: tuple[tuple[int, int], ...] = ()  # (row, tokens that it must have room for)
    parts: tuple[PrefillChunk, ...] = ()

    @property
    def shared_tokens(self) -> dict[int, int]:
        """Of each row that begins with what a prefix cache has, the tokens of that."""
        return {row: beginning.num_tokens for row, beginning in self.shared or ()}


StepObserver = Callable[[StepPlan], None]
"""A function that is called with the plan of every step, before the step."""
