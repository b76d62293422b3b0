"""Known answers: their scores, and the passages that recall chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_workload import BOS, Characters

from magicdec.request import Request, SamplingParams
from magicdec.workload.answers import (
    LEAST_PREFIX,
    Continuation,
    Strings,
    answer_scores,
    repeat_passage,
)
from magicdec.workload.workload import SKIP_TOKENS, Workload, build_workload


def ids(text: str) -> list[int]:
    return Characters().encode(text)


def request(index: int, output: Sequence[int]) -> Request:
    return Request(index, (1,), SamplingParams(99), list(output))


@pytest.mark.parametrize(
    ("texts", "output", "score"),
    [
        (("123",), "it is 123.", 1.0),
        (("123",), "it is 12 3.", 0.0),
        (("one", "two", "six", "ten"), "TWO, and One", 0.5),
        (("a", "b"), "", 0.0),
    ],
)
def test_strings_are_looked_for_in_any_place_and_case(
    texts: tuple[str, ...], output: str, score: float
) -> None:
    assert Strings(texts).score(ids(output), Characters()) == score


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    padding = Characters.vocab_size + 3
    assert Strings(("ab",)).score([97, padding, 98], Characters()) == 1.0


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ([1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4, 9, 9], 1.0),
        ([1, 9, 3, 9], 0.5),
        ([1, 2], 0.5),
    ],
)
def test_continuations_are_held_to_their_places(output: list[int], score: float) -> None:
    assert Continuation((1, 2, 3, 4)).score(output, Characters()) == score


def test_a_pass_has_the_score_of_each_prompt_whatever_their_order() -> None:
    answers = (Continuation((1, 2)), Strings(("x",)), Continuation((3,)))
    requests = [request(2, [3]), request(0, [1, 9]), request(1, ids("y"))]
    assert answer_scores(answers, requests, Characters()) == [1.0, 0.5, 0.0]
    assert answer_scores(None, requests, Characters()) is None


@pytest.mark.parametrize("length", [64, 512, 4096, 16384])
def test_the_cue_repeats_a_distant_passage_that_goes_on_as_expected(length: int) -> None:
    prefix = tuple(range(length))  # each token id is its position
    distances = []
    for seed in range(50):
        prompt, answer = repeat_passage(prefix, 20, random.Random(seed))
        assert len(prompt) == length
        start = next(i for i in range(1, length) if prompt[i] != i)
        cue = length - start
        passage = prompt[start]
        assert cue == min(64, length // 8) and prompt[:start] == prefix[:start]
        assert passage >= 1 and prompt[start:] == prefix[passage : passage + cue]
        after = passage + cue
        assert answer.token_ids == prefix[after : min(after + 20, start)] and answer.token_ids
        distances.append(start - passage)
    body = length - min(64, length // 8)
    assert min(distances) >= min(2000, body // 3) and max(distances) <= min(12000, body - 1)
    assert max(distances) > 1.5 * min(distances)


def book(tmp_path: Path) -> str:
    """A text for five prefixes of 400 tokens, in which all characters differ."""
    path = tmp_path / "book.txt"
    path.write_text("f" * SKIP_TOKENS + "".join(chr(0x4E00 + i) for i in range(2000)))
    return str(path)


def build(dataset: str, bos: int | None = BOS, length: int = 400, seed: int = 0) -> Workload:
    return build_workload(dataset, Characters(), bos, length, 4, seed, gen_len=30)


def test_recall_is_the_same_prefixes_of_books_with_a_cue_at_the_end(tmp_path: Path) -> None:
    plain, work = build(book(tmp_path)), build(f"recall:{book(tmp_path)}")
    assert (work.dataset, work.sources) == ("recall:book.txt", plain.sources)
    assert (work.num_available, work.skip_tokens) == (5, SKIP_TOKENS)
    assert work.sha256 != plain.sha256
    assert [p[:-50] for p in work.prompts] == [p[:-50] for p in plain.prompts]
    assert work.answers is not None
    for prompt, answer in zip(work.prompts, work.answers, strict=True):
        assert isinstance(answer, Continuation)
        at = prompt.index(prompt[-1])  # the first position of the cue's last token
        assert prompt[at + 1 : at + 31] == answer.token_ids


def test_recall_takes_the_demo_text_unless_told_otherwise() -> None:
    work = build("recall", length=200)
    assert work.dataset == "recall:demo" and work == build("recall:demo", length=200)


def test_recall_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    least = LEAST_PREFIX
    message = f"--prefix_len {least - 1} is too short for --dataset recall; .* at least {least}$"
    with pytest.raises(ValueError, match=message):
        build("recall", length=least - 1)
    for name in ("", "verse"):
        with pytest.raises(ValueError, match=f"--dataset '{name}' is not known; choose from demo"):
            build(f"recall:{name}")
    with pytest.raises(ValueError, match="cannot be read"):
        build(f"recall:{tmp_path / 'none.txt'}")
