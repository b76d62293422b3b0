"""Prefill: takes parts of texts into the cache in chunks, and gives complete prompts their first
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, upload
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import StepOutput
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import next_tokens
from magicdec.runner.step_plan import PrefillChunk


@torch.inference_mode()
def prefill(
    runner: ModelRunner,
    parts: Sequence[PrefillChunk],
    chunk: int,
    progress: Callable[[int], None] = lambda n: None,
) -> StepOutput:
    """Take `parts` into the cache in order. Returns the first token of each request that is
    complete, none if it has emitted before. The host reads nothing before the last chunk has
    started.

    `progress` is called with each chunk's number of tokens; on CUDA when it has started.

    Raises:
        NotFinite: the logits of a request are not finite.
    """
    lines = []
    is_first = []
    stamps = TimeStamps(runner.device)
    for part in parts:
        logits = take(runner, part, chunk, progress)
        if logits is None:
            continue
        is_first.append(not part.request.output_ids)
        if is_first[-1]:
            vocab_size = runner.model.config.vocab_size
            sampling = SamplingMetadata.of([part.request], vocab_size, runner.device)
            lines.append(sampling.with_flaws([next_tokens(runner, logits, sampling)]))
        stamps.mark()
    read = iter(torch.cat(lines).tolist() if lines else [])
    complete = [part.request for part in parts if part.is_last]
    token_ids = list[list[int]]()
    for request, one in zip(complete, is_first, strict=True):
        line = next(read) if one else [0]
        SamplingMetadata.check(request, line)
        token_ids.append(line[1:])
    return StepOutput(token_ids, emitted_s=stamps.seconds())


def take(
    runner: ModelRunner,
    part: PrefillChunk,
    chunk: int,
    progress: Callable[[int], None] = lambda n: None,
) -> Tensor | None:
    """Append the tokens of `part` to its row. Returns this rank's logits [1, 1, V] of the last
    one if that completes the text; else the last chunk may wait (`ModelRunner.enqueue`)."""
    text = part.request.cached_ids
    row = part.row
    num_left = part.request.num_cached - part.start
    num_following = num_left - (part.stop - part.start)
    ids = upload([text[part.start : part.stop]], runner.device)
    rows = BatchRows.of([row], runner.device)
    if part.is_first:
        for observer in runner.observers:
            observer.begin_prompt(row, part.request.num_cached, num_left)
    logits = None
    for tokens in ids.split(chunk, dim=1):
        num_left -= tokens.shape[1]
        num_outputs = 1 if num_left == 0 else 0
        batch = ForwardBatch(tokens, rows, num_outputs=num_outputs, is_of_prompt=True)
        if num_left == 0:
            logits = runner.forward(batch)
        elif num_left > num_following:
            runner.forward(batch)
        else:
            runner.enqueue(batch)
        progress(tokens.shape[1])
    return logits


class TimeStamps:
    """Times at which the device had finished the work before each mark. CUDA events do not wait."""

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
        """The time of each mark on the clock of `time.perf_counter`. Waits for the last."""
        if self._events is None:
            return self._seconds
        first, *marks = self._events
        self._events[-1].synchronize()
        return [self._started + first.elapsed_time(event) / 1e3 for event in marks]
