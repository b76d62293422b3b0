"""Rows and columns of tables from recorded dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from magicdec.output.tables import RULE, Column, Shown, Table
from magicdec.records.acceptance import AcceptanceMetrics, GroupAcceptance
from magicdec.records.fields import Recorded, described_fields
from magicdec.records.metrics import SUFFIX

# The sequences that a percentile needs: with fewer, it would be the largest value or the next one.
MANY = 100
LEAST = {"p90_": 10, "p99_": MANY}


def break_even_length(
    num_tokens: int, num_steps: float, num_verified: int | None, emitted: float | None
) -> float | None:
    """The tokens of a verification from which its drafts pay: its time in decode steps without
    drafts. `num_steps`: the time of the pass in such steps, of a row each, in which it emitted
    `num_tokens`; `emitted` of a verification. None if most steps drafted nothing, so that the noise
    of theirs would hide it."""
    if not num_verified or emitted is None:
        return None
    num_plain = max(0.0, num_tokens - num_verified * emitted)
    return (num_steps - num_plain) / num_verified if num_verified >= num_plain else None


def has_enough(key: str, count: int) -> bool:
    return count >= LEAST.get(key[:4], 0)


def cell(metrics: Any, key: str, description: Recorded) -> object:
    """The cell of a field: empty for None, a name, or a number with its interval."""
    value = getattr(metrics, key)
    ends = getattr(metrics, f"{key}{SUFFIX}", None)
    if value is None or isinstance(value, str):
        return value
    return Shown(description.show_between(value, ends), value)


def fixed(value: float | None, digits: int, suffix: str = "", scale: float = 1.0) -> Shown | None:
    described = Recorded("", digits=digits, suffix=suffix, scale=scale)
    return None if value is None else Shown(described.show(value), value)


def metric_rows(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> list[list[Any]]:
    """A row for each labelled field of `kind` that has a value in any of `metrics` (some may be
    None): the label, then their cells. `only` names the fields that may have a row, in order."""
    return [
        [Shown(described.label, key)]
        + [None if metric is None else cell(metric, key, described) for metric in metrics]
        for key, described in _labelled(kind, metrics, only)
    ]


def metric_columns(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> tuple[list[Column], list[list[Any]]]:
    """The transpose of `metric_rows`: columns for fields, and a row for each of `metrics`."""
    fields = _labelled(kind, metrics, only)
    columns = [Column(described.label, key=key) for key, described in fields]
    rows = [[cell(metric, key, about) for key, about in fields] for metric in metrics]
    return columns, rows


OVER_PROMPTS = "in brackets 95 % intervals over prompts, of which at least 4 were drafted for"


def category_tables(name: str, metrics: AcceptanceMetrics | None) -> list[Table]:
    """The acceptance of each category of the prompts of a pass, and of all prompts; none without
    categories."""
    by_category = None if metrics is None else metrics.acceptance_by_category
    title = f"{name}: acceptance by category; {OVER_PROMPTS}"
    return group_tables(title, "category", by_category, metrics)


def group_tables(
    title: str,
    label: str,
    groups: Mapping[str, GroupAcceptance] | None,
    metrics: AcceptanceMetrics | None,
) -> list[Table]:
    """The acceptance of groups, a row for each, and that of all prompts; none without groups."""
    if not groups:
        return []
    columns, rows = metric_columns(GroupAcceptance, list(groups.values()))
    fields = _labelled(GroupAcceptance, list(groups.values()))
    all_prompts = [
        cell(metrics, key, about) if hasattr(metrics, key) else None for key, about in fields
    ]
    named = [[group, *cells] for group, cells in zip(groups, rows, strict=True)]
    return [
        Table(
            [Column(label, is_text=True), *columns],
            [*named, RULE, ["all prompts", *all_prompts]],
            title=title,
        )
    ]


def _labelled(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> list[tuple[str, Recorded]]:
    fields = {key: described for key, _, described in described_fields(kind)}
    return [
        (key, fields[key])
        for key in only or fields
        if fields[key].label and any(getattr(metric, key, None) is not None for metric in metrics)
    ]
