#!/usr/bin/env python3
"""Writes texts of several kinds for `magicdec acceptance`, one JSON line for each with its `text`,
and its kind as `category`: source code, headers, documentation, message catalogues and data, which
the standard library and installed packages have; and of given books their prose, and their dialogue
alone. Nothing of it is committed: the records have the hash of the prompts.

    python scripts/dev/kinds_of_text.py kinds.jsonl --books books.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

LEAST_CHARACTERS = 150_000  # of a text, so that it holds the longest context
MOST_CHARACTERS = 160_000  # so that kinds have about equal shares
NUM_TEXTS = 8  # of each kind
QUOTES = ('"', "\u201c")
# By kind: under which root, and the endings of names. METADATA holds the README of a package.
KINDS = {
    "python": ("stdlib", (".py",)),
    "cpp": ("platlib", (".h", ".hpp", ".cuh")),
    "docs": ("purelib", (".rst", ".md", "METADATA")),
    "messages": ("purelib", (".po",)),
    "json": ("purelib", (".json",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--books", type=Path, help="a file of JSON lines with a `text` each")
    args = parser.parse_args()
    found = {kind: list(texts_of_files(*places)) for kind, places in KINDS.items()}
    if args.books is not None:
        books = [json.loads(line)["text"] for line in args.books.read_text().splitlines()]
        found["books"] = books
        found["dialogue"] = [spoken(book) for book in books]
    lines = []
    for kind, texts in found.items():
        long = [text for text in texts if len(text) >= LEAST_CHARACTERS][:NUM_TEXTS]
        lines += [{"text": text[:MOST_CHARACTERS], "category": kind} for text in long]
        print(f"{kind}: {len(long)} texts")
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def texts_of_files(root: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Files of neighbouring folders one after another, until they are long enough. The order of
    these texts is drawn, with a seed."""
    folder = Path(sysconfig.get_path(root))
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings)
    )
    if root == "stdlib":
        paths = [path for path in paths if "site-packages" not in path.parts]
    texts = list(joined(paths))
    random.Random(0).shuffle(texts)
    yield from texts


def joined(paths: Iterable[Path]) -> Iterator[str]:
    parts: list[str] = []
    length = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        parts.append(text)
        length += len(text)
        if length >= LEAST_CHARACTERS:
            yield "\n".join(parts)
            parts = []
            length = 0


def spoken(book: str) -> str:
    """The paragraphs of a book that begin with speech."""
    paragraphs = (" ".join(part.split()) for part in book.split("\n\n"))
    return "\n".join(part for part in paragraphs if part.startswith(QUOTES))


if __name__ == "__main__":
    main()
