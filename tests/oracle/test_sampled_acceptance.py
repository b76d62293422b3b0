"""The claim of `magicdec acceptance` at a temperature: in float32, over the text of a run, every
verification of it accepts its drafts with the probabilities of the table, and accepts as many as
they say. The text of the table is that of decoding without drafts. With one token left to choose
from, the table is the greedy one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from torch import Tensor

from magicdec.bench.acceptance import measuring
from magicdec.bench.acceptance.record import counts_of, cumulative_of, steps_of
from magicdec.runner.request import StepOutput
from magicdec.runner.sampling import model_tokens
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import CountedAcceptance, Proposal
from magicdec.runner.sampling.verification import Judgement, acceptance_of, verify
from magicdec.systems.observer import PassObserver

GAMMA = 4
ROWS = 32
PREFIX = 96
NEW = 41
SHAPE = f"--prefix_len {PREFIX} --gen_len {NEW} --B {ROWS} --dtype float32 --threads 1"
SAMPLED = f"{SHAPE} --ignore_eos --temperature 0.8 --top_p 0.95 --sampling_seed 5"
# The words of a table, and of a run with the same drafts.
DRAFTS = {
    "self": ("--draft self --budget 49", "--draft self --budget 49"),
    "int4": ("--draft self:int4 --budget 49", "--draft self --draft_weights int4 --budget 49"),
    "model": (
        "--draft model:demo-draft --kv_policy full",
        "--draft model:demo-draft --budget -1",
    ),
    "eagle": (
        "--draft eagle:demo-eagle --kv_policy full",
        "--draft eagle:demo-eagle --budget -1",
    ),
}


def in_make_test(*names: str) -> list[Any]:
    """Every draft; the others are in make test-wide."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.wide) for n in DRAFTS]


class Watch:
    """Sees what passes emit, and what their verifications accept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[int, list[int]] = {}  # by request, after the first one
        # Of each verification: the request, the position, whether the first 1, 2, ... drafts were
        # accepted, and the probabilities of that.
        self.verified: list[tuple[int, int, list[float], list[float]]] = []
        self._judged: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(model_tokens, "verify", self._verify)
        observe = PassObserver.observe

        def see(
            observer: PassObserver, ids: Sequence[int], output: StepOutput, seconds: float
        ) -> None:
            self._observe(ids, output)
            observe(observer, ids, output, seconds)

        monkeypatch.setattr(PassObserver, "observe", see)

    def _verify(self, ids: Tensor, draft_probs: Tensor | None, probs: Tensor, *more: Any) -> Any:
        accepted, following = verify(ids, draft_probs, probs, *more)
        is_accepted = accepted.unsqueeze(1) > torch.arange(ids.shape[1])
        self._judged.append((is_accepted.double(), acceptance_of(ids, draft_probs, probs)))
        return accepted, following

    def _observe(self, ids: Sequence[int], output: StepOutput) -> None:
        for is_accepted, chances in self._judged:
            rows = zip(ids, is_accepted.tolist(), chances.tolist(), strict=True)
            for number, *row in rows:
                self.verified.append((number, len(self.tokens.get(number, [])), *row))
        self._judged.clear()
        for number, emitted in zip(ids, output.token_ids, strict=True):
            self.tokens.setdefault(number, []).extend(emitted)


def run(command: Command, folder: Path, words: str) -> None:
    more = f"--num_batches 1 --warmup_batches 0 --out {folder}/run.jsonl"
    ended = command("run", *f"{words} {more}".split())
    assert ended.code == 0, ended.err


def measured(command: Command, out: Path, words: str) -> list[dict[str, Any]]:
    ended = command("acceptance", *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in out.read_text().splitlines()]


def force(monkeypatch: pytest.MonkeyPatch, texts: Tensor) -> None:
    """Tables are made over these texts [rows, tokens after the first]."""
    judge = CountedAcceptance.judge

    def forced(
        rule: CountedAcceptance,
        proposal: Proposal,
        target: Judgement,
        sampling: SamplingMetadata,
        newest: Tensor,
        starts: Tensor,
    ) -> Judgement:
        found = judge(rule, proposal, target, sampling, newest, starts)
        found.ids[:, 0] = texts.gather(1, (starts - PREFIX).unsqueeze(1))[:, 0]
        return found

    monkeypatch.setattr(CountedAcceptance, "judge", forced)


@pytest.mark.parametrize("name", in_make_test("model", "eagle"))
def test_a_run_accepts_drafts_with_the_probabilities_of_the_table(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At each of its verifications those that the table has at its position, where drafts are drawn
    there. What it accepts is within 4 standard errors of what they say, at each depth."""
    table_flags, run_flags = DRAFTS[name]
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        run(command, tmp_path, f"{run_flags} {SAMPLED} --gamma {GAMMA} --no_baseline")
    with monkeypatch.context() as patch:
        force(patch, torch.tensor([watch.tokens[row][: NEW - 1] for row in range(ROWS)]))
        patch.setattr(measuring, "can_fork", lambda run: False)
        words = f"{table_flags} {SAMPLED} --gamma {GAMMA}"
        (record,) = measured(command, tmp_path / "table.jsonl", words)
    table = record["acceptance_probabilities"]
    assert record["accepted"] is None and not record["is_forked"]
    assert [len(text) for text in table] == [NEW - 1] * ROWS
    expected = torch.tensor([table[row][place] for row, place, _, _ in watch.verified])
    chances = torch.tensor([chance for _, _, _, chance in watch.verified])
    assert len(chances) > 300 and {place for _, place, _, _ in watch.verified} == {*range(NEW - 1)}
    torch.testing.assert_close(chances, expected, rtol=0, atol=2e-4)
    off = torch.tensor([chance for _, _, chance, _ in watch.verified]) - expected
    error = off.std(dim=0) / len(off) ** 0.5
    assert (off.mean(dim=0).abs() < 4 * error).all(), (off.mean(dim=0), error)
    assert (error < 0.025).all(), "a fault of a tenth would be seen"
    rows = torch.tensor(table, dtype=torch.float64).mean(dim=(0, 1))
    cumulative = [row["cumulative"] for row in record["rows"]]
    assert cumulative == pytest.approx(rows.tolist(), abs=5e-5)


