"""Steps without drafts between others: they emit the baseline's tokens, and the drafts after them
are as good as before. `test_in_flight.py` and `test_replay.py` test any draft lengths in any
order."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from conftest import (
    decode,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.engine.engine import Engine
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.request import Batch, Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_length import DraftCost, DraftLength, FixedLength, Measure
from magicdec.speculation.drafter import DraftPlan, DraftSetup, DraftShape, make_drafter
from magicdec.speculation.forecast import Acceptance
from magicdec.speculation.mixed import LOOKUP_ALONE, MixedDrafter
from magicdec.speculation.ngram import NgramDrafter
from magicdec.speculation.steps.strategy import Setup

MOST = 5
NEW = [120, 9, 90, 61]


class Scripted(DraftLength):
    """A draft length that follows a list."""

    max_gamma = MOST
    choices = range(MOST + 1)

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = cycle(counts)
        self.acceptance = Acceptance(MOST)

    def begin(self, batch: Batch, measure: Measure) -> None:
        seconds = measure(batch)
        assert len(seconds) == MOST + 1 and min(seconds) > 0

    def lengths(self, batch: Batch) -> list[int]:
        return [next(self.counts)] * len(batch.requests)


def run(
    drafter: str,
    kv: KVSection,
    backend: type[AttentionBackend],
    counts: Sequence[int],
    sampling: SamplingSection = SamplingSection(),
) -> tuple[list[list[int]], list[list[int]], list[tuple[int, list[int]]]]:
    """The tokens of the baseline, those of speculation, and (drafted, accepted) of the steps with
    drafts."""
    model = tiny_transformer(seed=1)
    max_tokens = 70 + 120 + MOST
    runner = make_runner(model, 4, max_tokens, backend())
    draft = None
    if drafter == "model":
        draft = make_draft(model, kv, 4, max_tokens, backend(), max_drafts=MOST)
    engine = Engine(runner, 32)
    requests = make_requests(random_prompts([5, 70, 1, 33], 97), NEW, sampling=sampling)
    snapshots = engine.prefill(requests)
    outputs = []
    steps = []
    for name in ("autoregressive", "speculative"):
        engine.rewind(snapshots)
        decoding = DecodingSection("speculative", drafter, MOST)
        setup = Setup(runner, decoding, kv, draft=draft, draft_length=Scripted(counts))
        finished = decode(
            engine,
            name,
            setup,
            lambda ids, out, s: steps.append((out.draft_width, out.num_accepted)),
        )
        outputs.append([list(r.output_ids) for r in finished])
    return outputs[0], outputs[1], [(n, a) for n, a in steps if a is not None]


@pytest.mark.usefixtures("lookups_of_ones")
def test_a_drafter_may_propose_fewer_tokens_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without any is one of plain decoding, and says so."""
    counts = cycle([0, 3, 1, 0, 0, 2])
    propose = NgramDrafter.propose

    def fewer(*arguments: Any) -> Proposal:
        return propose(*arguments).first(next(counts))

    monkeypatch.setattr(NgramDrafter, "propose", fewer)
    monkeypatch.setattr(Scripted, "begin", lambda *_: None)
    expected, tokens, steps = run("ngram", KVSection("full"), GroupedBackend, [4])
    assert tokens == expected
    assert [count for count, _ in steps[:6]] == [3, 1, 2, 3, 1, 2]


# Pauses of drafting: longer than a prefill chunk of the draft, one step, and two in a row.
COUNTS = [3, 0, 5, *[0] * 20, 1, 2, 0, 0, 4]


