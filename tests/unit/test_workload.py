"""Workload: which tokens become prefixes, in which order, from which files, and every bad input.

The tokenizer is a stand-in, one id a character, so that expected tokens can be written down.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.bench import workload as module
from magicdec.bench.workload import SKIP_TOKENS, Workload, build_workload, read_books

BOS = 1_000_000
BOOKS = ("first book", "second book, é\n漢", "third")


class Characters:
    """One id a character."""

    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def vocabulary_hash(self) -> str:
        return "characters"


def write_lines(path: Path, books: Sequence[str] = BOOKS) -> str:
    path.write_text("".join(json.dumps({"text": b, "url": "u"}) + "\n" for b in books))
    return str(path)


def build(dataset: str, bos: int | None = BOS, **sizes: int) -> Workload:
    defaults = {"prefix_len": 10, "num_prompts": 4, "seed": 0}
    return build_workload(dataset, Characters(), bos, **(defaults | sizes))


@pytest.fixture
def long_books(tmp_path: Path) -> str:
    """Three books; behind the front matter they hold 3 + 0 + 4 prefixes of 10 tokens."""
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


def test_seed_decides_the_order(long_books: str) -> None:
    assert build(long_books) == build(long_books)
    assert build(long_books, seed=1).sources != build(long_books).sources
    assert build(long_books, seed=1).sha256 != build(long_books).sha256


def test_hash_sees_tokens_and_boundaries_on_any_platform() -> None:
    hashes = [
        module._hash_prompts(p)
        for p in (((1, 2), (3, 4)), ((1, 2), (3, 5)), ((1, 2, 3, 4),), ((3, 4), (1, 2)))
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == "1cbecf025d1c00029ea15f0e5d6ade68509f064ea9572f2593f4eeb7d78cd0e7"


def test_describe_is_json_without_the_prompts(long_books: str) -> None:
    record = json.loads(json.dumps(build(long_books).describe()))
    kept = {"dataset", "num_available", "skip_tokens", "seed", "sources", "sha256"}
    assert set(record) == kept | {"num_prompts", "prefix_len"}
    assert (record["num_prompts"], record["prefix_len"], len(record["sources"])) == (4, 10, 4)


def test_too_few_prefixes(long_books: str) -> None:
    message = "--dataset long.jsonl holds 7 prefixes of --prefix_len 10 tokens; 8 are needed (--B"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(long_books, num_prompts=8)
    with pytest.raises(ValueError, match="holds 3 prefixes"):
        build(long_books, max_books=1)


def test_sizes_below_one(long_books: str) -> None:
    flags = {"prefix_len": "--prefix_len", "num_prompts": "--B x --num_batches"}
    for name, flag in (flags | {"max_books": "max_books"}).items():
        with pytest.raises(ValueError, match=f"{flag} is 0; it must be at least 1"):
            build(long_books, **{name: 0})


def write_parquet(path: Path) -> None:
    table = pyarrow.table({"url": ["u"] * len(BOOKS), "text": [*BOOKS]})
    pyarrow.parquet.write_table(table, path, row_group_size=1)


def write_array(path: Path) -> None:
    path.write_text("\n" + json.dumps([{"text": b} for b in BOOKS], indent=1))


def write_marked(path: Path) -> None:
    """Blank lines, a byte-order mark and text that is not escaped."""
    lines = "\n\n".join(json.dumps({"text": b}, ensure_ascii=False) for b in BOOKS)
    path.write_text(lines, encoding="utf-8-sig")


@pytest.mark.parametrize("write", [write_lines, write_marked, write_array, write_parquet])
def test_file_types(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    for name in ("b.parquet",) if write is write_parquet else ("b.jsonl", "b.json", "b.JSON"):
        write(tmp_path / name)
        for count in (1, 2, 3, 50):
            assert tuple(read_books(str(tmp_path / name), count)) == BOOKS[:count]


def test_txt_is_one_book(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("é\n\nx\n", encoding="utf-8-sig")
    assert read_books(str(tmp_path / "b.txt"), 50) == ["é\n\nx\n"]


def test_lines_after_the_last_book_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(Path(write_lines(path)).read_text() + "not JSON\n")
    assert read_books(str(path), 3) == [*BOOKS]
    with pytest.raises(ValueError, match="line 4 is not JSON"):
        read_books(str(path), 4)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("b.jsonl", b"", ": is empty; it holds no books"),
        ("b.json", b"[]", ": is empty; it holds no books"),
        ("b.txt", b" \n", ": is empty; it holds no books"),
        ("b.jsonl", b'{"text": "a"}\n\n{"text"\n', ": line 3 is not JSON (Expecting ':'"),
        ("b.json", b'\n[{"text": "a"},\n]', ": line 3 is not JSON ("),
        ("b.jsonl", b'{"text": "a"}\n{"body": "b"}', ", line 2: has no 'text' field"),
        ("b.json", b'[{"text": "a"}, 7]', ", item 1: has no 'text' field"),
        ("b.jsonl", b'{"text": null}', ", line 1: 'text' is NoneType, not a string"),
        ("b.jsonl", b'{"text": "\\ud800"}', ", line 1: 'text' is not valid Unicode ("),
        ("b.txt", b"caf\xe9", ": is not UTF-8 text ("),
        ("b.parquet", b"", ": is not a parquet file ("),
        ("b.parquet", b"PAR1 and no more", ": is not a parquet file ("),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"--dataset {tmp_path / name}{message}")) as e:
        read_books(str(tmp_path / name), 50)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("values", [{"body": ["a"]}, {"text": [1]}, {"text": ["a", None]}])
def test_bad_parquet_columns(tmp_path: Path, values: dict[str, list[Any]]) -> None:
    path = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    with pytest.raises(ValueError, match=f"--dataset {path}.*'text'"):
        read_books(str(path), 50)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    choices = "choose from demo, pg19, or a path ending in .jsonl, .json, .parquet, .txt"
    for name in ("pg20", "books.csv", ""):
        with pytest.raises(
            ValueError, match=re.escape(f"--dataset {name!r} is not known; {choices}")
        ):
            read_books(name, 50)
    for suffix in module.FILE_READERS:
        path = tmp_path / f"b{suffix}"
        with pytest.raises(ValueError, match=f"--dataset {path}: cannot be read \\(No such file"):
            read_books(str(path), 50)


def test_demo_is_packaged_and_has_no_front_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"demo/text.jsonl.xz\): is missing from this install"):
        read_books("demo", 50)
    (tmp_path / "demo").mkdir()
    packed = lzma.compress(json.dumps({"text": "x" * 45}).encode())
    (tmp_path / module.DEMO_FILE).write_bytes(packed)
    work = build("demo")
    assert (work.dataset, work.skip_tokens, work.num_available) == ("demo", 0, 4)
    (tmp_path / module.DEMO_FILE).write_bytes(packed[:-9])
    with pytest.raises(ValueError, match="is not a whole xz file"):
        read_books("demo", 50)


def test_pg19_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(repository: str, split: str, streaming: bool) -> SimpleNamespace:
        assert (repository, split, streaming) == ("emozilla/pg19", "test", True)
        return SimpleNamespace(take=lambda count: [{"text": b} for b in BOOKS[:count]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_books("pg19", 2) == [*BOOKS[:2]]

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach 'emozilla/pg19' on the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"ConnectionError: Couldn't .* give the path of a") as e:
        read_books("pg19", 2)
    assert "\n" not in str(e.value)
