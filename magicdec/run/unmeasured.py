"""The passes of a run that are not measured: the warm-up, and the passes that `--profile` traces.

Owns these passes. Like the measured ones, they start from the state after prefill. They change no
number in the record.
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
    """The part of `run.run.Run` that this module uses."""

    config: ResolvedConfig
    engine: Engine
    device: torch.device
    progress: Progress
    groups: ParallelGroups
    passes: list[str]

    def make_strategy(self, name: str, timer: PhaseTimer) -> DecodingStrategy: ...


def warm_up_prefill(engine: Engine, prompt: Sequence[int], chunk: int) -> None:
    """Prefill one full chunk of a prompt and one chunk as short as its last, so that kernels that
    are built at their first call exist before a prefill is timed. The request ends with its first
    token, so the engine is free again afterwards."""
    beginning = tuple(prompt[: min(len(prompt), chunk + len(prompt) % chunk)])
    engine.prefill([Request(-1, beginning, SamplingParams(max_new_tokens=1))])


def warm_up(run: Passes, snapshots: list[Request]) -> None:
    """Decode the first batch with every strategy, as often as the config says."""
    rounds = run.config.workload.warmup_batches
    with run.progress.task("warm-up", rounds * len(run.passes)) as advance:
        for name in run.passes * rounds:
            _decode(run, name, snapshots, PhaseTimer(run.device, enabled=False))
            advance()


def profile(run: Passes, snapshots: list[Request], directory: Path) -> None:
    """Trace every strategy once, on the last measured batch. Writes one file in Chrome's trace
    format for each strategy and rank, in which the phases are ranges. Raises OSError if a file
    cannot be written."""
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
    """Mark a phase as a range in the profiler's trace and, on CUDA, as an NVTX range, which Nsight
    Systems shows."""
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
