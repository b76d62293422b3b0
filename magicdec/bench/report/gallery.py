"""The gallery: one page of many machines' records, which needs no network and nothing beside it,
and to which others add a folder of records. `gallery.html` is the template.

A record is read as text of a stranger: nothing of it is trusted to be short, or of the right type.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from magicdec.bench.report.gallery_rows import (
    GalleryRow,
    GalleryTable,
    RecordSource,
    gallery_tables,
    pass_row,
    run_row,
)
from magicdec.bench.report.template import render
from magicdec.bench.serving.record import ServingRecord
from magicdec.output.console import printable
from magicdec.output.files import is_folder
from magicdec.records.reading import Unreadable, numbered_records
from magicdec.records.record import Record, RunRecord

SUFFIXES = (".jsonl", ".jsonl.gz")  # of the files of records in a folder
MOST_FILE_BYTES = 64 << 20
MOST_RECORDS = 5000  # of a page
ON_PAGE = (RunRecord, ServingRecord)


@dataclass
class Gallery:
    """The tables of a gallery, and how many records were left out of them, by reason."""

    tables: list[GalleryTable]
    num_records: int
    num_doubted: int
    left_out: Counter[str] = field(default_factory=Counter)


def make_gallery(places: Sequence[Path], is_strict: bool) -> Gallery:
    """The gallery of the records in these folders and files. Raises ValueError, naming file and
    line, for what `numbered_records` refuses, and if there is no record."""
    left_out = Counter[str]()
    rows = [gallery_row(*each) for each in placed_records(places, is_strict, left_out)]
    if not rows:
        names = ", ".join(map(str, places))
        reasons = "".join(f"; {count} {why}" for why, count in left_out.items())
        raise ValueError(f"{names}: there is no record of a run or of served requests{reasons}")
    tables = gallery_tables(rows)
    return Gallery(tables, len(rows), sum(bool(row.doubt) for row in rows), left_out)


def placed_records(
    places: Sequence[Path], is_strict: bool, left_out: Counter[str]
) -> Iterator[tuple[RecordSource, RunRecord | ServingRecord]]:
    """Yields the records of runs and of served requests, and counts the others in `left_out`. A
    file of a folder in which nothing is a record, such as a log, is said and left out, unless
    `is_strict`."""
    count = 0
    for place, path, name in files_of_all(places):
        try:
            for line, record in numbered_records(path, Record, is_strict):
                if not isinstance(record, ON_PAGE):
                    left_out[f"of kind {record.kind}"] += 1
                elif record.seal is not None:
                    left_out["of the gate, whose times are those of runs that keep a log"] += 1
                elif count == MOST_RECORDS:
                    raise ValueError(
                        f"{path}:{line}: a page has at most {MOST_RECORDS:,} records, and this is "
                        "one more; make several pages"
                    )
                else:
                    count += 1
                    yield RecordSource(path, name, line), record
        except Unreadable as error:
            if is_strict or place == path:
                raise
            print(f"{printable(str(error))}; this file is left out", file=sys.stderr)


def files_of_all(places: Sequence[Path]) -> Iterator[tuple[Path, Path, str]]:
    """Yields (place, file, name of the file on the page). Raises ValueError for a folder without a
    file of records, a file that is too large, and one that two places have."""
    found = dict[Path, Path]()
    for place in places:
        files = [place]
        if is_folder(place):
            files = files_below(place)
            if not files:
                raise ValueError(f"{place}: no file of records in it, {' or '.join(SUFFIXES)}")
        top = place.resolve().parent
        for path in files:
            real = path.resolve()
            if real in found:
                raise ValueError(f"{path}: {found[real]} is the same file; leave one of them out")
            found[real] = path
            check_size(path)
            yield place, path, real.relative_to(top).as_posix()


def files_below(folder: Path) -> list[Path]:
    """The files of records in a folder and below it, sorted, without links."""
    return sorted(
        Path(directory, name)
        for directory, _, names in os.walk(folder)
        for name in names
        if name.endswith(SUFFIXES) and not Path(directory, name).is_symlink()
    )


def check_size(path: Path) -> None:
    """Raises ValueError for a file that no gallery has room for; what else is wrong with it, its
    reader says."""
    try:
        size = path.stat().st_size
    except OSError:
        return
    if size > MOST_FILE_BYTES:
        raise ValueError(
            f"{path}: it has {size >> 20} MB, and a file of a gallery at most "
            f"{MOST_FILE_BYTES >> 20} MB; compress it (.jsonl.gz), or leave runs out"
        )


def gallery_row(source: RecordSource, record: RunRecord | ServingRecord) -> GalleryRow:
    """The row of a record. Raises ValueError, naming file and line, for one that contradicts
    itself."""
    try:
        if isinstance(record, RunRecord):
            return run_row(source, record)
        return pass_row(source, record)
    # A config has no schema, and samples may not fit each other: a stranger may have made them.
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        MemoryError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(printable(f"{type(error).__name__}: {error}").split())
        raise ValueError(
            f"{source.path}:{source.line}: its config or its samples are not those of a record "
            f"({reason[:200]}); leave the line out"
        ) from None


def render_gallery(gallery: Gallery, places: Sequence[Path], out: Path) -> str:
    """The page, whose links lead from the directory `out` to the files of records."""

    def link(source: RecordSource) -> str:
        # Quoted, a name such as `javascript:...` is none of another scheme.
        path = quote(Path(os.path.relpath(source.path, out)).as_posix())
        # Sites that show a repository jump to the line of a file that is not compressed.
        return path if path.endswith(".gz") else f"{path}#L{source.line}"

    command = ["magicdec", "report", "--gallery", *map(str, places), "--out", str(out)]
    return render(
        "gallery.html",
        "MagicDec gallery",
        ["page.css", "gallery.css"],
        ["page.js", "gallery.js"],
        gallery=gallery,
        command=shlex.join(command),
        link=link,
    )
