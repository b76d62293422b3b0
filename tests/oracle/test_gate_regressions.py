"""Regressions of acceptance that change no token of the output: the gate names the first prompt and
step. `scripts/dev/plant_regressions.py` plants many more. And what may not matter does not:
threads, and whether a forward is one native call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from magicdec.bench.gate.cases import Case, Subject, standard_cases
from magicdec.bench.gate.measuring import run_cases
from magicdec.config.sections import KVSection
from magicdec.names import KV_POLICIES
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.comparison.exact import find_change, other_machine
from magicdec.records.drafted import DraftedPass, JudgedRecord
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Batch
from magicdec.runner.sampling import model_tokens
from magicdec.speculation.policies.retrieval import RetrievedBlocks
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.steps.steps import DecodeSteps

SUBJECT = Subject(batch_size=4, num_batches=1, prefix_len=384, gen_len=16)
BUDGET = 129
CASES: dict[str, Case] = {
    **{
        name: SUBJECT.case("self", KVSection(name, BUDGET), 4)
        for name in ("streaming_llm", "snapkv", "retrieval")
    },
    "auto": SUBJECT.case("self", KVSection("streaming_llm", BUDGET), "auto", step_cost=(0.3, 0.1)),
    "eagle": SUBJECT.case("eagle", KVSection("full"), 4),
}
Plant = Callable[[pytest.MonkeyPatch], Any]


def run(cases: list[Case]) -> list[JudgedRecord]:
    found = [result for _, result in run_cases(list(enumerate(cases)))]
    records = [result for result in found if not isinstance(result, str)]
    assert len(records) == len(cases), found
    return records


@pytest.fixture(scope="module")
def clean() -> dict[str, JudgedRecord]:
    return dict(zip(CASES, run([case.with_threads(1) for case in CASES.values()]), strict=True))


@pytest.mark.wide
def test_neither_threads_nor_native_calls_change_a_step(clean: dict[str, JudgedRecord]) -> None:
    chains = {name: case for name, case in CASES.items() if case.config.decoding.gamma == 4}
    off = {name: layer_by_layer(case) for name, case in chains.items()}
    for cases, threads in ((CASES, 2), (off, 1)):
        again = run([case.with_threads(threads) for case in cases.values()])
        for name, record in zip(cases, again, strict=True):
            found = find_change(DraftedPass.of(record), DraftedPass.of(clean[name]))
            assert found is None, name
        if cases is CASES:
            verdicts = compare(again, list(clean.values()))
            assert [c.verdict for c in verdicts] == ["same"] * len(verdicts)
            assert all(c.rule == "exact" for c in verdicts)
            assert other_machine(again[0], clean["auto"]) is None


def layer_by_layer(case: Case) -> Case:
    model = replace(case.config.model, native_steps="off")
    return replace(case, config=replace(case.config, model=model))


def dead_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the batch that is row 3 until a row has ended."""
    count = model_tokens.count_accepted

    def accepted(drafts: torch.Tensor, *args: Any) -> torch.Tensor:
        return count(drafts, *args) * (torch.arange(len(drafts)) != 3)

    monkeypatch.setattr(model_tokens, "count_accepted", accepted)


def one_wrong_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole run."""
    drafted = DecodeSteps._drafted
    calls = list[int]()

    def draft(self: DecodeSteps, *args: Any) -> Any:
        proposal = drafted(self, *args)
        calls.append(1)
        if len(calls) == 3:
            proposal.ids[2, 0] = (proposal.ids[2, 0] + 1) % 100
        return proposal

    monkeypatch.setattr(DecodeSteps, "_drafted", draft)


def budget_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StreamingLLM, "build", lambda kv: StreamingLLM(kv.num_sink_tokens, kv.budget - 1)
    )


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KV_POLICIES, "snapkv", KV_POLICIES["streaming_llm"])


def prompt_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetrievedBlocks, "in_widest", lambda self, layers: ())


def earlier_states(monkeypatch: pytest.MonkeyPatch) -> None:
    read = HiddenStates.states_at

    def states_at(self: HiddenStates, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return read(self, rows, (positions - 1).clamp(min=0))

    monkeypatch.setattr(HiddenStates, "states_at", states_at)


PLANTS: dict[str, tuple[str, Plant, str]] = {
    "a row accepts nothing": ("streaming_llm", dead_row, "WRONG, first at sequence 3, token "),
    "one draft of the run is wrong": (
        "streaming_llm",
        one_wrong_draft,
        "prompt 2, step 2: other tokens drafted",
    ),
    "the budget is one less": (
        "streaming_llm",
        budget_off_by_one,
        "prompt 0, step 0: its draft forwards read 522 keys, was 526",
    ),
    "a policy is another": (
        "snapkv",
        swapped,
        "prompt 0, step 0: its draft forwards read other positions (526 keys, as before)",
    ),
    "the query of the prompt chooses": ("retrieval", prompt_query, "read other positions"),
    "a head reads the states of the token before": (
        "eagle",
        earlier_states,
        "other tokens drafted",
    ),
}


@pytest.mark.narrow(2)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_regression_is_named(
    name: str, clean: dict[str, JudgedRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plant, message = PLANTS[name]
    plant(monkeypatch)
    (found,) = compare(run([CASES[case].with_threads(1)]), [clean[case]])
    # The run itself finds steps that are not what their logits say.
    verdict = "regression" if plant is dead_row else "changed"
    assert exit_code([found]) == 1 and found.verdict == verdict, found
    assert message in str(found), found


def wrong_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of the drafts at every 32nd position of each text, which a run may pass."""
    drafted = DecodeSteps._drafted

    def draft(self: DecodeSteps, batch: Batch, gamma: int) -> Any:
        proposal = drafted(self, batch, gamma)
        for row, request in enumerate(batch.requests):
            if len(request.output_ids) % 32 == 16:
                proposal.ids[row, 0] = (proposal.ids[row, 0] + 1) % 100
        return proposal

    monkeypatch.setattr(DecodeSteps, "_drafted", draft)


def test_a_loss_is_seen_at_every_position_that_a_run_of_these_texts_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By statistics, which decide on other machines. On this one both are exact."""
    subject = Subject(batch_size=8, num_batches=1, prefix_len=256, gen_len=65)
    every = next(case for case in standard_cases(subject) if case.is_at_every_position)
    decoding = replace(every.config.decoding, baseline=True)
    cases = [Case(replace(every.config, decoding=decoding)), every]
    before = run([case.with_threads(1) for case in cases])
    assert [len(record.verifications().every) > 400 for record in before] == [False, True]
    wrong_now_and_then(monkeypatch)
    after = run([case.with_threads(1) for case in cases])
    found = compare(after, before)
    assert [comparison.verdict for comparison in found] == ["changed", "changed"], found
    assert "step 15: accepted 0 of 4, was " in str(found[1])
    machine = {"environment": replace(before[0].environment, torch="0")}
    found = compare(after, [replace(record, **machine) for record in before])
    assert [comparison.verdict for comparison in found] == ["tolerated", "regression"], found
