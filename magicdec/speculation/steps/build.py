"""Builds decoders: everything that decodes gets its strategy here, whether a run, a mode of
`magicdec serve`, `LLM` or a script asks for it.

Owns the choice of the recorder, and which queries prefill keeps for a drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from magicdec.config.sections import SELF, DecodingSection, KVSection
from magicdec.names import BASELINE
from magicdec.runner.model_runner import ModelRunner
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.recorder import Recorder, make_recorder
from magicdec.speculation.steps.strategy import DecodingStrategy, Phase, Setup, make_strategy
from magicdec.speculation.steps.witness import Witness


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
    witness: Witness | None = None,
    is_in_flight: bool = False,
) -> DecodingStrategy:
    """A decoder of the requests in `runner`.

    Args:
        runner: the runner that holds the target, with its low-bit copy if that drafts.
        decoding, kv: the resolved sections of the config.
        name: the strategy. Default: that of `decoding`; with `BASELINE` nothing is drafted.
        draft: the standalone draft model, of a config that has one.
        corpus: tokens in which prompt lookup searches beside the text.
        draft_length: how many tokens to draft, if it has learned that before.
        phase: a context that times the phases of a step.
        recorder: how steps are repeated. Default: as the config says.
        witness: keeps logits of the steps.
        is_in_flight: requests join a running batch. What is prefilled from now on is decoded by
            this decoder, so prefill keeps the queries that its drafter needs, and no others.
            Otherwise the prompts are in the cache, and their queries were kept for every decoder
            that shares them.
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
        witness=witness,
    )
    if is_in_flight:
        drafts_itself = name != BASELINE and decoding.model_drafter == SELF
        keep_queries(runner, kv if drafts_itself else None)
    return make_strategy(name, setup)
