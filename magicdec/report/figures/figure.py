"""What a figure of a report is: drawn, with the numbers it shows, or left out for a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | bool | None


@dataclass
class Drawn:
    """A figure. `name` names its files, `title` says what is seen, and `caption` how to read it and
    what is not shown. `rows` are the numbers that it shows, under `columns`."""

    name: str
    title: str
    caption: str
    figure: Figure
    columns: tuple[str, ...]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass(frozen=True)
class LeftOut:
    """A figure that the records cannot feed, and why not."""

    name: str
    title: str
    reason: str


def sentences(*parts: str) -> str:
    """The parts that are not empty, each as a sentence."""
    ended = (part if part.endswith((".", ":")) else f"{part}." for part in parts if part)
    return " ".join(part[0].upper() + part[1:] for part in ended)


def shown_of(shown: int, total: int, what: str) -> str:
    """Says what was not drawn; empty if everything was."""
    return f"Shown are {shown} of {total} {what}" if shown < total else ""
