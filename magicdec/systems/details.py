"""Details: what a system measured beside the requests of a pass, as a record holds it. Each system
declares its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator

from magicdec.names import load_object
from magicdec.output.tables import Table
from magicdec.records.fields import OverGroups, RecordPart, description_of
from magicdec.systems.modes import SYSTEMS


@dataclass(frozen=True)
class StageOccupancy:
    """The load of a stage over the time of a pass: the share in which it was busy, and that of each
    of equal parts of the time."""

    name: str
    busy: float
    parts: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Details(RecordPart):
    """The base of the details of a system. Its fields with labels are rows below `heading` in the
    table of modes."""

    heading: ClassVar[str] = ""
    notes: ClassVar[tuple[str, ...]] = ()  # below a table with these rows
    stages_title: ClassVar[str] = ""  # of a figure of the stages; empty without stages

    kind: str

    @classmethod
    def name(cls) -> str:
        """The `kind` of all of its objects."""
        return str(next(field.default for field in fields(cls) if field.name == "kind"))

    @property
    def program(self) -> str | None:
        """The other program that served, if it is known."""
        return None

    @property
    def takes_totals(self) -> bool:
        """Whether what requests do not say of acceptance is known of the whole pass."""
        return False

    @classmethod
    def joined(cls, groups: Sequence[Self]) -> Self:
        """The details of several groups of requests, each field as its description says
        (`over_groups`)."""
        first, *_ = groups
        found = dict[str, Any]()
        for item in fields(cls):
            values = [getattr(group, item.name) for group in groups]
            rule = description_of(item).over_groups
            if rule is not None:
                found[item.name] = joined_value(rule, values)
            else:
                assert all(value == values[0] for value in values), f"{item.name}: {values}"
        return replace(first, **found)

    def completed(self, missing: Sequence[str], is_drafting: bool) -> Self:
        """The details with the metrics of acceptance that a pass does not have."""
        return self

    def stages(self) -> list[StageOccupancy]:
        """The load of each stage; empty without stages."""
        return []

    def tables(self, name: str) -> list[Table]:
        """Tables of the pass of that name, beside its metrics."""
        return []

    def lines(self, name: str, has_drafts: bool) -> list[str]:
        """Lines below the summary of the passes, of the pass of that name."""
        return []


def joined_value(rule: OverGroups, values: Sequence[Any]) -> Any:
    """One value of those of several groups, of lists entry by entry. None counts as unknown, and
    is the result if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list):
        return [joined_value(rule, entries) for entries in zip(*known, strict=True)]
    return rule(known)


def details_type() -> Any:
    """The details of all systems, as pydantic reads them by their `kind`. None without any."""
    kinds = [load_object(system.details) for system in SYSTEMS.values() if system.details]
    return Annotated[reduce(or_, kinds), Discriminator("kind")]
