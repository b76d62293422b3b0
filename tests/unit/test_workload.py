"""Workload: the choice and order of prefixes, and the error if there are too few; known answers,
and the passages that recall chooses.

The tokenizer is a fake with one id per character, so that expected tokens can be written down."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.runner.request import Request, SamplingParams
from magicdec.workload import workload as module
from magicdec.workload.answers import (
    LEAST_PREFIX,
    Continuation,
    Strings,
    answer_scores,
    repeat_passage,
)
from magicdec.workload.chat_template import Frames
from magicdec.workload.workload import (
    ENOUGH_BOOKS,
    Wanted,
    Workload,
    build_workload,
    encode_corpus,
)

BOS = 1_000_000


class Characters:
    """A tokenizer with one id per character."""

    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def vocabulary_hash(self) -> str:
        return "characters"


def write_lines(path: Path, books: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": b, "url": "u"}) + "\n" for b in books))
    return str(path)


def build(
    dataset: str,
    bos: int | None = BOS,
    skip_tokens: int | None = None,
    chat: Frames | None = None,
    **sizes: int | None,
) -> Workload:
    wanted: dict[str, Any] = {"prefix_len": 10, "num_prompts": 4, "seed": 0} | sizes
    return build_workload(dataset, Characters(), bos, Wanted(**wanted), skip_tokens, chat)


@pytest.fixture
def long_books(tmp_path: Path) -> str:
    """Three books, with 3 + 0 + 4 prefixes of 10 tokens."""
    books = [chr(97 + i) * n for i, n in enumerate((39, 9, 40))]
    return write_lines(tmp_path / "long.jsonl", books)


def test_prefixes_are_the_complete_pieces_of_all_of_a_text(long_books: str) -> None:
    work = build(long_books, num_prompts=7)
    assert work.num_available == 7  # 39 tokens: the last 9 are dropped; 40 tokens: none are
    assert sorted(work.sources) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    for (book, _), prompt in zip(work.sources, work.prompts, strict=True):
        assert prompt == (BOS, *[97 + book] * 9)
    assert (work.dataset, work.skip_tokens, work.seed) == ("long.jsonl", 0, 0)


def test_bos_overwrites_a_token_or_nothing(long_books: str) -> None:
    with_bos = build(long_books)
    without = build(long_books, bos=None)
    assert {p[0] for p in with_bos.prompts} == {BOS}
    assert all(p[0] == p[1] != BOS for p in without.prompts)
    assert [p[1:] for p in with_bos.prompts] == [p[1:] for p in without.prompts]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    prefix_len=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_order_is_the_seeded_permutation_of_the_sorted_pieces(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], prefix_len: int, seed: int
) -> None:
    texts = ["".join(chr(200 + i) for i in range(n)) for n in lengths]
    dataset = write_lines(tmp_path_factory.mktemp("books") / "b.jsonl", texts)
    expected = [(b, c) for b, n in enumerate(lengths) for c in range(n // prefix_len)]
    random.Random(seed).shuffle(expected)
    if not expected:
        return
    count = (len(expected) + 1) // 2
    work = build(dataset, bos=None, prefix_len=prefix_len, num_prompts=count, seed=seed)
    assert list(work.sources) == expected[:count]
    for (_, chunk), prompt in zip(work.sources, work.prompts, strict=True):
        assert list(prompt) == [200 + chunk * prefix_len + i for i in range(prefix_len)]


def test_hash_sees_tokens_and_boundaries_on_any_platform() -> None:
    hashes = [
        module._hash_prompts(p)
        for p in (((1, 2), (3, 4)), ((1, 2), (3, 5)), ((1, 2, 3, 4),), ((3, 4), (1, 2)))
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == "1cbecf025d1c00029ea15f0e5d6ade68509f064ea9572f2593f4eeb7d78cd0e7"


def test_too_few_prefixes(long_books: str) -> None:
    message = "--dataset long.jsonl holds 7 prefixes of --prefix_len 10 tokens; 8 are needed (--B"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(long_books, num_prompts=8)


def test_a_text_with_few_prefixes_gives_whole_batches(long_books: str) -> None:
    """Of its seven prefixes, where the number of batches was not given."""
    for batch, count in ((3, 6), (2, 6), (7, 7), (4, 4)):
        work = build(long_books, num_prompts=5 * batch, batch=batch)
        assert work == build(long_books, num_prompts=count) and work.num_available == 7
    assert len(build(long_books, num_prompts=5, batch=1).prompts) == 5
    with pytest.raises(ValueError, match=r"holds 7 prefixes .*; 8 are needed"):
        build(long_books, num_prompts=40, batch=8)


@pytest.mark.parametrize(
    ("dataset", "skip_tokens", "skipped", "available"),
    [
        ("demo", None, 0, 804),
        ("demo", 8005, 8005, 4),
        ("recall:pg19", None, 8000, 4),
        ("pg19", None, 8000, 4),
        ("pg19", 0, 0, 804),
        ("pg19", 7995, 7995, 5),
    ],
)
def test_only_of_pg19_the_front_matter_is_skipped_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    dataset: str,
    skip_tokens: int | None,
    skipped: int,
    available: int,
) -> None:
    books = [("f" * 8000 + "x" * 45, None)]
    monkeypatch.setattr(module, "read_categorized_books", lambda dataset, most: books)
    monkeypatch.setattr(module, "recall_prompts", lambda prompts, *_: (prompts, None))
    work = build(dataset, skip_tokens=skip_tokens)
    assert (work.dataset, work.skip_tokens, work.num_available) == (dataset, skipped, available)
    if skipped == 8000:
        assert all(set(prompt[1:]) == {ord("x")} for prompt in work.prompts)


def test_shorter_prefixes_are_the_beginnings_of_those_that_they_are_cut_from(
    long_books: str,
) -> None:
    """For contexts that share a prefill: the same places of the same books, BOS included."""
    whole = build(long_books, prefix_len=20, num_prompts=3)
    for length in (7, 20):
        cut = build(long_books, prefix_len=length, num_prompts=3, cut_from=20)
        assert cut.prompts == tuple(prompt[:length] for prompt in whole.prompts)
        assert (cut.sources, cut.num_available) == (whole.sources, whole.num_available)
    assert build(long_books, prefix_len=7, num_prompts=3).num_available != whole.num_available


def test_prefixes_have_the_categories_of_their_books(tmp_path: Path) -> None:
    path = tmp_path / "kinds.jsonl"
    books = [
        {"text": letter * 40, "category": name} for letter, name in (("a", "code"), ("b", None))
    ]
    path.write_text("".join(f"{json.dumps(book)}\n" for book in books))
    work = build(str(path), prefix_len=10, num_prompts=8)
    assert work.categories is not None and set(work.categories) == {"code", None}
    for prompt, category in zip(work.prompts, work.categories, strict=True):
        assert set(prompt[1:]) == {ord("a" if category == "code" else "b")}
    assert work.first(3).categories == work.categories[:3]
    halves = [set(work.categories[place : place + 2]) for place in range(0, 8, 2)]
    assert halves == [{"code", None}] * 4, "they take turns"
    path.write_text(json.dumps({"text": "a" * 40, "category": 3}))
    with pytest.raises(ValueError, match="has no 'category' that is a string"):
        build(str(path), prefix_len=10, num_prompts=1)


def test_a_skip_is_said_where_it_leaves_too_few(long_books: str) -> None:
    message = "holds 5 prefixes of --prefix_len 10 tokens after the first 10 of each text"
    with pytest.raises(ValueError, match=message):
        build(long_books, num_prompts=8, skip_tokens=10)
    with pytest.raises(ValueError, match=r"--skip_tokens 5 does nothing with --dataset ruler:vt"):
        build("ruler:vt", skip_tokens=5)


def test_more_books_are_read_while_prefixes_are_too_few(tmp_path: Path) -> None:
    num_books = ENOUGH_BOOKS + 30
    path = write_lines(tmp_path / "short.jsonl", ["x" * 12] * num_books)
    assert build(path).num_available == ENOUGH_BOOKS
    assert build(path, num_prompts=num_books).num_available == num_books


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
    path.write_text("".join(chr(0x4E00 + i) for i in range(2000)))
    return str(path)


def build_recall(dataset: str, bos: int | None = BOS, length: int = 400, seed: int = 0) -> Workload:
    return build_workload(dataset, Characters(), bos, Wanted(length, 4, seed, gen_len=30))


def test_recall_is_the_same_prefixes_of_books_with_a_cue_at_the_end(tmp_path: Path) -> None:
    plain = build_recall(book(tmp_path))
    work = build_recall(f"recall:{book(tmp_path)}")
    assert (work.dataset, work.sources) == ("recall:book.txt", plain.sources)
    assert (work.num_available, work.skip_tokens) == (5, 0)
    assert work.sha256 != plain.sha256
    assert [p[:-50] for p in work.prompts] == [p[:-50] for p in plain.prompts]
    assert work.answers is not None
    for prompt, answer in zip(work.prompts, work.answers, strict=True):
        assert isinstance(answer, Continuation)
        at = prompt.index(prompt[-1])  # the first position of the cue's last token
        assert prompt[at + 1 : at + 31] == answer.token_ids


def test_recall_takes_the_demo_text_unless_told_otherwise() -> None:
    work = build_recall("recall", length=200)
    assert work.dataset == "recall:demo" and work == build_recall("recall:demo", length=200)


def test_recall_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    least = LEAST_PREFIX
    message = f"--prefix_len {least - 1} is too short for --dataset recall; .* at least {least}$"
    with pytest.raises(ValueError, match=message):
        build_recall("recall", length=least - 1)
    for name in ("", "verse"):
        with pytest.raises(ValueError, match=f"--dataset '{name}' is not known; choose from demo"):
            build_recall(f"recall:{name}")
    with pytest.raises(ValueError, match="cannot be read"):
        build_recall(f"recall:{tmp_path / 'none.txt'}")


def test_a_corpus_is_text_or_the_tokens_of_earlier_runs(tmp_path: Path) -> None:
    tokenizer = Characters()
    text = tmp_path / "book.txt"
    tokens = tmp_path / "tokens.jsonl"
    text.write_text("The sea was calm.")
    assert encode_corpus(str(text), tokenizer, 128) == (*tokenizer.encode("The sea was calm."),)
    tokens.write_text('{"prompt_ids": [5, 6], "output_ids": [7]}\n{"prompt_ids": [8]}\n')
    assert encode_corpus(str(tokens), tokenizer, 9) == (5, 6, 7, 8)
    with pytest.raises(ValueError, match=r"token ids from 5 to 8 are of another tokenizer"):
        encode_corpus(str(tokens), tokenizer, 8)
    for name, content in (
        ("none.txt", None),
        ("bad.jsonl", '{"prompt_ids": [null]}'),
        ("empty.txt", ""),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"^--lookup_corpus \S*{name}: [^\n]+$"):
            encode_corpus(str(tmp_path / name), tokenizer, 9)
    message = "--lookup_corpus 'verse' is not known; choose from demo, pg19, a folder, or"
    with pytest.raises(ValueError, match=message):  # it takes no prompts that are made
        encode_corpus("verse", tokenizer, 9)
