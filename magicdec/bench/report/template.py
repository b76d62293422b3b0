"""Fills a template of this folder. Templates extend `base.html`; their styles and scripts are put
inside, so that a page needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = "index.html"  # the file that a page is written to


def render(
    template: str, title: str, styles: Sequence[str], scripts: Sequence[str], **content: Any
) -> str:
    """The page of a template, in which all values are escaped. `styles` and `scripts` are names of
    files."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    engine = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return engine.get_template(template).render(
        title=title, style=_together(styles), script=_together(scripts), **content
    )


def _together(names: Sequence[str]) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8").rstrip("\n") for name in names)
