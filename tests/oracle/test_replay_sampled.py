"""Replayed steps of requests that are sampled or have penalties, against the steps that the host
starts: the same tokens for the same seeds, and as many drafts accepted in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import test_replay
from conftest import TINY, make_draft, make_runner, random_prompts, served_pairs, tiny_transformer
from recorder import Recorder
from test_replay import run, section_of
from test_standalone import SMALL
from test_varying_gamma import Scripted

from magicdec.attention.sdpa import SDPABackend
from magicdec.decoding.draft_length import Measure
from magicdec.decoding.sampling import make_params
from magicdec.decoding.strategy import DraftModel
from magicdec.engine import Engine
from magicdec.request import Batch, Request
from magicdec.runner import ModelRunner
from magicdec.sections import KVSection, SamplingSection

PAIRS = sorted(served_pairs(), key=str)
PROMPTS = [90, 1, 40, 150, 20]
NUM_NEW = [40, 21, 60, 7, 33]  # rows end at different steps, the third last
MOST = 8
SCRIPT = (3, 0, 0, 2, 5, 0, 1)
GREEDY = SamplingSection()
WARM = SamplingSection(temperature=0.9)
FILTERED = SamplingSection(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=4)
PENALISED = SamplingSection(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5)
GREEDY_PENALISED = SamplingSection(repetition_penalty=1.2, presence_penalty=-0.5)
KINDS = {
    "temperature": [WARM] * 5,
    "filters": [FILTERED] * 5,
    "penalties": [PENALISED] * 5,
    "greedy with penalties": [GREEDY_PENALISED, GREEDY, GREEDY_PENALISED, GREEDY, GREEDY],
    # The last rows to end are greedy: a batch without chance, of steps that were recorded with it.
    "mixed": [WARM, FILTERED, GREEDY, PENALISED, GREEDY_PENALISED],
}


class OneAlone(Scripted):
    """Measures, beforehand, one row too, the others put to rest."""

    def begin(self, batch: Batch, measure: Measure) -> None:
        measure(Batch(batch.requests[1:2], is_prefill=False))
        super().begin(batch, measure)


def started(kind: str) -> tuple[Engine, list[Request]]:
    """A target that has taken the prompts."""
    total = max(PROMPTS) + max(NUM_NEW) + MOST
    engine = Engine(make_runner(tiny_transformer(), len(PROMPTS), total, SDPABackend(16)), 64)
    prompts = random_prompts(PROMPTS, TINY.vocab_size)
    rows = zip(prompts, NUM_NEW, KINDS[kind], strict=True)
    requests = [Request(i, p, make_params(s, n, (), i)) for i, (p, n, s) in enumerate(rows)]
    return engine, engine.prefill(requests)


def check_accepted(steps: Sequence[Sequence[int]], most: int) -> None:
    """The cases hold kept and refused drafts."""
    accepted = [count for step in steps for count in step]
    assert 0 < sum(accepted) < most * len(accepted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("drafter", "policy"), [(None, None), *PAIRS], ids=str)
def test_replayed_steps_sample_the_same_tokens(
    drafter: str | None, policy: str | None, kind: str
) -> None:
    engine, snapshots = started(kind)
    kv, recorder = section_of(policy), Recorder()
    expected, accepted, _ = run(engine, snapshots, drafter, kv, 4, None)
    found, replayed, _ = run(engine, snapshots, drafter, kv, 4, recorder)
    assert found == expected and replayed == accepted
    assert [len(tokens) for tokens in found] == NUM_NEW
    assert recorder.recorded and recorder.replayed >= len(replayed)
    if drafter == "self" and policy != "full":  # a view of the target's own cache
        check_accepted(accepted, 4)


@pytest.mark.parametrize("kind", ["mixed", "greedy with penalties"])
@pytest.mark.parametrize(("drafter", "policy"), PAIRS, ids=str)
def test_any_sequence_of_draft_lengths_samples_the_same(
    drafter: str, policy: str | None, kind: str
) -> None:
    """Steps without drafts too, after a measurement of one row and of all."""
    engine, snapshots = started(kind)
    kv, outputs = section_of(policy), []
    # A measurement leaves what the drafter saw of the attention meanwhile, of rows at rest too.
    script = Scripted if policy == "verified" else OneAlone
    for recorder in (None, Recorder()):
        found = run(engine, snapshots, drafter, kv, "auto", recorder, script(SCRIPT))
        outputs.append(found[:2])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_a_draft_of_a_larger_vocabulary_samples_the_same(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was emitted is kept once, for both models."""

    def draft_for(kv: KVSection, runner: ModelRunner) -> DraftModel:
        model = tiny_transformer(replace(SMALL, vocab_size=131), seed=1)
        return make_draft(model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))

    monkeypatch.setattr(test_replay, "draft_for", draft_for)
    engine, snapshots = started("mixed")
    expected = run(engine, snapshots, "model", section_of(policy), 4, None)[:2]
    assert run(engine, snapshots, "model", section_of(policy), 4, Recorder())[:2] == expected
