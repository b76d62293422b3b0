"""Flags that several commands that serve requests have alike."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from magicdec.cli.parsing.parser import Parser
from magicdec.workload.request_shapes import (
    DEFAULT_GEN_LEN,
    DEFAULT_NUM_REQUESTS,
    DEFAULT_PROMPT_LEN,
    FORMS,
)


def add_requests(parser: Parser) -> None:
    """Those of requests that are all there from the start."""
    add = parser.add_argument_group("requests").add_argument
    add("--num_requests", type=int, metavar="N",
        help=f"prompts to serve; all are there from the start [{DEFAULT_NUM_REQUESTS}]",
    )  # fmt: skip
    add("--prefix_len", metavar="LENGTH",
        help=f"prompt tokens of each request: {FORMS} [{DEFAULT_PROMPT_LEN}]")  # fmt: skip
    add("--gen_len", metavar="LENGTH", default=DEFAULT_GEN_LEN,
        help=f"output tokens of each request, unless an end token ends it: {FORMS} "
        f"[{DEFAULT_GEN_LEN}]")  # fmt: skip


def add_files(
    parser: Parser, records: str, flags: Sequence[tuple[str, str, str]]
) -> argparse._ArgumentGroup:
    """`--out`, whose default is `records`, and further files as (flag, metavar, help text). Returns
    the group that they are in."""
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--out", type=Path, default=Path(records), metavar="FILE",
        help=f"append a record for each pass, one JSON line [{records}]")  # fmt: skip
    for flag, metavar, text in flags:
        add(flag, type=Path, metavar=metavar, help=text)
    return group
