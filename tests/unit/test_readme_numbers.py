"""Every number that the README says follows from a committed record, from a line of the log with its
command, or from a constant of the code. `CLAIMS` has each sentence with numbers, and where they
come from; a number in no claim fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from conftest import ROOT

from magicdec.records.comparison.compare import DEFAULT_MARGIN
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.table import describe_run

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_results

README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")
# What is no claim: commands, names of links, the years of papers, versions and names of models.
NO_CLAIMS = (
    re.compile(r"^    .*$", re.M),  # a block of commands or of Python
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"et al\. \d{4}|Python 3\.11|Gemma 3|8 A100|exits with\s1"),
)


def plain(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())


@cache
def records(name: str) -> list[RunRecord]:
    return load_records(ROOT / "results" / name)


def printed() -> str:
    """What `make demo` printed, as the record that it left is printed."""
    (demo,) = records("readme/demo.jsonl")
    return plain(describe_run(demo))


def in_log(page: str, heading: str) -> Callable[[], str]:
    """A section of the log, which must name the command that measured it."""

    def section() -> str:
        text = (ROOT / "docs" / "log" / page).read_text()
        _, found, rest = text.partition(f"\n## {heading}")
        assert found, f"docs/log/{page} has no section {heading}"
        own = rest.partition("\n## ")[0]
        assert re.search(r"`[^`]*(?:python |magicdec |scripts/)", own), "it names no command"
        return own

    return section
