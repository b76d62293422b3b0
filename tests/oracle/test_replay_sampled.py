"""Replayed steps of requests that are sampled or have penalties, against steps that the host
starts. They emit the same tokens for the same seeds and accept as many drafts in each step.

The tests run in float64, because sums of other shapes round differently, and a random number may
fall between the two results. A draft model with SnapKV is an exception: when replayed, it computes
the newest token of the prompt again, which then sees only the chosen tokens, so other drafts are
drawn. The sampled rows then emit other tokens of the same distribution, which is tested below;
greedy rows emit the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import test_replay
import torch
from conftest import TINY, make_draft, make_runner, random_prompts, served_pairs, tiny_transformer
from recorder import Recorder
from test_lossless import SMALL
from test_replay import run, section_of
from test_sampled_speculation import SECTION, emitted, exact_distribution, p_value
from test_varying_gamma import Scripted

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.decoding.recorder import CudaGraphs
from magicdec.drafting.draft_length import Measure
from magicdec.drafting.drafter import DraftModel
from magicdec.engine import Engine
from magicdec.request import Batch, Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params

PAIRS = sorted(served_pairs(), key=str)
PROMPTS = [60, 1, 30, 80, 20]
NUM_NEW = [24, 13, 36, 5, 20]  # rows end at different steps; the third row is the last
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
    # The last rows to end are greedy: a greedy batch in steps that were recorded with sampling.
    "mixed": [WARM, FILTERED, GREEDY, PENALISED, GREEDY_PENALISED],
}


Result = tuple[list[list[int]], list[list[int]]]
"""Tokens, and accepted drafts by step."""


class OneAlone(Scripted):
    """The measurement also measures one row alone, while the others are not active."""

    def begin(self, batch: Batch, measure: Measure) -> None:
        measure(Batch(batch.requests[1:2]))
        super().begin(batch, measure)


def started(kind: str, device: str = "cpu") -> tuple[Engine, list[Request]]:
    """An engine that has prefilled the prompts, and its snapshots."""
    total = max(PROMPTS) + max(NUM_NEW) + MOST
    model = tiny_transformer(dtype=torch.float64).to(device)
    engine = Engine(make_runner(model, len(PROMPTS), total, SDPABackend(16)), 64)
    prompts = random_prompts(PROMPTS, TINY.vocab_size)
    rows = zip(prompts, NUM_NEW, KINDS[kind], strict=True)
    requests = [Request(i, p, make_params(s, n, (), i)) for i, (p, n, s) in enumerate(rows)]
    return engine, engine.prefill(requests)


def check_same(pair: tuple[str | None, str | None], kind: str, eager: Result, ours: Result) -> None:
    if pair != ("model", "snapkv"):
        assert ours == eager
    for sampling, expected, found in zip(KINDS[kind], eager[0], ours[0], strict=True):
        assert len(found) == len(expected)
        assert found == expected or (pair == ("model", "snapkv") and sampling.temperature > 0)


def check_accepted(steps: Sequence[Sequence[int]], most: int) -> None:
    """Assert that the case has accepted and rejected drafts."""
    accepted = [count for step in steps for count in step]
    assert 0 < sum(accepted) < most * len(accepted)


ALIKE = [kind for kind in KINDS if kind != "mixed"]  # all rows of a batch are sampled alike


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("drafter", "policy", "kind"),
    [
        case
        for i, pair in enumerate([(None, None), *PAIRS])
        for case in (
            (*pair, "mixed"),
            pytest.param(*pair, ALIKE[i % len(ALIKE)], marks=pytest.mark.wide),
        )
    ],
    ids=str,
)
def test_replayed_steps_sample_the_same_tokens(
    drafter: str | None, policy: str | None, kind: str
) -> None:
    engine, snapshots = started(kind)
    kv, recorder = section_of(policy), Recorder()
    eager = run(engine, snapshots, drafter, kv, 4, None)[:2]
    ours = run(engine, snapshots, drafter, kv, 4, recorder)[:2]
    check_same((drafter, policy), kind, eager, ours)
    assert [len(tokens) for tokens in ours[0]] == NUM_NEW
    assert recorder.recorded and recorder.replayed >= len(ours[1])
    if drafter == "self" and policy != "full":  # a view of the target's own cache
        check_accepted(ours[1], 4)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["mixed", "greedy with penalties"])
@pytest.mark.parametrize(("drafter", "policy"), [(None, None), *PAIRS], ids=str)
def test_graphs_on_a_gpu_sample_the_same_tokens(
    drafter: str | None, policy: str | None, kind: str
) -> None:
    engine, snapshots = started(kind, "cuda")
    kv, graphs = section_of(policy), CudaGraphs(torch.device("cuda"))
    eager = run(engine, snapshots, drafter, kv, 4, None)[:2]
    ours = run(engine, snapshots, drafter, kv, 4, graphs)[:2]
    check_same((drafter, policy), kind, eager, ours)


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("drafter", "policy", "kind"),
    [
        *((*pair, "mixed") for pair in PAIRS),
        *(
            pytest.param(*pair, "greedy with penalties", marks=pytest.mark.wide)
            for pair in dict(PAIRS).items()  # a pair of each drafter
        ),
    ],
    ids=str,
)
def test_replayed_steps_of_any_draft_lengths_sample_the_same_tokens(
    drafter: str, policy: str | None, kind: str
) -> None:
    """Some steps draft nothing. A measurement of one row and of all rows comes first."""
    engine, snapshots = started(kind)
    kv, outputs = section_of(policy), []
    for recorder in (None, Recorder()):
        found = run(engine, snapshots, drafter, kv, "auto", recorder, OneAlone(SCRIPT))
        outputs.append(found[:2])
    check_same((drafter, policy), kind, *outputs)


@pytest.mark.parametrize("policy", ["full", pytest.param("streaming_llm", marks=pytest.mark.wide)])
def test_a_replayed_draft_of_a_larger_vocabulary_samples_the_same_tokens(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models share the history of emitted tokens."""

    def draft_for(kv: KVSection, runner: ModelRunner) -> DraftModel:
        model = tiny_transformer(replace(SMALL, vocab_size=131), seed=1, dtype=torch.float64)
        return make_draft(model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))

    monkeypatch.setattr(test_replay, "draft_for", draft_for)
    engine, snapshots = started("mixed")
    expected = run(engine, snapshots, "model", section_of(policy), 4, None)[:2]
    assert run(engine, snapshots, "model", section_of(policy), 4, Recorder())[:2] == expected


@pytest.mark.wide
def test_replayed_steps_keep_the_targets_distribution() -> None:
    """This is tested for the steps that need not sample the same tokens as steps that the host
    starts."""
    kv = KVSection("snapkv", 4, window_size=2)
    counts = emitted("speculative", "model", kv, 3, Recorder())
    assert p_value(counts, exact_distribution(SECTION)) > 0.001
