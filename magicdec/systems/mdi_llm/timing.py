"""RingTiming: the times of a ring's stages, from which `--layer_split auto` follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from torch import Tensor

from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message
from magicdec.distributed.groups import ParallelGroups
from magicdec.output.console import make_progress
from magicdec.runner.forward_batch import Tokens
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.sampling import make_params
from magicdec.runner.step_plan import BatchLimits
from magicdec.setup.loading import LoadedModels
from magicdec.setup.model_plan import StagePart
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation, make_speculation
from magicdec.systems.mdi_llm.ring_stage import ENDS_PROMPT, VERIFY, WANTED, Stage
from magicdec.systems.stages.auto_split import STEPS, DecodeStep, Timer, Timing, time_messages
from magicdec.systems.stages.spans import SpanKind

FIRST_END = StagePart(range(1), has_ends=True)


@dataclass
class FilledStage(Stage):
    """A stage that computes messages of `num_tokens` tokens per row. Prompts are skipped: their
    rows only count as filled."""

    num_tokens: int = 1

    def compute(
        self, x: Tokens, rows: Sequence[int], num_outputs: int | None, is_of_prompt: bool
    ) -> Tensor:
        num_tokens = len(x[0])
        model = self.runner.model
        if num_tokens == self.num_tokens:
            return super().compute(x, rows, num_outputs, is_of_prompt)
        self.runner.cache.advance(rows, num_tokens)
        count = num_tokens if self.sends_states else 1
        return next(model.parameters()).new_zeros(len(x), count, model.config.hidden_size)


class RingTiming(Timing):
    """The timing of a ring's stages, whose messages come home at once. `run.config` drafts if the
    step does."""

    growth = STEPS + 1

    def end_of(self, stage: int) -> StagePart | None:
        return FIRST_END if stage == 0 else None

    def timer(self, runner: ModelRunner, has_ends: bool, groups: ParallelGroups) -> Timer:
        stage = FilledStage(
            runner,
            is_last=False,
            sends_states=self.config.decoding.has_mtp_head,
            num_tokens=self.step.num_tokens,
        )
        if not has_ends:
            return partial(time_passing, stage, self.step)
        speculation = None
        if self.step.gamma:
            models = LoadedModels(runner.device, make_progress(False))
            run = replace(self.run, config=self.config)
            speculation = make_speculation(run, runner, groups, models, FIRST_END)
            speculation.is_padded = True
            speculation.drafter.pa = 0.0
        return partial(self.time_first, stage, speculation)

    def time_first(self, stage: FilledStage, speculation: RingSpeculation | None) -> float:
        """Seconds of a step on the first stage, from receiving hidden states to sending the
        next."""
        loop = Loopback()
        step = self.step
        limits = BatchLimits(
            stage.runner.max_tokens,
            prefill_tokens=step.rows * step.context,
            step_tokens=step.num_tokens,
        )
        pipeline = RecurrentPipeline(
            stage, Ends(loop, loop), 1, step.rows, limits, step.context, speculation=speculation
        )
        params = make_params(self.config.sampling, STEPS * step.num_tokens + 1, (), 0)
        pipeline.serve([Request(i, (1,) * step.context, params) for i in range(step.rows)])
        return median(span.seconds for span in pipeline.spans.of(SpanKind.HEAD) if span.value)


def time_passing(stage: FilledStage, step: DecodeStep) -> float:
    """Seconds of a step on a stage that passes hidden states on. All drafts are rejected."""
    rows = tuple(range(step.rows))
    width = stage.runner.model.config.hidden_size
    newest = next(stage.runner.model.parameters()).new_full((step.rows, 1, width), 0.1)
    prompt = Message(Kind.HIDDEN, 0, ENDS_PROMPT, rows, newest.expand(-1, step.context, -1))
    payload = newest.expand(-1, step.num_tokens, -1).contiguous()
    steps = [
        Message(Kind.HIDDEN, 0, VERIFY, (*rows, *[length] * step.rows), payload)
        if step.gamma
        else Message(Kind.HIDDEN, 0, WANTED, rows, payload)
        for length in range(step.context, step.context + STEPS)
    ]
    return time_messages(stage, [prompt, *steps, Message(Kind.FREE, words=rows)])
