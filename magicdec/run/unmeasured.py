"""What a run does beside its measurements: warming up, and the passes that `--profile` traces.

Owns these passes. They start from the state that prefill left, as measured ones do, and change no
number of the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.console import Progress
from magicdec.decoding.strategy import DecodingStrategy
from magicdec.distributed.groups import ParallelGroups
from magicdec.engine import Engine
from magicdec.hardware.timing import PhaseTimer
from magicdec.request import Request, SamplingParams


class Passes(Protocol):
    """What is asked of a run (`run.run.Run`)."""

    config: ResolvedConfig
    engine: Engine
    device: torch.device
    progress: Progress
    groups: ParallelGroups
    passes: list[str]

    def make_strategy(self, name: str, timer: PhaseTimer) -> DecodingStrategy: ...


def warm_up_prefill(engine: Engine, prompt: Sequence[int], chunk: int) -> None:
    """Take one full chunk of a prompt and its last, shorter one, so that kernels which are built
    when first called are there before a prefill is timed. The engine is as new after it."""
    beginning = tuple(prompt[: min(len(prompt), chunk + len(prompt) % chunk)])
    engine.prefill([Request(-1, beginning, SamplingParams(max_new_tokens=1))])


def warm_up(run: Passes, snapshots: list[Request]) -> None:
    """The first batch by every strategy, as often as was asked."""
    rounds = run.config.workload.warmup_batches
    with run.progress.task("warm-up", rounds * len(run.passes)) as advance:
        for name in run.passes * rounds:
            _decode(run, name, snapshots, PhaseTimer(run.device, enabled=False))
            advance()


def profile(run: Passes, snapshots: list[Request], directory: Path) -> None:
    """Trace every strategy once over a batch that was measured: a file of Chrome's trace format a
    strategy and rank, with the phases as ranges. Raises OSError where it cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    group = run.groups.target
    for name in run.passes:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        timer = PhaseTimer(run.device, enabled=False, mark=mark_phase)
        with torch.profiler.profile(activities=activities) as profiler:
            _decode(run, name, snapshots, timer)
        profiler.export_chrome_trace(str(directory / f"{name}.rank{group.ranks[group.index]}.json"))


@contextmanager
def mark_phase(name: str) -> Iterator[None]:
    """A range in the profiler's trace, and on CUDA one that Nsight Systems shows (NVTX)."""
    with ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield


def _decode(run: Passes, name: str, snapshots: Iterable[Request], timer: PhaseTimer) -> None:
    run.engine.rewind(list(snapshots))
    strategy = run.make_strategy(name, timer)
    run.engine.begin(strategy)
    run.engine.decode(strategy)
