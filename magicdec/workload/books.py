"""Books: the texts of a named dataset or of a user's file. A reader yields records, each with its
place in the file; a record of a book is an object with a `text`."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from magicdec.workload.prompt_sets import HUB_NAME, PROMPT_SETS, string_at

DEMO_FILE = Path(__file__).parents[1] / "demo" / "text.jsonl.xz"
PG19_REPOSITORY = "emozilla/pg19"

Records = Iterator[tuple[str, Any]]
T = TypeVar("T")


def read_books(dataset: str, max_books: int) -> list[str]:
    """Text of the first `max_books` books of a named dataset or of a file, chosen by its suffix.
    Raises ValueError as `read_values` does."""
    return read_values("--dataset", dataset, max_books, _text_of)


def read_corpus(path: str, max_books: int, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The token ids of each of the first books or records of a corpus for prompt lookup. Raises
    ValueError as `read_values` does."""

    def ids_of(record: Any, place: str) -> list[int]:
        if not isinstance(record, dict) or "prompt_ids" not in record:
            return encode(_text_of(record, place))
        return [int(token) for token in (*record["prompt_ids"], *record.get("output_ids", ()))]

    return read_values("--lookup_corpus", path, max_books, ids_of)


def read_prompts(dataset: str, most: int) -> list[str]:
    """The texts of the first `most` items of a prompt set, of which some may be empty. Raises
    ValueError as `read_values` does."""
    kind, _, name = dataset.partition(":")
    reader, of_hub = FILE_READERS.get(Path(name).suffix.lower()), HUB_NAME.fullmatch(name)
    if reader is not None:
        return _values("--dataset", dataset, reader(Path(name)), most, PROMPT_SETS[kind])
    if of_hub is None:
        raise ValueError(
            f"--dataset {dataset!r} is not known; give {kind}: with a path ending in "
            f"{', '.join(FILE_READERS)}, or with OWNER/NAME or OWNER/NAME:CONFIG of the hub"
        )
    return _values("--dataset", dataset, _read_hub(*of_hub.groups()), most, PROMPT_SETS[kind])


def read_values(
    flag: str, dataset: str, max_books: int, value_of: Callable[[Any, str], T]
) -> list[T]:
    """What `value_of` makes of the first records of a dataset and their places.

    Raises ValueError for an unknown name, a file that is missing, empty or malformed, a record
    without text, and a hub that cannot be reached.
    """
    suffix = Path(dataset).suffix.lower()
    if dataset not in NAMED_READERS and suffix not in FILE_READERS:
        made = ["recall", "ruler:<task>", *(f"{kind}:<set>" for kind in PROMPT_SETS)]
        choices = [*NAMED_READERS, *(made if flag == "--dataset" else ())]
        raise ValueError(
            f"{flag} {dataset!r} is not known; choose from {', '.join(choices)}, "
            f"or a path ending in {', '.join(FILE_READERS)}"
        )
    named = NAMED_READERS.get(dataset)
    records = FILE_READERS[suffix](Path(dataset)) if named is None else named()
    return _values(flag, dataset, records, max_books, value_of)


def _values(
    flag: str, dataset: str, records: Records, most: int, value_of: Callable[[Any, str], T]
) -> list[T]:
    try:
        values = [value_of(record, place) for place, record in islice(records, most)]
    except (OSError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, OSError) and error.strerror:
            reason = f"cannot be read ({error.strerror})"
        raise ValueError(f"{flag} {dataset}: {reason}") from error
    if not values:
        raise ValueError(f"{flag} {dataset}: is empty")
    return values


def _read_demo() -> Records:
    with lzma.open(DEMO_FILE, "rt", encoding="utf-8") as stream:
        yield from _parse_json(stream)


def _read_hub(repository: str, config: str | None = None, split: str | None = None) -> Records:
    """The rows of a data set on the hub, of its first split unless one is named."""
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
    with path.open(encoding="utf-8-sig") as stream:
        yield from _parse_json(stream)


def _parse_json(stream: TextIO) -> Records:
    """The objects of JSON lines, or of one JSON array. Lines that nobody asks for are not read."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        is_array = line.lstrip().startswith("[")
        text = line + stream.read() if is_array else line
        try:
            parsed = json.loads(text.rstrip())  # else errors at the end name the next line
        except json.JSONDecodeError as error:
            at = number + error.lineno - 1
            raise ValueError(f"line {at} is not JSON ({error.msg})") from error
        if is_array:
            yield from ((f"item {index}", record) for index, record in enumerate(parsed))
        else:
            yield f"line {number}", parsed


def _read_parquet(path: Path) -> Records:
    import pyarrow.parquet

    with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
        batches = file.iter_batches(batch_size=16)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _read_txt(path: Path) -> Records:
    if (text := path.read_text(encoding="utf-8-sig")).strip():
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
    return string_at(record, "text", place)