@pytest.mark.parametrize(
    ("drafter", "kv"),
    [
        ("self", KVSection("full")),
        ("self", KVSection("snapkv", 300, window_size=8)),
        ("self", KVSection("verified", 300, 4)),
        ("self", KVSection("retrieval", 300, 4)),
        ("model", KVSection("full")),
        ("model", KVSection("streaming_llm", 300, 4)),
        ("model", KVSection("snapkv", 300, window_size=8)),
    ],
    ids=str,
)
def test_a_full_draft_is_accepted_after_any_pause(drafter: str, kv: KVSection) -> None:
    """The model drafts for itself from the full cache, so every draft is accepted unless an entry
    of the cache is wrong or missing."""
    baseline, ours, steps = run(drafter, kv, NativeBackend, COUNTS)
    assert ours == baseline
    assert steps and all(set(accepted) == {drafted} for drafted, accepted in steps), steps


class Judged(Scripted):
    """Keeps what the model drafted for each row of a step, and what the rows accepted."""

    rows: list[tuple[int, int]]

    def observe(self, batch: Batch, *measured: Any) -> None:
        super().observe(batch, *measured)
        self.rows += zip(measured[3], measured[1], strict=False)


@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(("drafter", "policy"), [("self", "snapkv"), ("model", "full")])
def test_a_full_draft_is_accepted_after_any_lookup(drafter: str, policy: str) -> None:
    """As after a pause, also if lookups of the same rows were wrong."""
    model = tiny_transformer(seed=1)
    kv = KVSection(policy, 300, window_size=8)
    runner = make_runner(model, 4, 70 + 120 + MOST, NativeBackend())
    draft = make_draft(model, kv, 4, runner.max_tokens, NativeBackend(), max_drafts=MOST)
    engine = Engine(runner, 32)
    engine.prefill(make_requests(random_prompts([5, 70, 1, 33], 7), NEW))
    decoding = DecodingSection("speculative", f"ngram+{drafter}", MOST)
    length = Judged(COUNTS)
    length.rows = []
    decode(engine, "speculative", Setup(runner, decoding, kv, draft=draft, draft_length=length))
    by_model = [(drafted, accepted) for drafted, accepted in length.rows if drafted]
    assert 10 < len(by_model) < len(length.rows) - 10, "each source drafts"
    assert all(drafted == accepted for drafted, accepted in by_model)


def test_a_draft_models_cache_has_no_drafts_in_place_of_those_of_a_lookup() -> None:
    kv = KVSection("full")
    cpu = torch.device("cpu")
    draft = make_draft(tiny_transformer(seed=2), kv, 2, 200)
    engine = Engine(make_runner(tiny_transformer(seed=1), 2, 200), 64)
    engine.prefill(make_requests(random_prompts([50, 9], 97), 100))
    setup = DraftSetup(engine.runner, DecodingSection("speculative", "ngram+model", 3), kv, draft)
    drafter = make_drafter("ngram+model", setup)
    running = engine.scheduler.running
    assert isinstance(drafter, MixedDrafter) and draft.runner is not None
    drafter._uses_model = False  # as after a step of lookups alone
    drafter.admit(running)
    drafter._is_looked_up = {0: True}
    pending = drafter.prepare(running, 3)
    assert pending != LOOKUP_ALONE, "drafts that are timed now are those of the model"
    drafter.propose(DeviceBatch.of(Batch(tuple(running)), 97, cpu), DraftShape(3, pending))
    assert draft.runner.cache.seq_lens.tolist() == [50 + 1, 9 + 3]


