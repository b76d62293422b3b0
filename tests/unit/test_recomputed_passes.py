"""The metrics of a pass follow from its requests: every one is computed again by plain code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from identities import check_command, check_metrics
from recomputed_metrics import (
    ITL,
    acceptance_by_category,
    contexts_of,
    grown_of,
    metrics_of,
    turns_of,
)
from synthetic_records import (
    AHEAD,
    BASELINES,
    KINDS,
    PLAIN,
    STEPS,
    TURNS,
    command_of,
    drawn_command,
    served,
)
from test_identities import baseline, speculation

from magicdec.records.acceptance import GroupAcceptance
from magicdec.records.metrics import ContextAcceptance, PassMetrics, TurnTimes
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.records.recomputing import follows, unfounded_metric
from magicdec.records.record import Record

# Of which other values can have been measured, too.
FREE = {*ITL, "warmup_calibration_ms", "calibration_ms"}


def commands() -> dict[str, list[PassRecord]]:
    """A command of each kind: a run, one whose phases and calibration are known, and served
    passes beside one without drafts."""
    found = {
        "run": drawn_command(),
        "phases": command_of(speculation(), baseline=baseline(), warmup_calibration_ms=60.0),
    }
    for kind in KINDS:
        plain = [] if kind == PLAIN else [served(PLAIN)]
        found[kind] = [*plain, served(kind, 7, *plain)]
    return found


COMMANDS = commands()


@pytest.mark.parametrize("kind", KINDS)
def test_every_metric_follows_from_the_requests(kind: str) -> None:
    plain = served(PLAIN)
    for seed in range(5):
        assert check_metrics(served(kind, seed)) == []
        assert check_command([plain, served(kind, seed, plain)]) == []


def test_every_metric_of_a_run_follows_from_requests_and_groups() -> None:
    for seed in range(5):
        assert check_command(drawn_command(seed=seed)) == []
    assert check_command(COMMANDS["phases"]) == []


def test_no_metric_is_left_out() -> None:
    """The second definition has all of them."""
    record = served(TURNS)
    turns = turns_of(record.requests)
    contexts = contexts_of(record)
    groups = acceptance_by_category(record)
    assert turns is not None and contexts is not None and groups is not None
    for kind, found, others in (
        (PassMetrics, metrics_of(record), set(ITL)),
        (TurnTimes, turns[0], set()),
        (ContextAcceptance, contexts[0], {"acceptance_by_category", "num_cancelled_draft_tokens"}),
    ):
        assert {field.name for field in fields(kind)} - found.keys() <= others, kind
    assert {field.name for field in fields(GroupAcceptance)} <= next(iter(groups.values())).keys()


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers inside a value are."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places_of(inner, (*path, key))
    elif isinstance(value, int | float):
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy in which the number at that place is larger by a third, a count by one or more."""
    if not path:
        return value + max(1, value // 3) if isinstance(value, int) else value * 4 / 3 + 1e-3
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:])
    return copy


def rebuilt(kind: Any, values: Any) -> Any:
    groups = values.get("acceptance_by_category")
    if groups is not None:
        made = {name: GroupAcceptance(**numbers) for name, numbers in groups.items()}
        values = values | {"acceptance_by_category": made}
    return kind(**values)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_number_that_was_edited_is_named(name: str) -> None:
    """Every number of a record's metrics, one after the other."""
    command = COMMANDS[name]
    record = command[-1]
    assert record.metrics is not None
    metrics = asdict(record.metrics)
    unseen = {
        path[0]
        for path in places_of(metrics)
        if unfounded_metric(
            replace(record, metrics=rebuilt(PassMetrics, changed(metrics, path))), command
        )
        is None
    }
    assert unseen <= FREE
    for part, kind_of_part in (
        ("times_by_turn", TurnTimes),
        ("acceptance_by_context", ContextAcceptance),
    ):
        parts = getattr(record, part)
        values = None if parts is None else [asdict(group) for group in parts]
        for path in places_of(values):
            edited = [rebuilt(kind_of_part, part_values) for part_values in changed(values, path)]
            assert unfounded_metric(replace(record, **{part: edited}), command) == part, path


