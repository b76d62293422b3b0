"""Books: the texts of a named dataset or of a user's files. Readers yield records (objects with a
`text`) and their places, as they are asked for."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from magicdec.output.files import MOST_LINE_BYTES, exists, is_folder, open_regular, read_text
from magicdec.workload.json_items import json_items
from magicdec.workload.prompt_sets import (
    HUB_NAME,
    PROMPT_SETS,
    PromptItem,
    category_at,
    category_in,
    sets_of,
    string_at,
)

DEMO_FILE = Path(__file__).parents[1] / "demo" / "text.jsonl.xz"
PG19_REPOSITORY = "emozilla/pg19"

Records = Iterator[tuple[str, Any]]
T = TypeVar("T")


def read_books(dataset: str, most: int) -> Iterator[str]:
    """The texts of at most `most` books of a named dataset, or of files and folders joined by
    commas. Raises ValueError as `read_values`."""
    return (text for text, _ in read_categorized_books(dataset, most))


def read_categorized_books(dataset: str, most: int) -> Iterator[tuple[str, str | None]]:
    """The texts as by `read_books`, each with its `category`, if its record names one."""

    def book_of(record: Any, place: str) -> tuple[str, str | None]:
        return _text_of(record, place), category_at(record, "category", place)

    return read_values("--dataset", dataset, most, book_of)


def read_corpus(path: str, most: int, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """The token ids of each record of a corpus for prompt lookup. Raises ValueError as
    `read_values`."""

    def ids_of(record: Any, place: str) -> list[int]:
        if not isinstance(record, dict) or "prompt_ids" not in record:
            return encode(_text_of(record, place))
        return [int(token) for token in (*record["prompt_ids"], *record.get("output_ids", ()))]

    return read_values("--lookup_corpus", path, most, ids_of)


def read_prompts(dataset: str, most: int) -> list[PromptItem]:
    """The first `most` items of each prompt set of a dataset. Raises ValueError as
    `read_values`."""
    items = list[PromptItem]()
    sets = sets_of(dataset)
    for kind, name in sets:
        for item in _read_set(kind, name, most):
            category = category_in(kind, item.category, len(sets) > 1)
            items.append(replace(item, category=category))
    return items


def _read_set(kind: str, name: str, most: int) -> Iterator[PromptItem]:
    dataset = f"{kind}:{name}"
    reader = FILE_READERS.get(Path(name).suffix.lower())
    hub_match = HUB_NAME.fullmatch(name)
    if reader is not None:
        return _values("--dataset", dataset, reader(Path(name)), most, PROMPT_SETS[kind])
    if hub_match is None:
        raise ValueError(
            f"--dataset {dataset!r} is not known; give {kind}: with a path ending in "
            f"{', '.join(FILE_READERS)}, or with OWNER/NAME or OWNER/NAME:CONFIG of the hub"
        )
    records = _read_hub(*hub_match.groups())
    return _values("--dataset", dataset, records, most, PROMPT_SETS[kind])


def read_values(
    flag: str, dataset: str, most: int, value_of: Callable[[Any, str], T]
) -> Iterator[T]:
    """The values of a dataset's first records, by `value_of` from record and place. Raises
    ValueError for an unknown name, an unreadable or empty file, a record without text, and an
    unreachable hub."""
    named = NAMED_READERS.get(dataset)
    records = _file_records(_files_of(flag, dataset)) if named is None else named()
    return _values(flag, dataset, records, most, value_of)


def names_of(dataset: str) -> list[str]:
    """The names joined by commas; a name that exists as a whole is one."""
    return [dataset] if exists(dataset) else dataset.split(",")


def title_of(dataset: str) -> str:
    """A dataset without its directories. A folder ends in a slash."""
    titles = [
        f"{Path(name).resolve().name}/" if is_folder(name) else Path(name).name
        for name in names_of(dataset)
    ]
    return ",".join(titles)


def _files_of(flag: str, dataset: str) -> list[Path]:
    files = list[Path]()
    for name in names_of(dataset):
        path = Path(name)
        if is_folder(name):
            texts = [p for p in sorted(path.iterdir()) if p.suffix.lower() in FILE_READERS]
            if not texts:
                raise ValueError(
                    f"{flag} {name}: no file of the folder ends in {', '.join(FILE_READERS)}"
                )
            files += texts
        elif path.suffix.lower() in FILE_READERS:
            files.append(path)
        else:
            made = ["recall", "ruler:<task>", f"{'/'.join(PROMPT_SETS)}:<set>"]
            choices = [*NAMED_READERS, *(made if flag == "--dataset" else ())]
            raise ValueError(
                f"{flag} {name!r} is not known; choose from {', '.join(choices)}, a folder, "
                f"or a path ending in {', '.join(FILE_READERS)}"
            )
    return files


def _file_records(files: Sequence[Path]) -> Records:
    for path in files:
        prefix = "" if len(files) == 1 else f"{path.name}: "
        try:
            for place, record in FILE_READERS[path.suffix.lower()](path):
                yield f"{prefix}{place}", record
        except (OSError, ValueError) as error:
            raise ValueError(f"{prefix}{_reason(error)}") from error


def _values(
    flag: str, dataset: str, records: Records, most: int, value_of: Callable[[Any, str], T]
) -> Iterator[T]:
    is_empty = True
    try:
        for place, record in islice(records, most):
            yield value_of(record, place)
            is_empty = False
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{flag} {dataset}: {_reason(error)}") from error
    if is_empty:
        raise ValueError(f"{flag} {dataset}: is empty")


# The prompt set of items with a key that texts do not have.
CHATS = {"conversations": "sharegpt", "messages": "messages", "turns": "mt_bench"}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_demo() -> Records:
    with lzma.open(DEMO_FILE, "rt", encoding="utf-8") as stream:
        yield from json_items(stream)


def _read_hub(repository: str, config: str | None = None, split: str | None = None) -> Records:
    """The rows of a data set on the hub, by default of its first split."""
    try:
        import datasets
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it would print a line for each retry
        rows = datasets.load_dataset(repository, config, split=split, streaming=True)
        rows = rows if split else next(iter(rows.values()))
        yield from ((f"row {number}", row) for number, row in enumerate(rows))
    except Exception as error:  # the package may be missing; its layers share no narrower base
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"{repository} on the Hugging Face hub cannot be read ({type(error).__name__}: "
            f"{lines[0]}); give the path of a local copy instead"
        ) from error


def _read_json(path: Path) -> Records:
    with TextIOWrapper(open_regular(path), encoding="utf-8-sig") as stream:
        yield from json_items(stream)


def _read_parquet(path: Path) -> Records:
    import pyarrow.parquet

    with open_regular(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        batches = file.iter_batches(batch_size=16)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _read_txt(path: Path) -> Records:
    if (text := read_text(path, MOST_LINE_BYTES)).strip():
        yield "the file", {"text": text}


NAMED_READERS: dict[str, Callable[[], Records]] = {
    "demo": _read_demo,
    "pg19": partial(_read_hub, PG19_REPOSITORY, split="test"),
}
FILE_READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _text_of(record: object, place: str) -> str:
    if isinstance(record, dict) and "text" not in record and (found := CHATS.keys() & record):
        named = ", ".join(f"{CHATS[key]}:FILE (items with {key!r})" for key in CHATS)
        raise ValueError(
            f"{place} has no 'text', but {' and '.join(map(repr, sorted(found)))}; a file of chats "
            f"is named {named}"
        )
    return string_at(record, "text", place)
