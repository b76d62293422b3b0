"""Books: every file type, every bad file, the packaged text and the hub."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from magicdec.workload import books, json_items
from magicdec.workload.prompt_sets import PROMPT_SETS


def read_books(dataset: str, most: int) -> list[str]:
    return list(books.read_books(dataset, most))


BOOKS = ("first book", "second book, é\n漢", "third")


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": b, "url": "u"}) + "\n" for b in BOOKS))


def write_parquet(path: Path) -> None:
    table = pyarrow.table({"url": ["u"] * len(BOOKS), "text": [*BOOKS]})
    pyarrow.parquet.write_table(table, path, row_group_size=1)


def write_array(path: Path) -> None:
    path.write_text("\n" + json.dumps([{"text": b} for b in BOOKS], indent=1))


def write_marked(path: Path) -> None:
    """Write JSON lines with blank lines, a byte-order mark and unescaped text."""
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
    write_lines(path)
    path.write_text(path.read_text() + "not JSON\n")
    assert read_books(str(path), 3) == [*BOOKS]
    with pytest.raises(ValueError, match="line 4 is not JSON"):
        read_books(str(path), 4)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("b.jsonl", b"", ": is empty"),
        ("b.txt", b" \n", ": is empty"),
        ("b.jsonl", b'{"text": "a"}\n\n{"text"\n', ": line 3 is not JSON (Expecting ':'"),
        ("b.json", b'\n[{"text": "a"},\n]', ": line 3 is not JSON ("),
        ("b.jsonl", b'{"text": "a"}\n{"body": "b"}', ": line 2 has no 'text' that is a string"),
        ("b.json", b'[{"text": "a"}, 7]', ": item 1 has no 'text'"),
        (
            "b.json",
            b'[{"conversations": []}]',
            ": item 0 has no 'text', but 'conversations'; a file "
            "of chats is named sharegpt:FILE (items with 'conversations'), messages:FILE (",
        ),
        ("b.jsonl", b'{"messages": []}', ": line 1 has no 'text', but 'messages'; a file of chats"),
        ("b.jsonl", b'{"text": "\\ud800"}', ": line 1: 'text' is not valid Unicode ("),
        ("b.txt", b"caf\xe9", ": 'utf-8' codec can't decode byte 0xe9"),
        ("b.parquet", b"", ": Parquet file size is 0 bytes"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"--dataset {tmp_path / name}{message}")) as e:
        read_books(str(tmp_path / name), 50)
    assert "\n" not in str(e.value)


def test_a_folder_has_all_its_texts_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("last")
    (tmp_path / "notes.md").write_text("no text of the dataset")
    write_lines(tmp_path / "b.jsonl")
    write_parquet(tmp_path / "a.parquet")
    assert read_books(str(tmp_path), 50) == [*BOOKS, *BOOKS, "last"]
    both = f"{tmp_path / 'c.txt'},{tmp_path}"
    assert read_books(both, 50) == ["last", *BOOKS, *BOOKS, "last"]
    assert books.title_of(both) == f"c.txt,{tmp_path.name}/"
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "a"}) + '\n{"body": 1}\n')
    with pytest.raises(ValueError, match=f"--dataset {tmp_path}: b.jsonl: line 2 has no 'text'"):
        read_books(str(tmp_path), 50)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--dataset {tmp_path}: no file of the folder ends in"):
        read_books(str(tmp_path), 50)


def test_a_file_whose_name_has_a_comma_is_one(tmp_path: Path) -> None:
    (tmp_path / "a,b.txt").write_text("one")
    assert read_books(str(tmp_path / "a,b.txt"), 50) == ["one"]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_items_of_an_array_are_parsed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Wherever what was read is cut, also inside of numbers, escapes and words."""
    monkeypatch.setattr(json_items, "CHUNK", chunk)
    path = tmp_path / "b.json"
    values = [{"text": 'é\u2028 \\ " ] ['}, 12345, [], [[1.5e-3, None]], True, {}]
    for text in (json.dumps(values), "\n \n" + json.dumps(values, indent=1) + "\n", "[]", " [ ]\n"):
        path.write_text(text)
        with path.open() as stream:
            assert [value for _, value in json_items.json_items(stream)] == json.loads(text)
    for text in ("[1 2]", "[1,]", "[1", '["a', "[1] 2", "[tru]", "[,]"):
        path.write_text("\n" + text)
        with path.open() as stream, pytest.raises(ValueError, match=r"^line 2 is not JSON \("):
            list(json_items.json_items(stream))


def test_items_of_an_array_that_nobody_asks_for_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_items, "CHUNK", 16)
    (tmp_path / "b.json").write_text(f'[{{"text": "a"}}, {" " * 99} no JSON')
    assert read_books(str(tmp_path / "b.json"), 1) == ["a"]


@pytest.mark.parametrize("values", [{"body": ["a"]}, {"text": [1]}, {"text": ["a", None]}])
def test_bad_parquet_columns(tmp_path: Path, values: dict[str, list[Any]]) -> None:
    path = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    with pytest.raises(ValueError, match=f"--dataset {path}.*'text'"):
        read_books(str(path), 50)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    sets = f"{'/'.join(PROMPT_SETS)}:<set>"
    paths = "a folder, or a path ending in .jsonl, .json, .parquet, .txt"
    choices = f"choose from demo, pg19, recall, ruler:<task>, {sets}, {paths}"
    for name in ("pg20", "books.csv", ""):
        with pytest.raises(
            ValueError, match=re.escape(f"--dataset {name!r} is not known; {choices}")
        ):
            read_books(name, 50)
    for suffix in books.FILE_READERS:
        path = tmp_path / f"b{suffix}"
        with pytest.raises(ValueError, match=f"--dataset {path}: cannot be read \\(No such file"):
            read_books(str(path), 50)


def test_pg19_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(repository: str, config: None, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (repository, config, split, streaming) == ("emozilla/pg19", None, "test", True)
        return [{"text": b} for b in BOOKS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_books("pg19", 2) == [*BOOKS[:2]]

    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach 'emozilla/pg19' on the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"ConnectionError: Couldn't .* give the path of a") as e:
        read_books("pg19", 2)
    assert "\n" not in str(e.value)


def test_pg19_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else needs it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"ModuleNotFoundError: .*datasets.*; give the path of a"):
        read_books("pg19", 2)
    assert read_books("demo", 1)
