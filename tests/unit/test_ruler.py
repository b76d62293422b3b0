"""RULER-style prompts: exact lengths, determined by the seed, with answers that are in the text."""

import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from test_workload import Characters

from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.workload import ruler as ruler_tasks
from magicdec.workload.ruler import DOTS, TASKS
from magicdec.workload.workload import Wanted, Workload, build_workload

DEMO = Path(ruler_tasks.__file__).parents[1] / "demo" / "target"
TOKENIZERS = {"characters": Characters, "demo": lambda: load_tokenizer(DEMO)}


def build(task: str, length: int, seed: int = 0, num_prompts: int = 3) -> Workload:
    return build_workload(
        f"ruler:{task}", load_tokenizer(DEMO), 1, Wanted(length, num_prompts, seed)
    )


def texts(task: str, length: int) -> list[tuple[str, tuple[str, ...]]]:
    """Each prompt's text with its answers, decoded by a lossless tokenizer."""
    work = build_workload(f"ruler:{task}", Characters(), None, Wanted(length, 4, 5))
    assert work.answers is not None
    return [
        (Characters().decode(prompt), answer.texts)  # type: ignore[attr-defined]
        for prompt, answer in zip(work.prompts, work.answers, strict=True)
    ]


@pytest.mark.narrow(6)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_exactly_the_length_and_end_on_the_question(task: str, tokenizer: str) -> None:
    encoder: Tokenizer = TOKENIZERS[tokenizer]()
    for length in (2000, 2001, 4096, 9999):
        work = build_workload(f"ruler:{task}", encoder, 7, Wanted(length, 3, 0))
        assert [len(prompt) for prompt in work.prompts] == [length] * 3
        for prompt in work.prompts:
            assert prompt[0] == 7
            text = encoder.decode(prompt[1:])
            head, *_, question = text.split("\n")
            assert re.match("[A-Z].*[.]$", head) and text.count("\n") == 2
            assert re.match("Question: .* Answer: The .* (is|are)$", question.strip())


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides_everything(task: str) -> None:
    first = build(task, 1500)
    assert build(task, 1500) == first
    other = build(task, 1500, seed=1)
    assert other.sha256 != first.sha256 and other.answers != first.answers
    assert len(set(first.prompts)) == 3
    more = build(task, 1500, num_prompts=5)
    assert more.prompts[:3] == first.prompts


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_context_is_named_with_the_least_length(task: str) -> None:
    with pytest.raises(ValueError, match="--prefix_len 9 is too short for --dataset") as error:
        build(task, 9)
    assert f"ruler:{task};" in str(error.value)
    least = int(str(error.value).split()[-1])
    assert {len(prompt) for prompt in build(task, least).prompts} == {least}
    with pytest.raises(ValueError, match=f"it must be at least {least}$"):
        build(task, least - 1)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_nothing_but_haystack_is_cut(task: str) -> None:
    """Words differ in length, so some prompts have fewer words than others."""
    with pytest.raises(ValueError, match="it must be at least") as error:
        build(task, 9, num_prompts=12)
    for length in (int(str(error.value).split()[-1]), 1300, 3001):
        for prompt in build(task, length, num_prompts=12).prompts:
            assert "and then we rest. " in load_tokenizer(DEMO).decode(prompt)


@pytest.mark.parametrize("name", ["", "qa", "niah"])
def test_unknown_tasks_are_refused_with_the_choices(name: str) -> None:
    choices = ", ".join(f"ruler:{task}" for task in TASKS)
    with pytest.raises(ValueError, match=f"'ruler:{name}' is not known; choose from {choices}$"):
        build(name, 1000)


@pytest.mark.parametrize(("task", "needles"), [("niah_single", 1), ("niah_multikey", 4)])
def test_the_needle_asked_for_is_in_the_haystack(task: str, needles: int) -> None:
    for text, (answer,) in texts(task, 3000):
        found = dict(re.findall(r"The magic number of (\S+) is (\d{7})\.", text))
        assert len(found) == needles
        asked = re.search(r"Answer: The magic number of (\S+) is$", text)
        assert asked is not None and found[asked[1]] == answer


