"""The items of a JSON file, one a line or in one array, with their places, read on demand: a file
may be larger than memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from magicdec.output.files import MOST_LINE_BYTES, lines_of, parse_json

CHUNK = 1 << 20  # characters that are read at a time
SPACE = re.compile(r"[ \t\n\r]*")
LONGEST_TOKEN = 16  # an error nearer to the end of what was read may be that of a cut token


def json_items(stream: TextIO) -> Iterator[tuple[str, Any]]:
    """The items with their places. Raises ValueError, naming the place, for invalid JSON, and
    OSError beyond MOST_LINE_BYTES characters."""
    start = stream.readline(CHUNK)
    number = 1
    while start.isspace():
        start = stream.readline(CHUNK)
        number += 1
    if start.lstrip().startswith("["):
        yield from _JsonArray(start, stream, number).items()
        return
    start += "" if start.endswith("\n") or not start else stream.readline(MOST_LINE_BYTES)
    if len(start) > MOST_LINE_BYTES:
        raise ValueError(f"line {number} has more than {MOST_LINE_BYTES >> 20} MB")
    yield from _line_items(start, number)
    for after, line in lines_of(stream):
        yield from _line_items(line, number + after)


def _line_items(line: str, number: int) -> Iterator[tuple[str, Any]]:
    if not line.strip():
        return
    try:
        value = parse_json(line.rstrip())  # else errors at the end name the next line
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON ({error.msg})") from error
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    yield f"line {number}", value


class _JsonArray:
    """An array that begins with `text`, in line `number`, and goes on in `stream`; parsed up to
    `at`."""

    def __init__(self, text: str, stream: TextIO, number: int) -> None:
        self.text = text
        self.stream = stream
        self.number = number
        self.at = 0
        self.is_whole = False
        self.decoder = json.JSONDecoder()

    def items(self) -> Iterator[tuple[str, Any]]:
        self.next_character()
        self.at += 1  # the bracket
        index = 0
        while index > 0 or self.next_character() != "]":
            yield f"item {index}", self.item(index)
            index += 1
            after = self.next_character()
            if after == "]":
                break
            if after != ",":
                self.refuse("Expecting ',' delimiter", self.at)
            self.at += 1
        self.at += 1
        if self.next_character():
            self.refuse("Extra data", self.at)

    def item(self, index: int) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.pos + LONGEST_TOKEN > len(self.text) or "Untermin" in error.msg
                if self.is_whole or not is_cut:
                    self.refuse(error.msg, error.pos)
            except RecursionError:
                raise ValueError(f"item {index} is nested too deeply") from None
            except ValueError as error:  # a number of too many digits
                raise ValueError(f"item {index}: {error}") from None
            else:
                if end < len(self.text) or self.is_whole:  # else a number may go on
                    self.at = end
                    return value
            if len(self.text) - self.at > MOST_LINE_BYTES:
                raise ValueError(f"item {index} has more than {MOST_LINE_BYTES >> 20} MB")
            self.read_more()

    def next_character(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            space = SPACE.match(self.text, self.at)
            assert space is not None, "it matches nothing, too"
            self.at = space.end()
            if self.at < len(self.text) or self.is_whole:
                return self.text[self.at : self.at + 1]
            self.read_more()

    def read_more(self) -> None:
        """Read at least as much as is left, so that a long item is not parsed too often."""
        self.number += self.text.count("\n", 0, self.at)
        rest = self.text[self.at :]
        self.at = 0
        more = self.stream.read(max(CHUNK, len(rest)))
        self.is_whole = not more
        self.text = rest + more

    def refuse(self, reason: str, position: int) -> NoReturn:
        number = self.number + self.text.count("\n", 0, position)
        raise ValueError(f"line {number} is not JSON ({reason})")
