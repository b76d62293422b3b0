"""Books: the texts of a named dataset or of a user's file."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable
from functools import partial
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

DEMO_FILE = "demo/text.jsonl.xz"  # inside the package
PG19_REPOSITORY = "emozilla/pg19"


def check_positive(*sizes: tuple[str, int]) -> None:
    for flag, value in sizes:
        if value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")


def read_books(dataset: str, max_books: int) -> list[str]:
    """Text of the first `max_books` books of a named dataset or of a file, chosen by its suffix.

    Raises ValueError for an unknown name, a file that is missing, empty or malformed, a record
    without text, and a hub that cannot be reached.
    """
    check_positive(("max_books", max_books))
    read_file = _reader_of(dataset)
    try:
        books = read_file(max_books)
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset {dataset}: is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ValueError(f"--dataset {dataset}: cannot be read ({_reason(error)})") from error
    if not books:
        raise ValueError(f"--dataset {dataset}: is empty; it holds no books")
    return books


def _reader_of(dataset: str) -> Callable[[int], list[str]]:
    suffix = Path(dataset).suffix.lower()
    if dataset in NAMED_READERS:
        return NAMED_READERS[dataset]
    if suffix in FILE_READERS:
        return partial(FILE_READERS[suffix], Path(dataset))
    raise ValueError(
        f"--dataset {dataset!r} is not known; choose from {', '.join(NAMED_READERS)}, "
        f"recall, ruler:<task>, or a path ending in {', '.join(FILE_READERS)}"
    )


def _read_demo(max_books: int) -> list[str]:
    packaged = resources.files("magicdec").joinpath(DEMO_FILE)
    place = f"--dataset demo (magicdec/{DEMO_FILE})"
    if not packaged.is_file():
        raise ValueError(f"{place}: is missing from this installation; give the path of a file")
    try:
        text = lzma.decompress(packaged.read_bytes()).decode("utf-8")
    except lzma.LZMAError as error:
        raise ValueError(f"{place}: is not a whole xz file ({_reason(error)})") from error
    return _parse_json_books(io.StringIO(text), place, max_books)


def _read_pg19(max_books: int) -> list[str]:
    import datasets

    place = f"--dataset pg19 ({PG19_REPOSITORY} on the Hugging Face hub)"
    try:
        records = datasets.load_dataset(PG19_REPOSITORY, split="test", streaming=True)
        rows = list(records.take(max_books))
    except Exception as error:  # hub, HTTP and parquet layers share no narrower base class
        reason = f"cannot be read ({type(error).__name__}: {_reason(error)})"
        raise ValueError(f"{place}: {reason}; give the path of a local copy instead") from error
    return [_text_of(row, f"{place}, book {i}") for i, row in enumerate(rows)]


def _read_json(path: Path, max_books: int) -> list[str]:
    with path.open(encoding="utf-8-sig") as stream:
        return _parse_json_books(stream, f"--dataset {path}", max_books)


def _parse_json_books(stream: TextIO, place: str, max_books: int) -> list[str]:
    """Texts of JSON lines, or of one JSON array. Lines after the last book needed are not read."""
    books: list[str] = []
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        if not books and line.lstrip().startswith("["):
            records = _parse_json(line + stream.read(), place, number)
            return [_text_of(r, f"{place}, item {i}") for i, r in enumerate(records[:max_books])]
        books.append(_text_of(_parse_json(line, place, number), f"{place}, line {number}"))
        if len(books) == max_books:
            break
    return books


def _parse_json(text: str, place: str, first_line: int) -> Any:
    try:
        return json.loads(text.rstrip())  # else errors at the end name the next line
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{place}: line {line} is not JSON ({error.msg})") from error


def _read_parquet(path: Path, max_books: int) -> list[str]:
    import pyarrow.parquet

    place = f"--dataset {path}"
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise ValueError(f"{place}: no 'text' column; it has {', '.join(columns)}")
            batches = file.iter_batches(batch_size=max_books, columns=["text"])
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            numbered = enumerate(islice(rows, max_books))
            return [_text_of(row, f"{place}, row {number}") for number, row in numbered]
    except pyarrow.ArrowException as error:
        raise ValueError(f"{place}: is not a parquet file ({_reason(error)})") from error


def _read_txt(path: Path, max_books: int) -> list[str]:
    text = path.read_text(encoding="utf-8-sig")
    return [text] if text.strip() else []


NAMED_READERS: dict[str, Callable[[int], list[str]]] = {"demo": _read_demo, "pg19": _read_pg19}
FILE_READERS: dict[str, Callable[[Path, int], list[str]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _text_of(record: object, place: str) -> str:
    if not isinstance(record, dict) or "text" not in record:
        raise ValueError(f"{place}: has no 'text' field")
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f"{place}: 'text' is {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")  # a lone surrogate, valid in JSON, cannot be tokenized
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: 'text' is not valid Unicode ({error.reason})") from error
    return text


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