def test_one_of_several_needles_with_a_key_is_asked_for_by_its_place() -> None:
    places = set[str]()
    for text, (answer,) in texts("mrcr", 3000):
        asked = re.search(r"Answer: The (\w+) magic number of (\S+) is$", text)
        assert asked is not None
        found = re.findall(r"The magic number of (\S+) is (\d{7})\.", text)
        ours = [number for key, number in found if key == asked[2]]
        assert len(ours) == 4 and len(found) == 8
        assert ours[["first", "second", "third", "fourth"].index(asked[1])] == answer
        places.add(asked[1])
    assert len(places) > 1


def test_needles_lie_at_all_depths() -> None:
    work = build_workload("ruler:niah_single", Characters(), None, Wanted(3000, 40, 0))
    assert work.answers is not None
    depths = [Characters().decode(prompt).index(". The magic number") for prompt in work.prompts]
    assert min(depths) < 800 and max(depths) > 2200


def test_variables_are_a_chain_of_the_value_asked_for() -> None:
    dense = [TASKS["vt"].make(random.Random(seed), 8) for seed in range(20)]
    crowded = [(s.body + s.question, s.answers) for s in dense]  # some positions are drawn twice
    for text, answers in [*texts("vt", 3000), *crowded]:
        asked = re.search(r"have the value (\d{5}) are$", text)
        statements = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text)
        assert asked is not None and statements[0][1] == asked[1]
        assert all(later[1] == name for (name, _), later in pairwise(statements))
        assert tuple(name for name, _ in statements) == answers and len(set(answers)) == 5


@pytest.mark.parametrize("length", [1800, 4000, 9000, 40000])
def test_common_words_are_the_most_common(length: int) -> None:
    for text, answers in texts("cwe", length):
        numbers, words = zip(*re.findall(r"(\d+)\. (\S+-\S+)", text), strict=True)
        assert [int(n) for n in numbers] == list(range(1, len(words) + 1))
        counts = Counter(words).most_common()
        assert {word for word, _ in counts[:10]} == set(answers)
        assert len({count for _, count in counts[:10]}) == 1
        assert counts[9][1] > 3 * counts[10][1]


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_the_least_list_has_an_answer(task: str) -> None:
    sample = TASKS[task].make(random.Random(0), TASKS[task].least)
    counts = Counter(w for w in sample.body.split() if re.match("[a-z]", w)).most_common()
    num = len(sample.answers)
    assert {word for word, _ in counts[:num]} == set(sample.answers)
    assert counts[num - 1][1] > counts[num][1]


def test_lists_longer_than_there_are_words_keep_an_answer() -> None:
    sample = TASKS["cwe"].make(random.Random(0), 120_000)
    words = sample.body.split()[1::2]
    counts = Counter(words).most_common()
    assert len(words) == 120_000
    assert {word for word, _ in counts[:10]} == set(sample.answers)
    assert counts[9][1] > 3 * counts[10][1]


@pytest.mark.parametrize("length", [900, 4000, 40000])
def test_frequent_words_are_the_most_frequent(length: int) -> None:
    for text, answers in texts("fwe", length):
        body = text[text.index(DOTS, text.index("\n")) : text.rindex("\n")]
        words = re.findall(r"(?:^|(?<= ))(?:[a-z]{6}|\.{4})(?= |$)", body)
        counts = Counter(words).most_common()
        assert counts[0][0] == DOTS
        assert tuple(word for word, _ in counts[1:4]) == answers
        assert counts[1][1] > counts[2][1] > counts[3][1] > counts[4][1]


def test_no_word_is_found_inside_another() -> None:
    adjectives = ruler_tasks.ADJECTIVES.split()
    nouns = ruler_tasks.NOUNS.split()
    for words, inside in ((adjectives, str.endswith), (nouns, str.startswith)):
        assert len(set(words)) == len(words)
        assert [(a, b) for a in words for b in words if a != b and inside(a, b)] == []


def test_generated_prompts_have_no_books() -> None:
    work = build("vt", 1000)
    assert work.dataset == "ruler:vt" and len(work.prompts) == 3
    absent = {name for name, value in vars(work).items() if value is None}
    set_fields = {"categories", "left_out", "conversations"}
    assert absent == {"num_available", "skip_tokens", "sources"} | set_fields
