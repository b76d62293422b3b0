"""Mooncake's traces (`FAST25-release/`): a request a line, by the ids of blocks of 512 tokens,
which are those of all requests of the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from magicdec.workload.traces.reading import (
    STRICT,
    Length,
    OutputLength,
    Time,
    check_order,
    objects_of,
)
from magicdec.workload.traces.sessions import Session, TracedRequest, blocks_at

BLOCK_SIZE = 512  # tokens


@dataclass(frozen=True)
class MooncakeRow:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    timestamp: Time  # ms
    input_length: Length
    output_length: OutputLength
    hash_ids: tuple[int, ...]


def read(path: Path) -> Iterator[Session]:
    """Each request is a session of its own, at its time."""
    before = 0.0
    for place, row in objects_of(TypeAdapter(MooncakeRow), path):
        check_order(f"{place}: ", "timestamp", row.timestamp, before)
        before = row.timestamp
        prompt = blocks_at(f"{place}: ", "input_length", row.hash_ids, BLOCK_SIZE, row.input_length)
        request = TracedRequest(place, prompt, max(1, row.output_length))
        yield Session(place, row.timestamp / 1e3, (request,))
