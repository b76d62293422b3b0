"""`magicdec acceptance`: its numbers from counts, what it refuses, and how it goes on."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from conftest import Command
from draft_heads import HeadForm, write_head
from safetensors.torch import load_file, save_file

from magicdec.bench import groups
from magicdec.bench.acceptance import measuring
from magicdec.bench.acceptance.record import (
    AcceptanceRecord,
    best_of,
    counts_of,
    cumulative_of,
    cumulative_of_counts,
    depths_by_category,
    depths_of,
    digits_of,
    shown_gammas,
    steps_of,
)
from magicdec.model.checkpoint.source import find_model
from magicdec.records.reading import read_records
from magicdec.runner.sampling.sampling import make_params

WORDS = "--prefix_len 64 96 --gen_len 9 --gamma 3 --B 4 --dtype float32 --threads 1"
SMALL = WORDS.split()


def test_counts_are_digits() -> None:
    counts = [0, 9, 10, 35, 3]
    assert digits_of(counts) == "09az3" and counts_of("09az3") == counts


def at_steps(counts: list[int], gamma: int) -> list[int]:
    """What the steps of a run accept, each of which takes its tokens from the front of a text."""
    if not counts:
        return []
    accepted = min(counts[0], gamma)
    return [accepted, *at_steps(counts[1 + accepted :], gamma)]


def test_tokens_a_step_are_those_of_counts() -> None:
    accepted = [[0, 3, 1], [2, 2], [], [3, 0, 1, 1], [1]]
    drafted = [[3, 3, 3], [3, 2], [], [3, 0, 3, 3], [3]]
    flat = [
        (a, d) for pair in zip(accepted, drafted, strict=True) for a, d in zip(*pair, strict=True)
    ]
    cumulative = [cumulative_of_counts(counts, 3) for counts in accepted]
    found = depths_of(cumulative, drafted, 3, is_chain=True)
    assert [row.depth for row in found] == [1, 2, 3]
    for row in found:
        k = row.depth
        expected = 1 + sum(min(a, k) for a, _ in flat) / len(flat)
        assert row.tokens_per_position == pytest.approx(expected)
        steps = [a for text in accepted for a in at_steps(text, k)]
        assert row.tokens_per_step == pytest.approx(1 + sum(steps) / len(steps))
        assert row.cumulative == sum(a >= k for a, _ in flat) / len(flat)
        judged = [a for a, d in flat if d >= k and a >= k - 1]
        assert row.conditional == sum(a >= k for a in judged) / len(judged)
        low, high = row.tokens_per_position_interval or (0, 0)
        assert 1 < low < expected < high < 1 + k
    alone = depths_of(cumulative, drafted, 3, is_chain=False)
    assert [row.tokens_per_step is None for row in alone] == [True, True, False]
    assert [row.tokens_per_position is None for row in alone] == [True, True, False]
    assert alone[-1] == found[-1]
    none = [cumulative_of_counts([0], 2)] * 2
    nothing = depths_of(none, [[1], [0]], 2, is_chain=True)
    assert nothing[1].conditional is None and nothing[0].conditional == 0
    assert shown_gammas(6) == [1, 2, 4, 6] and shown_gammas(8) == [1, 2, 4, 8]


def test_steps_over_sampled_texts_by_enumeration() -> None:
    """Over all texts of a made-up model of two tokens, the steps that follow from each text, and
    what they accept, have the expectation of those of speculative sampling, all of whose draws are
    gone through. Both models' next token depends on the whole text."""
    rng = np.random.default_rng(0)
    size, gamma = 4, 2
    texts = [text for n in range(size + gamma) for text in product((0, 1), repeat=n)]
    p, q = ({text: rng.dirichlet((1, 1)) for text in texts} for _ in range(2))

    def run_from(text: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The expected accepted tokens and steps of the rest of a run."""
        if len(text) >= size:
            return np.zeros(2)
        return np.array([0, 1]) + step_from(text, 0)

    def step_from(text: tuple[int, ...], num_accepted: int) -> np.ndarray[Any, Any]:
        """The same of a step that has accepted so many."""
        total = np.zeros(2)
        if num_accepted == gamma:
            for token in (0, 1):
                total += p[text][token] * run_from((*text, token))
            return total
        for token in (0, 1):  # the one that is drafted
            accepts = min(1, p[text][token] / q[text][token])
            goes_on = np.array([1, 0]) + step_from((*text, token), num_accepted + 1)
            total += q[text][token] * accepts * goes_on
            rest = np.maximum(p[text] - q[text], 0)
            if accepts < 1:
                for other in (0, 1):
                    chance = rest[other] / rest.sum()
                    total += q[text][token] * (1 - accepts) * chance * run_from((*text, other))
        return total

    expected = np.zeros(2)
    for text in product((0, 1), repeat=size + gamma):
        ratios = [min(1, q[text[:n]][text[n]] / p[text[:n]][text[n]]) for n in range(len(text))]
        cumulative = np.array([np.cumprod(ratios[n : n + gamma]) for n in range(size)])
        probability = np.prod([p[text[:n]][text[n]] for n in range(len(text))])
        expected += probability * np.array(steps_of(cumulative, gamma))
    assert expected == pytest.approx(run_from(()), rel=1e-12)
    assert 1 < expected[1] < size and expected[0] > 0


def test_probabilities_count_as_shares_of_positions() -> None:
    """Two texts, of which a position has a draft of one token, and one has none."""
    texts = [[[0.9, 0.5], [0.4]], [[], [0.2, 0.3]]]
    drafted = [[2, 1], [0, 2]]
    cumulative = [cumulative_of(text, 2) for text in texts]
    found = depths_of(cumulative, drafted, 2, is_chain=True, has_steps=False)
    assert [row.cumulative for row in found] == pytest.approx([1.5 / 4, 0.8 / 4])
    means = [row.tokens_per_position for row in found]
    assert means == pytest.approx([1 + 1.5 / 4, 1 + 2.3 / 4])
    assert [row.tokens_per_step for row in found] == [None, None]
    # Of the three positions with a draft, and of the 0.9 + 0.2 of two that go on.
    assert [row.conditional for row in found] == pytest.approx([1.5 / 3, 0.8 / 1.1])
    rising = depths_of([cumulative_of([[0.5, 0.6]], 2)], [[2]], 2, is_chain=True)
    assert rising[1].conditional == 1, "by chance more, and never above 1"


def test_a_category_has_the_acceptance_of_its_texts_alone() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, size=n).tolist() for n in (5, 6, 0, 7, 8, 0, 9, 4)]
    names = ["code", "prose", "code", None, "code", "empty", "code", "code"]
    cumulative = [cumulative_of_counts(text, 3) for text in texts]
    drafted = [[3] * len(text) for text in texts]
    found = depths_by_category(names, cumulative, drafted, 3, is_chain=True)
    assert [*found] == ["code", "prose"], "in the order of the alphabet, with a position"
    for name, places in (("code", (0, 2, 4, 6, 7)), ("prose", (1,))):
        alone = [[by_text[place] for place in places] for by_text in (cumulative, drafted)]
        assert found[name] == depths_of(*alone, 3, is_chain=True)
        positions = [count for place in places for count in texts[place]]
        assert found[name][2].tokens_per_position == pytest.approx(1 + np.mean(positions))
    assert found["code"][0].cumulative_interval and not found["prose"][0].cumulative_interval


SAYINGS = {
    "code": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return add(a, a)\n",
    "prose": "The ships in the harbour were waiting for the tide to turn, and for the morning.",
    "talk": "- Where are you going?\n- To the market.\n- Will you bring me some apples?",
}


@pytest.mark.parametrize("sampled", ["", "--temperature 0.8"])
def test_prompts_with_categories_have_a_table_by_category(
    sampled: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "set.jsonl"
    items = [
        {"category": name, "turns": [f"{number}. {text}"]}
        for number in range(4)
        for name, text in SAYINGS.items()
    ]
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    out = tmp_path / "out.jsonl"
    words = f"--dataset spec_bench:{path} --prefix_len 24 --gen_len 9 --gamma 3 --B 12 --budget 17"
    words += f" --draft self ngram --dtype float32 --threads 1 --ignore_eos {sampled}"
    ended = command("acceptance", *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    for record in read_records(out, AcceptanceRecord):
        categories = record.workload.categories or []
        assert sorted(map(str, categories)) == sorted([*SAYINGS] * 4)
        assert record.rows_by_category is not None and [*record.rows_by_category] == [*SAYINGS]
        chances = record.acceptance_probabilities
        assert (chances is None) == (sampled == "") != (record.accepted is None)
        for name, rows in record.rows_by_category.items():
            places = [place for place, category in enumerate(categories) if category == name]
            if chances is None:
                counts = [count for n in places for count in counts_of((record.accepted or [])[n])]
            else:
                counts = [sum(drafts) for n in places for drafts in chances[n]]
            expected = 1 + sum(counts) / len(counts)
            assert record.num_texts_of(name) == 4 and len(counts) == 32
            assert rows[-1].tokens_per_position == pytest.approx(expected, abs=1e-3)
            accepted, steps = np.sum([steps_of(record.cumulative_by_text[n], 3) for n in places], 0)
            assert rows[-1].tokens_per_step == pytest.approx(1 + accepted / steps, abs=1e-3)
    _, title, table = ended.out.partition("acceptance by category")
    assert title and [table.count(name) for name in SAYINGS] == [2, 2, 2]
    assert table.count("all texts") == 2
    assert (f"({sampled})" in ended.out) == (sampled != "")
    exported = command("export", out, "--out", tmp_path / "flat.csv")
    assert exported.code == 0, exported.err
    flat = pandas.read_csv(tmp_path / "flat.csv")
    assert len(flat) == 2 * 3 * (1 + 3), "a row for each depth of a cell, and of a category"
    assert flat["category"].value_counts().to_dict() == dict.fromkeys(SAYINGS, 6)


def test_the_best_gamma_pays_for_its_tokens() -> None:
    cumulative = [cumulative_of_counts([2, 0, 0, 2, 0, 0], 4)] * 4
    depths = depths_of(cumulative, [[4] * 6] * 4, 4, is_chain=True)

    assert best_of(depths).depth == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--top_k 4", "--top_k 4 does nothing at --temperature 0 (greedy)"),
        ("--sampling_seed 3", "--sampling_seed does nothing here: --temperature 0 is greedy"),
        ("--draft none", "--draft none: nothing drafts; leave it out"),
        ("--draft self:int3", "--draft self:int3 is not known; choose from self, model:NAME"),
        ("--draft self self", "--draft names self twice; name each once"),
        ("--draft ngram --budget 33", "--budget does nothing here: drafts of ngram read no KV"),
        (
            "--draft self --pooling max",
            "--pooling does nothing here: --kv_policy streaming_llm does",
        ),
        ("--kv_policy full --budget 33", "--budget does nothing here: --kv_policy full reads the"),
        ("--draft self,budget", "--draft self,budget is not known; choose from self, model:NAME"),
        ("--draft self,budge=33", "--draft self,budge=33: budge is no setting of a draft; did you"),
        ("--draft self,dtype=float32", "dtype is no setting of a draft; choose from kv_policy, b"),
        ("--draft self,budget=", "--draft self,budget=: --budget: give at least one value"),
        ("--draft self,budget=few", "--draft self,budget=few: --budget few is not a whole number"),
        ("--draft self,budget=16", "self,budget=16: --budget 16 must be larger than --num_sink_t"),
        ("--draft self,budget=33,budget=65", "--draft self,budget=33,budget=65 names budget twice"),
        (
            "--draft self ngram,budget=33",
            "--draft ngram,budget=33: --budget does nothing here: drafts of ngram read no KV cache",
        ),
        (
            "--draft self,kv_policy=full,budget=33",
            "--budget does nothing here: --kv_policy full reads the whole cache; leave it out",
        ),
        (
            "--draft model:demo-draft,eagle_layers=1",
            "--eagle_layers does nothing here: no EAGLE-3 head drafts here; leave it out",
        ),
        (
            "--draft self,budget=33 ngram --budget 65",
            "--budget does nothing here: self,budget=33 has its own; drafts of ngram read no KV",
        ),
        ("--budget 16", "--budget 16 must be larger than --num_sink_tokens 16"),
        ("--gamma 36", "--gamma 36 is too large; it must be at most 35"),
        ("--draft eagle:demo-eagle --kv_policy snapkv", "--kv_policy snapkv: a draft head"),
        ("--prefix_len 64 99999", "--prefix_len 99999"),
        ("--dataset {short}", "short.txt"),
        ("--B 9999", "prefixes of --prefix_len 96 tokens; 9999 are needed (--B)"),
        ("--draft eagle:{head}", "--draft eagle:"),
        ("--plot chart.gif", "--plot chart.gif: the name must end in .png or .svg or .pdf"),
        ("--lookup_corpus {short}", "--lookup_corpus does nothing here: nothing is looked up"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: str, message: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    write_head(tmp_path / "head", find_model("--model", "demo-draft").config, HeadForm())
    places = {"short": tmp_path / "short.txt", "head": tmp_path / "head"}
    out = tmp_path / "out.jsonl"
    given = words.format(**places).split()
    rest = SMALL if "--prefix_len" not in given and "--gamma" not in given else []
    ended = command("acceptance", *rest, *given, "--out", out)
    assert ended.code == 2 and message in ended.err, ended.err
    assert len(ended.err.splitlines()) == 1 and not out.exists()


def test_the_same_command_goes_on_with_what_is_left(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["acceptance", *SMALL, "--draft", "self", "ngram", "--budget", 33, "--out", out]
    record_of = measuring.AcceptanceRunner.record_of
    made: list[str] = []

    def interrupted_at_the_third(runner: Any, planned: Any, group: Any) -> AcceptanceRecord:
        made.append(planned.name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return record_of(runner, planned, group)

    monkeypatch.setattr(measuring.AcceptanceRunner, "record_of", interrupted_at_the_third)
    ended = command(*words)
    assert ended.code == 130
    assert f"interrupted; 2 of 4 cells are in {out}; the same command goes on" in ended.err
    first = out.read_text()
    assert len(first.splitlines()) == 2
    ended = command(*words, "--plot", tmp_path / "chart.svg")
    assert ended.code == 0 and f"2 of 4 cells are in {out}" in ended.err
    assert out.read_text().startswith(first) and len(made) == 5
    records = list(read_records(out, AcceptanceRecord))
    assert [(r.draft, r.context) for r in records] == [
        ("self streaming_llm 33", 96),
        ("ngram", 96),
        ("self streaming_llm 33", 64),
        ("ngram", 64),
    ]
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    shown = command("table", out)
    assert (
        shown.code == 0
        and shown.out.count("tokens a step of a run, from the acceptance at every") == 1
    )
    exported = command("export", out, "--out", tmp_path / "flat.csv")
    assert exported.code == 0, exported.err
    rows = (tmp_path / "flat.csv").read_text().splitlines()
    assert len(rows) == 1 + 4 * 3, "a row for each depth of a cell"
    ended = command(*words)
    assert len(made) == 5 and "4 of 4 cells are in" in ended.err, "nothing is measured again"
    command(*words, "--gamma", 2)
    assert len(made) == 9, "another number of drafts is another cell"


def test_settings_of_a_draft_take_the_place_of_those_of_the_command(
    command: Command, tmp_path: Path
) -> None:
    """One command has the cells of several, and each of them once."""
    together = tmp_path / "together.jsonl"
    drafts = "self self,budget=33 ngram,gamma=2 self,kv_policy=snapkv,budget=41,window_size=8"
    drafts += " self:int4,kv_policy=full,gamma=5"
    words = [*SMALL, "--draft", *drafts.split(), "self,budget=33 49"]
    ended = command("acceptance", *words, "--budget", "33", "57", "--out", together)
    assert ended.code == 0, ended.err
    apart = tmp_path / "apart.jsonl"
    for draft in (
        "--draft self --budget 33 57 49",
        "--draft ngram --gamma 2",
        "--draft self --kv_policy snapkv --budget 41 --window_size 8",
        "--draft self:int4 --kv_policy full --gamma 5",
    ):
        ended = command("acceptance", *SMALL, *draft.split(), "--out", apart)
        assert ended.code == 0, ended.err
    files = (list(read_records(path, AcceptanceRecord)) for path in (together, apart))
    cells, expected = ({measuring.record_key(r): r.accepted for r in records} for records in files)
    assert cells == expected and len(cells) == 2 * 6
    assert len(together.read_text().splitlines()) == len(cells)


def test_cells_of_other_weights_are_measured(
    command: Command, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """The same name, and other weights."""
    out = tmp_path / "out.jsonl"
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    words = ["acceptance", *SMALL, "--model", model, "--budget", 33, "--out", out, "--ignore_eos"]
    assert command(*words).code == 0
    weights = load_file(model / "model.safetensors")
    norm = next(name for name in weights if "norm" in name)
    weights[norm] = weights[norm] + 0.5
    save_file(weights, model / "model.safetensors")
    ended = command(*words)
    assert ended.code == 0 and "cells are in" not in ended.err
    assert len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize("every", [8, 1])
def test_a_continuation_that_ends_early_is_a_shorter_group(
    every: int, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `every`-th token ends a text."""

    def ending(section: Any, count: int, ends: Any, number: int) -> Any:
        return make_params(section, count, tuple(range(0, 4096, every)), number)

    monkeypatch.setattr(groups, "make_params", ending)
    out = tmp_path / "out.jsonl"
    ended = command("acceptance", *SMALL, "--budget", 33, "--out", out)
    if every == 1:
        assert ended.code == 2 and "every continuation ends with its first token" in ended.err
        return
    assert ended.code == 0, ended.err
    record = next(read_records(out, AcceptanceRecord))
    lengths = record.lengths
    assert 0 < record.num_short == sum(length < 8 for length in lengths) <= 4
    assert f"context {record.context}: {record.num_short} continuations end early" in ended.out
    assert record.num_positions == sum(lengths)
