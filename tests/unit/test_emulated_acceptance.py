"""Acceptance by chance: rates as vLLM makes them, drawn so often, for every drafter, marked in the
record, and compared with nothing."""

import json
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY,
    Command,
    decode,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from draft_heads import is_head, made_head, state_layers

from magicdec.config.sections import NAMED, DecodingSection, KVSection, SamplingSection
from magicdec.engine.engine import Engine
from magicdec.names import DRAFTERS, NGRAM_AND
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import StepOutput
from magicdec.speculation.steps.strategy import Setup


@pytest.mark.parametrize(
    ("given", "gamma", "rates"),
    [
        ((1.0,), 4, (0, 0, 0, 0)),
        ((2.5,), 4, (1, 0.5, 0, 0)),
        ((5.0,), 4, (1, 1, 1, 1)),
        ((0.9, 0.45, 0.09), 4, (0.9, 0.5, 0.2, 0)),
        ((0.6,), 2, (0.6, 0.6)),
        ((0.5, 0.0), 3, (0.5, 0, 0)),
    ],
)
def test_a_length_has_the_rates_of_least_variance_and_rates_are_conditional(
    given: tuple[float, ...], gamma: int, rates: tuple[float, ...]
) -> None:
    section = DecodingSection("speculative", "self", gamma, emulate_acceptance=given)
    assert section.emulated_rates == pytest.approx(rates)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("5.1 --gamma 4", "--emulate_acceptance 5.1: a step emits at most 5 tokens; give a"),
        ("0.5 0.6 --gamma 4", "--emulate_acceptance 0.5 0.6: rates are from 0 to 1 and never rise"),
        ("2 0.5 --gamma 4", "--emulate_acceptance 2 0.5: rates are from 0 to 1 and never rise"),
        ("0.5 0.4 0.3 --gamma 2", "a step drafts at most 2 tokens; give fewer rates, or a larger"),
        ("-1", "--emulate_acceptance -1 is too small; it must be at least 0"),
        ("2 --draft none", "--emulate_acceptance 2: nothing drafts here; leave it out"),
    ],
)
def test_what_cannot_be_emulated_is_refused(words: str, message: str, command: Command) -> None:
    ended = command("run", "--prefix_len", 32, "--emulate_acceptance", *words.split())
    assert ended.code == 2 and message in ended.err, ended.err


@pytest.mark.narrow("values")
@pytest.mark.usefixtures("lookups_of_ones")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_accepted_as_often_as_asked_for(drafter: str, temperature: float) -> None:
    model = tiny_transformer()
    rows = 24
    new = 60
    gamma = 3
    size = rows, 10 + new + gamma
    runner = make_runner(model, *size)
    draft = None
    kv = KVSection("full")
    if is_head(drafter):
        runner.observers.append(HiddenStates.of(runner, state_layers(drafter, model.config)))
        draft = make_draft(made_head(model, drafter=drafter), kv, *size)
    elif drafter.removeprefix(NGRAM_AND) in NAMED:
        draft = make_draft(tiny_transformer(seed=2), kv, *size)
    decoding = DecodingSection("speculative", drafter, gamma, emulate_acceptance=(0.8, 0.4, 0.3))
    engine = Engine(runner, 64)
    prompts = random_prompts([10] * rows, TINY.vocab_size)
    requests = make_requests(prompts, new, sampling=SamplingSection(temperature))
    engine.prefill(requests)
    counts = torch.zeros(gamma + 1)

    def observe(ids: object, output: StepOutput, seconds: float) -> None:
        if output.num_accepted is not None and output.draft_width == gamma:
            counts.add_(torch.bincount(torch.tensor(output.num_accepted), minlength=gamma + 1))

    finished = decode(engine, "speculative", Setup(runner, decoding, kv, draft=draft), observe)
    assert all(len(r.output_ids) == new for r in finished)
    total = counts.sum()
    assert total > 300
    reached = counts.flip(0).cumsum(0).flip(0)[1:] / total
    expected = torch.tensor([0.8, 0.4, 0.3])
    allowed = 5 * (expected * (1 - expected) / total).sqrt()
    assert ((reached - expected).abs() < allowed).all(), reached


def test_other_prompts_of_the_same_length_have_other_luck() -> None:
    """Else batches would repeat each other, and intervals over prompts would be too narrow."""
    runner = make_runner(tiny_transformer(), 2, 80)
    decoding = DecodingSection("speculative", "self", 3, emulate_acceptance=(0.5,))
    found = []
    for seed in (0, 0, 1):
        accepted = list[list[int]]()
        engine = Engine(runner, 64)
        engine.prefill(make_requests(random_prompts([10, 10], TINY.vocab_size, seed), 50))
        decode(
            engine,
            "speculative",
            Setup(runner, decoding, KVSection("full")),
            lambda ids, output, s, to=accepted: to.append(output.num_accepted or []),
        )
        found.append(accepted)
    assert found[0] == found[1] != found[2]
    assert {row[0] == row[1] for row in found[0] if len(row) == 2} == {True, False}


def test_a_record_says_so_and_is_compared_with_nothing(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out.jsonl"
    words = [
        "--B",
        "1",
        "--prefix_len",
        "64",
        "--gen_len",
        "16",
        "--num_batches",
        "1",
        "--threads",
        "1",
        "--gamma",
        "2",
    ]
    ended = command("run", *words, "--emulate_acceptance", 2, "--out", out)
    assert ended.code == 0, ended.err
    assert "EMULATED acceptance 2" in ended.out and "not compared" in ended.out
    plain, record = map(json.loads, out.read_text().splitlines())
    assert plain["config"]["decoding"].get("emulate_acceptance") is None
    assert {plain["status"], record["status"]} == {"unverified"}
    assert record["config"]["decoding"]["emulate_acceptance"] == [2.0]
    assert record["correctness"]["reference"] is None
    assert record["metrics"]["acceptance_per_position"] == [1.0, 0.0]


def test_modes_that_draft_in_turns_accept_by_chance(tmp_path: Path, command: Command) -> None:
    """Beside modes whose tokens are compared as ever."""
    out = tmp_path / "out.jsonl"
    words = "--num_requests 3 --prefix_len 64 --gen_len 17 --arrival burst --B 2 --gamma 2"
    words += " --modes sequential inflight inflight+draft --draft self --emulate_acceptance 2"
    ended = command("serve", *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    message = "inflight+draft: unverified, EMULATED acceptance, so its tokens mean nothing"
    assert message in ended.out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rates = [line["config"]["decoding"]["emulate_acceptance"] for line in lines]
    assert rates == [None, None, [2.0]]
    assert [line["status"] for line in lines] == ["verified", "verified", "unverified"]
    drafting = lines[2]
    assert drafting["metrics"]["mean_acceptance_length"] == 2
    accepted = [
        counts for request in drafting["requests"] for counts in request["per_step_accepted"]
    ]
    assert set(accepted) == {1}, "the first of two drafts"
    assert drafting["correctness"]["judged_again"] is None
