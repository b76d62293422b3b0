"""Prefill: the prompts of a batch are taken into the cache, in chunks, and each request gets its
first token.

Owns the order of the chunks and the time stamps of first tokens. Keeps the newest queries of each
prompt if the runner has a place for them. Must not know how tokens are
decoded afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from magicdec.kv.cache import BatchRows, upload
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner
from magicdec.sampling.metadata import SamplingMetadata
from magicdec.sampling.model_tokens import next_tokens


def prefill(
    runner: ModelRunner, batch: Batch, chunk: int, progress: Callable[[int], None] = lambda n: None
) -> StepOutput:
    """Take the prompts of `batch` into the cache, one after the other, and emit each request's
    first token. The host reads nothing before the last chunk of the last prompt was started.

    `progress` is called with the number of prompt tokens of each chunk; on CUDA when the chunk was
    started, not when it is done.
    """
    tokens, stamps = [], TimeStamps(runner.device)
    for request, row in zip(batch.requests, batch.rows, strict=True):
        runner.allocate(row)
        prompt = upload([request.prompt_ids], runner.device)
        rows = BatchRows.of([row], runner.device)
        kept, num_left = runner.prompt_queries, len(request.prompt_ids)
        if kept is not None:
            kept.begin(row, num_left)
        for part in prompt.split(chunk, dim=1):
            num_left -= part.shape[1]
            watch = None if kept is None else kept.watch(row, num_left)
            logits = runner.forward(part, rows, last_only=True, watch_queries=watch)
            progress(part.shape[1])
        sampling = SamplingMetadata.of([request], runner.model.config.vocab_size, runner.device)
        tokens.append(next_tokens(runner, logits, sampling)[0])
        stamps.mark()
    return StepOutput(torch.stack(tokens).tolist(), emitted_s=stamps.seconds())


class TimeStamps:
    """When the device had finished the work that was started before each mark. On CUDA these are
    events on the stream, so that marking does not wait; elsewhere work is done when a call
    returns."""

    def __init__(self, device: torch.device) -> None:
        self._seconds: list[float] = []
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._events = []
            self.mark()
        self._started = time.perf_counter()

    def mark(self) -> None:
        if self._events is None:
            self._seconds.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """The time of each mark, on the clock of `time.perf_counter`. Waits for the last mark."""
        if self._events is None:
            return self._seconds
        first, *marks = self._events
        self._events[-1].synchronize()
        return [self._started + first.elapsed_time(event) / 1e3 for event in marks]