@pytest.mark.parametrize("kind", KINDS)
def test_the_groups_by_grown_context_are_those_of_the_verifications(kind: str) -> None:
    """By name and number; a server does not say where its verifications were."""
    record = served(kind)
    found = record.acceptance_by_grown_context
    expected = grown_of(record)
    assert (expected is None) == (kind not in (STEPS, AHEAD, TURNS))
    if found is None or expected is None:
        assert found is expected is None
        return
    assert len(found) > 3 and list(found) == list(expected)
    for name, group in found.items():
        values = asdict(group)
        assert follows(values, {key: expected[name][key] for key in values}), name
        edited = found | {name: replace(group, num_draft_tokens=(group.num_draft_tokens or 0) + 1)}
        wrong = replace(record, acceptance_by_grown_context=edited)
        assert unfounded_metric(wrong) == "acceptance_by_grown_context"


def test_ratios_are_known_beside_their_reference_alone() -> None:
    record = drawn_command()[-1]
    assert record.metrics is not None
    edited = replace(record, metrics=replace(record.metrics, speedup=9.0))
    assert unfounded_metric(edited) is None
    assert unfounded_metric(edited, drawn_command()) == "speedup"


def test_a_request_that_contradicts_itself_is_named() -> None:
    record = served(STEPS)
    request = record.requests[3]
    assert request.num_draft_tokens is not None and request.acceptance_histogram is not None
    for name, value in (
        ("num_draft_tokens", request.num_draft_tokens + 1),
        ("finished_ms", request.first_token_ms - 1.0),
        ("first_token_ms", request.arrival_ms - 1.0),
        ("acceptance_histogram", [1, *request.acceptance_histogram]),
        ("per_step_drafted", [1 << 40] * len(request.per_step_drafted or ())),
        ("per_step_accepted", [9] * len(request.per_step_accepted or ())),
        ("per_step_context", [n + 1 for n in request.per_step_context or ()]),
        ("per_step_context", [n - 1 for n in request.per_step_context or ()]),
        ("output_len", 0),
    ):
        requests = [*record.requests]
        requests[3] = replace(request, **{name: value})
        assert unfounded_metric(replace(record, requests=requests)) == f"requests[3].{name}"
    with pytest.raises(ValueError, match="metrics without the requests"):
        unfounded_metric(replace(record, requests=[], groups=[]))


def faster(record: PassRecord) -> PassRecord:
    """The record by hand, with ten times the throughput."""
    assert record.metrics is not None
    much = 10 * (record.metrics.output_throughput or 0.0)
    return replace(record, metrics=replace(record.metrics, output_throughput=much))


def test_a_report_shows_no_pass_whose_metrics_do_not_follow(
    tmp_path: Path, command: Command
) -> None:
    right = served()
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{record.to_json()}\n" for record in (right, faster(right))))
    code, out, err = command("report", path, "--out", tmp_path / "page")
    assert code == 0 and "figures of 1 runs" in out
    place = f"{path}, the pass inflight+draft of {right.environment.time_utc}"
    reason = f"{place}: its output_throughput does not"
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    for text in (err, page):
        assert text.lower().count(f"left out: {reason} follow from its requests".lower()) == 1


def test_the_gate_refuses_a_baseline_whose_metrics_do_not_follow(
    tmp_path: Path, command: Command
) -> None:
    """Although its seal is that of the edited line."""
    records = list(read_records(BASELINES, Record))
    place = next(i for i, record in enumerate(records) if isinstance(record, PassRecord))
    wrong = records[place]
    assert isinstance(wrong, PassRecord)
    path = tmp_path / "baselines.jsonl"
    path.write_text(f"{faster(wrong).to_json()}\n")
    code, _, err = command("gate", "--baseline", path)
    assert code == 2 and err.count("\n") == 1
    assert "its output_throughput does not follow from its requests" in err and str(path) in err
