"""The site's list of what the measuring code promises, made of the properties by which faults are
planted. conf.py puts it on the page properties.rst, and a test looks at it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parents[2] / "scripts" / "dev" / "faults"  # the package with the properties


def properties() -> tuple[Any, ...]:
    """All of them: what each promises (`name`), and the `test` that sees its faults."""
    if str(FAULTS.parent) not in sys.path:
        sys.path.insert(0, str(FAULTS.parent))
    found: tuple[Any, ...] = importlib.import_module(FAULTS.name).PROPERTIES
    return found


def table() -> str:
    """A row for each property, in reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - property", "     - test"]
    for known in properties():
        lines += [f"   * - {known.name}", f"     - ``{known.test}``"]
    return "\n".join(lines) + "\n"
