"""Nothing outside `records/` asks of what kind a record is: what differs between records is a
property of theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from magicdec.names import RECORDS

PACKAGE = Path(__file__).parents[2] / "magicdec"
KINDS = {place.partition(":")[2] for place in RECORDS.values()}


def forks(source: str) -> Iterator[int]:
    """The lines that ask for a kind: `isinstance(..., PassRecord)`, or `record.kind ==`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if node.func.id == "isinstance" and named & KINDS:
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides)
            values = [side.value for side in sides if isinstance(side, ast.Constant)]
            if asks and {*values} & {*RECORDS}:
                yield node.lineno


def test_a_fork_is_found() -> None:
    assert list(forks("isinstance(record, PassRecord)")) == [1]
    assert list(forks("isinstance(record, (int, LatencyRecord))")) == [1]
    assert list(forks("if record.kind == 'pass':\n    pass")) == [1]
    assert list(forks("isinstance(record, int)\nrecord.kind in kinds\nspan.kind == 'draft'")) == []


def test_no_code_outside_records_asks_for_the_kind_of_a_record() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(forks(path.read_text(encoding="utf-8")))
        and path.relative_to(PACKAGE).parts[0] != "records"
    }
    assert found == set()