@pytest.mark.parametrize("can_join", [True, False])
def test_rows_verified_together_have_drafts_of_their_own_number(
    can_join: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts 2 tokens for one row, where a lookup is sure of 8 tokens of the other."""

    def look_up(lookups: NgramDrafter, requests: Sequence[Request], most: int) -> list[list[float]]:
        lookups.proposals = {0: [(n + 1, 1.0) for n in range(8)], 1: []}
        return [[1.0] * 8, []]

    monkeypatch.setattr(NgramDrafter, "look_up", look_up)
    engine = Engine(make_runner(tiny_transformer(seed=1), 2, 200), 64)
    engine.prefill(make_requests(random_prompts([50, 9], 97), 100))
    section = DecodingSection("speculative", "ngram+self", 8)
    running = engine.scheduler.running
    setup = DraftSetup(engine.runner, section, KVSection("full"))
    drafter = make_drafter("ngram+self", setup)
    length = FixedLength(2, Acceptance(2))
    drafter.admit(running)
    length.cost = DraftCost(0.0, 0.05)
    length.lookup_cost = DraftCost(0.0, 0.025)
    plan = drafter.plan(running, 2, length, can_join)
    if not can_join:  # then the lookup alone is worth more than 2 tokens of each row
        assert plan == DraftPlan([8, 0], [0, 0])
        return
    assert plan == DraftPlan([8, 2], [0, 2])
    shape = DraftShape(8, drafter.prepare(running, 8))
    drafts = drafter.propose(DeviceBatch.of(Batch(tuple(running)), 97, torch.device("cpu")), shape)
    assert drafts.ids[0].tolist() == [*range(1, 9)]
    own = make_drafter("self", setup)
    own.admit(running)
    batch = DeviceBatch.of(Batch(tuple(running)), 97, torch.device("cpu"))
    expected = own.propose(batch, DraftShape(2, own.prepare(running, 2))).ids[1].tolist()
    assert drafts.ids[1].tolist() == [*expected, *[0] * 6]


def test_the_time_of_lookups_alone_is_observed_and_that_beside_a_model_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one of two rows has a lookup, so that they are verified with their own numbers."""

    def look_up(lookups: NgramDrafter, requests: Sequence[Request], most: int) -> list[list[float]]:
        rows = [r.row for r in requests if r.row is not None]
        lookups.proposals = {row: [(n + 1, 1.0) for n in range(5 * (row == 0))] for row in rows}
        return [[p for _, p in lookups.proposals[row]] for row in rows]

    class Noted(Scripted):
        cost = DraftCost(0.0, 0.05)
        lookup_cost = DraftCost(0.0, 0.025)

        def observe(self, batch: Batch, gamma: int, *rest: Any) -> None:
            _, seconds, judged, verified = rest
            if len(batch.requests) == 2:
                noted.add((any(judged), seconds is not None, verified))
            super().observe(batch, gamma, *rest)

    monkeypatch.setattr(NgramDrafter, "look_up", look_up)
    noted = set[tuple[bool, bool, int]]()
    model = pack(tiny_transformer(seed=1))
    runner = make_runner(model, 2, 150, NativeBackend())
    runner = replace(runner, executor=Executor(model, runner.group))
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([50, 9], 97), [20, 20]))
    section = DecodingSection("speculative", "ngram+self", MOST)
    setup = Setup(runner, section, KVSection("full"), draft_length=Noted([0, 1]))
    decode(engine, "speculative", setup)
    assert noted == {(False, True, 2), (True, False, 3)}


def test_sampled_steps_without_drafts_emit_the_baselines_tokens() -> None:
    sampling = SamplingSection(temperature=0.9, top_p=0.95)
    kv = KVSection("streaming_llm", 40, 4)
    baseline, ours, steps = run("self", kv, GroupedBackend, [0], sampling)
    assert ours == baseline and not steps


def test_calibration_is_not_timed_as_a_phase_of_a_step() -> None:
    runner = make_runner(tiny_transformer(seed=1), 2, 70 + 30 + MOST, GroupedBackend())
    engine = Engine(runner, 32)
    phases = []
    drafted = []

    def phase(name: str) -> AbstractContextManager[None]:
        phases.append(name)
        return nullcontext()

    engine.prefill(make_requests(random_prompts([5, 70], 97), 30))
    section = DecodingSection("speculative", "self", MOST)
    kv = KVSection("streaming_llm", 40, 4)
    setup = Setup(runner, section, kv, phase=phase, draft_length=Scripted(COUNTS))
    decode(engine, "speculative", setup, lambda ids, out, s: drafted.append(out.draft_width))
    expected = [["draft", "verify"] if count else ["decode"] for count in drafted]
    assert phases == [name for step in expected for name in step]
