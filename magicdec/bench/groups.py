"""The requests that the passes of a command serve, in groups: batches of prompts that are prefilled
once for all passes (`run`), or requests that arrive, once or several times (`serve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.bench.prepare import PreparedServing
from magicdec.bench.runner import MeasuredGroup, MeasuredPass, PlannedPass
from magicdec.runner.request import Request
from magicdec.runner.sampling.sampling import make_params
from magicdec.setup.prepare import Prepared
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.system import make_requests, shortened


@dataclass
class PromptBatches:
    """Batches of kept prompts. A counted run shares the result of a pass without drafts."""

    run: Prepared
    is_counted: bool = False

    @property
    def count(self) -> int:
        return self.run.config.workload.num_batches

    def name(self, number: int) -> str:
        return f"batch {number}"

    def num_tokens(self) -> int:
        w = self.run.config.workload
        return w.batch_size * w.num_new_tokens

    def num_warm_ups(self, measured: MeasuredPass) -> int | None:
        return None if measured.groups else self.run.config.workload.warmup_batches

    def prefill(self, planned: PlannedPass, number: int) -> None:
        self.requests(planned, number, is_measured=False)

    def requests(self, planned: PlannedPass, number: int, is_measured: bool) -> list[Request]:
        name = f"prefill, batch {number + 1} of {self.count}"
        return planned.system.keep_prompts(number, requests_of_batch(self.run, number), name)

    def known(self, planned: PlannedPass, number: int) -> MeasuredGroup | None:
        if not self._is_shared(planned):
            return None
        found: MeasuredGroup | None = caches_of(planned).get((planned.name, number))
        return found

    def keep(self, planned: PlannedPass, measured: MeasuredGroup) -> None:
        if self._is_shared(planned):
            caches_of(planned)[planned.name, measured.number] = measured

    def _is_shared(self, planned: PlannedPass) -> bool:
        return self.is_counted and not planned.serving_pass.is_drafting


def caches_of(planned: PlannedPass) -> dict[tuple[str, int], MeasuredGroup]:
    assert isinstance(planned.system, PrefilledBatching), "its prompts are kept"
    return planned.system.caches.results


def requests_of_batch(run: Prepared, number: int) -> list[Request]:
    config = run.config
    w = config.workload
    eos = () if config.decoding.ignore_eos else run.source.config.eos_token_ids
    first = number * w.batch_size
    prompts = run.workload.prompts[first : first + w.batch_size]
    return [
        Request(first + i, prompt, make_params(config.sampling, w.num_new_tokens, eos, first + i))
        for i, prompt in enumerate(prompts)
    ]


@dataclass
class ArrivingRequests:
    """The requests of `magicdec serve`, as often as `--repeats` says."""

    prepared: PreparedServing
    is_counted: bool = False

    @property
    def count(self) -> int:
        return self.prepared.options.repeats

    def name(self, number: int) -> str:
        return "" if self.count == 1 else f"repeat {number + 1} of {self.count}"

    def num_tokens(self) -> int:
        shapes = self.prepared.options.shapes
        talks = self.prepared.run.workload.conversations
        if talks is None:
            return sum(shape.output_len for shape in shapes)
        return sum(
            min(shape.output_len, plan.output_len or shape.output_len)
            for shape, talk in zip(shapes, talks, strict=True)
            for plan in talk.planned
        )

    def num_warm_ups(self, measured: MeasuredPass) -> int | None:
        """Its system may have been closed, and served other passes, since it was measured."""
        return 1

    def prefill(self, planned: PlannedPass, number: int) -> None:
        """Prompts are prefilled while others decode."""

    def requests(self, planned: PlannedPass, number: int, is_measured: bool) -> list[Request]:
        """Of a warm-up the first requests, shortened, and the first questions alone."""
        system = planned.system
        config = system.run.config
        options = self.prepared.options
        run = self.prepared.run
        shapes: Sequence = options.shapes
        if not is_measured:
            first = shapes[: system.rows]
            shapes = shortened(first, config.attention.prefill_chunk)
        prompts = run.workload.prompts
        if system.is_external and not is_measured:
            prompts = without_first(prompts)
        ends = () if run.config.decoding.ignore_eos else run.source.config.eos_token_ids
        is_coupled = options.is_coupled and not planned.serving_pass.drafts_in_turns
        has_turns = is_measured and options.has_conversations
        talks = run.workload.conversations if has_turns else None
        sampling = run.config.sampling
        return make_requests(prompts, shapes, system.now(), sampling, ends, is_coupled, talks)

    def known(self, planned: PlannedPass, number: int) -> MeasuredGroup | None:
        return None

    def keep(self, planned: PlannedPass, measured: MeasuredGroup) -> None:
        """Every command measures anew."""


def without_first(prompts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The same prompts without their first tokens, so that none begins as one of them does: what a
    server keeps of these is of no use for the others."""
    return tuple(prompt[1:] or prompt for prompt in prompts)