@pytest.mark.parametrize("name", in_make_test("int4", "model"))
def test_steps_of_a_run_over_its_text_are_those_that_forks_expect(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Given the text that a run has emitted, its steps and what they accept are within 4 standard
    errors of what forks of this text say, which draw nothing."""
    table_flags, run_flags = DRAFTS[name]
    longer = SAMPLED.replace(f"--gen_len {NEW}", f"--gen_len {NEW + GAMMA}")
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        run(command, tmp_path, f"{run_flags} {longer} --gamma {GAMMA} --no_baseline")
    texts = torch.tensor([watch.tokens[row][: NEW - 1 + GAMMA] for row in range(ROWS)])
    next_tokens = model_tokens.next_tokens

    def forced(runner: Any, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
        assert sampling.draws is not None
        ids, emitted = next_tokens(runner, logits, sampling), sampling.draws.emitted
        own = texts.gather(1, (emitted.unsqueeze(1) - 1).clamp(min=0))
        return torch.where(emitted.unsqueeze(1) > 0, own, ids)

    with monkeypatch.context() as patch:
        patch.setattr(model_tokens, "next_tokens", forced)
        words = f"{table_flags} {SAMPLED} --gamma {GAMMA}"
        (record,) = measured(command, tmp_path / "table.jsonl", words)
    assert record["is_forked"] and record["inexact"] is None
    by_text = [cumulative_of(text, GAMMA) for text in record["acceptance_probabilities"]]
    expected = np.array([steps_of(cumulative, GAMMA) for cumulative in by_text])
    found = np.zeros((ROWS, 2))
    for row, place, is_accepted, _ in watch.verified:
        if place < NEW - 1:
            found[row] += sum(is_accepted), 1
    off = found - expected
    error = off.std(axis=0) * ROWS**0.5
    assert (abs(off.sum(axis=0)) < 4 * error).all(), (off.sum(axis=0), error)
    assert (error < 0.1 * found.sum(axis=0)).all(), "a fault of two fifths would be seen"
    accepted, steps = expected.sum(axis=0)
    tokens_per_step = record["rows"][-1]["tokens_per_step"]
    assert tokens_per_step == pytest.approx(1 + accepted / steps, abs=1e-3)


def test_a_model_accepts_what_it_drafts_itself_with_its_whole_cache(
    command: Command, tmp_path: Path
) -> None:
    """q of each token is the p that it was drawn with, also with penalties, which follow texts."""
    words = f"--draft self --kv_policy full {SAMPLED} --gamma {GAMMA} --repetition_penalty 1.2"
    (record,) = measured(command, tmp_path / "out.jsonl", words.replace(f"--B {ROWS}", "--B 3"))
    assert record["is_forked"]
    chances = np.array(record["acceptance_probabilities"])
    assert chances.shape == (3, NEW - 1, GAMMA) and (abs(chances - 1) <= 1e-4).all()
    assert record["rows"][-1]["tokens_per_step"] == pytest.approx(1 + GAMMA, abs=1e-3)


def test_sampled_texts_are_those_of_decoding_without_drafts(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever drafts, in forks or step by step, as a draft model with a window does."""
    shape = SAMPLED.replace(f"--B {ROWS}", "--B 6").replace(f"--gen_len {NEW}", "--gen_len 21")
    with monkeypatch.context() as patch:
        plain = Watch(patch)
        run(command, tmp_path, f"--draft none {shape}")
    for draft, is_forked in (("model:demo-draft", False), ("self", True)):
        with monkeypatch.context() as patch:
            drafted = Watch(patch)
            words = f"--draft {draft} --budget 33 {shape} --gamma 2"
            (record,) = measured(command, tmp_path / f"{is_forked}.jsonl", words)
        assert record["is_forked"] == is_forked
        assert drafted.tokens == plain.tokens and len(plain.tokens) == 6
    assert {len(text) for text in plain.tokens.values()} == {20}
    words = f"--draft ngram {shape} --gamma 2"
    (looked_up,) = measured(command, tmp_path / "ngram.jsonl", words)
    assert looked_up["outputs_sha256"] == record["outputs_sha256"]


def test_with_one_token_left_to_choose_from_the_table_is_the_greedy_one(
    command: Command, tmp_path: Path
) -> None:
    """Each probability is 0 or 1 then, also of lookups, of drafts of different lengths, and with
    penalties, which follow the drafts."""
    drafts = "self model:demo-draft eagle:demo-eagle ngram ngram+self"
    shape = SHAPE.replace(f"--B {ROWS}", "--B 4").replace(f"--gen_len {NEW}", "--gen_len 21")
    words = f"--draft {drafts} --budget 49 --gamma 4 {shape}"
    words += " --repetition_penalty 1.1 --presence_penalty 0.2"
    greedy = measured(command, tmp_path / "greedy.jsonl", words)
    sampled = measured(command, tmp_path / "sampled.jsonl", f"{words} --temperature 1 --top_k 1")
    assert len(greedy) == len(sampled) == 5
    for ours, theirs in zip(sampled, greedy, strict=True):
        assert theirs["acceptance_probabilities"] is None
        is_forked = theirs["inexact"] is None
        assert ours["is_forked"] == theirs["is_forked"] == is_forked
        assert ours["outputs_sha256"] == theirs["outputs_sha256"]
        assert ours["drafted"] == theirs["drafted"]
        none = dict.fromkeys(("tokens_per_step", "tokens_per_step_interval"))
        assert ours["rows"] == [row | ({} if is_forked else none) for row in theirs["rows"]]
        chances = ours["acceptance_probabilities"]
        assert {draft for text in chances for drafts in text for draft in drafts} <= {0.0, 1.0}
        counts = [[int(sum(drafts)) for drafts in text] for text in chances]
        assert counts == [counts_of(text) for text in theirs["accepted"]]
