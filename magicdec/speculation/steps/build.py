"""The builder of decoders for runs, serving, `LLM` and scripts. It chooses the recorder, and the
queries that prefill keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.names import BASELINE
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.sampling.model_tokens import AcceptanceRule
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.logits_recorder import StepRecorder
from magicdec.speculation.steps.recorder import Recorder, make_recorder
from magicdec.speculation.steps.strategy import DecodingStrategy, Phase, Setup, make_strategy


def build_decoder(
    runner: ModelRunner,
    decoding: DecodingSection,
    kv: KVSection,
    *,
    name: str | None = None,
    draft: DraftModel | None = None,
    corpus: Sequence[int] = (),
    draft_length: DraftLength | None = None,
    phase: Phase = nullcontext,
    recorder: Recorder | None = None,
    logits_recorder: StepRecorder | None = None,
    is_in_flight: bool = False,
    rule: AcceptanceRule | None = None,
) -> DecodingStrategy:
    """A decoder of the requests in `runner`.

    Args:
        runner: the runner of the target, with its low-bit copy if that drafts.
        decoding, kv: resolved config sections.
        name: the strategy, by default that of `decoding`; `BASELINE` drafts nothing.
        draft: the standalone draft model, if any.
        corpus: tokens that prompt lookup searches beside the text.
        draft_length: an earlier decoder's, with what it has learned.
        phase: a context that times phases of a step.
        recorder: by default as the config says.
        logits_recorder: keeps logits of steps.
        is_in_flight: requests join a running batch, so prefill keeps queries for this drafter.
        rule: what becomes of judged drafts; by default accepted ones are kept.
    """
    name = name or decoding.strategy
    setup = Setup(
        runner,
        decoding,
        kv,
        draft=draft,
        corpus=corpus,
        phase=phase,
        draft_length=draft_length,
        recorder=recorder or make_recorder(decoding, runner.device),
        is_in_flight=is_in_flight,
        logits_recorder=logits_recorder,
        rule=rule,
    )
    if is_in_flight:
        drafts_itself = name != BASELINE and decoding.drafts_itself
        keep_queries(runner, kv if drafts_itself else None)
    return make_strategy(name, setup)
