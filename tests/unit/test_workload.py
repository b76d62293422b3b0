"""Workload: the choice and order of prefixes, and the error if there are too few.

The tokenizer is a fake with one id per character, so that expected tokens can be written down.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.workload import workload as module
from magicdec.workload.workload import SKIP_TOKENS, Workload, build_workload

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


def build(dataset: str, bos: int | None = BOS, **sizes: int) -> Workload:
    defaults = {"prefix_len": 10, "num_prompts": 4, "seed": 0}
    return build_workload(dataset, Characters(), bos, **(defaults | sizes))


@pytest.fixture
def long_books(tmp_path: Path) -> str:
    """Three books, with 3 + 0 + 4 prefixes of 10 tokens after the front matter."""
    books = ["f" * SKIP_TOKENS + chr(97 + i) * n for i, n in enumerate((39, 9, 40))]
    return write_lines(tmp_path / "long.jsonl", books)


def test_prefixes_are_the_complete_pieces_behind_the_front_matter(long_books: str) -> None:
    work = build(long_books, num_prompts=7)
    assert work.num_available == 7  # 39 tokens: the last 9 are dropped; 40 tokens: none are
    assert sorted(work.sources) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    for (book, _), prompt in zip(work.sources, work.prompts, strict=True):
        assert prompt == (BOS, *[97 + book] * 9)
    assert (work.dataset, work.skip_tokens, work.seed) == ("long.jsonl", SKIP_TOKENS, 0)


def test_bos_overwrites_a_token_or_nothing(long_books: str) -> None:
    with_bos, without = build(long_books), build(long_books, bos=None)
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
    texts = ["f" * SKIP_TOKENS + "".join(chr(200 + i) for i in range(n)) for n in lengths]
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


def test_demo_text_has_no_front_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_books", lambda dataset, max_books: ["x" * 45])
    work = build("demo")
    assert (work.dataset, work.skip_tokens, work.num_available) == ("demo", 0, 4)
    assert work.answers is None
