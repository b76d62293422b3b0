"""Every interval belongs to the value that it stands beside: in the classes of records, in the
metrics of a run, and wherever both are shown or exported."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from conftest import ROOT
from recomputed_metrics import AlikeSteps, RequestDrafts, total
from scipy import stats
from synthetic_records import (
    GAMMA,
    KINDS,
    NUM_TOKENS,
    Batch,
    baseline_pass,
    chances_of,
    command_of,
    draw_pass,
    scaled,
    served,
)
from test_metrics import break_even_gen_len, timed

from magicdec.bench.report.frame import flat_rows, metric_row
from magicdec.bench.report.listing import LABELS, list_records
from magicdec.bench.report.tables import metric_cell
from magicdec.names import RECORDS, load_named
from magicdec.output.tables import text_of
from magicdec.records.fields import RecordPart, described_fields
from magicdec.records.intervals import ratio_interval
from magicdec.records.metric_tables import cell
from magicdec.records.metrics import SUFFIX, PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.records.record import Record

COMMITTED = (
    "magicdec/bench/gate/baselines/acceptance.jsonl",
    "results/cpu/records.jsonl.gz",
    "results/contexts/records.jsonl.gz",
)
NUM_BATCHES = 6


def parts_in(hint: Any) -> Iterator[type]:
    """The classes of record parts that a type names."""
    if isinstance(hint, type) and issubclass(hint, RecordPart):
        yield hint
    for inner in get_args(hint):
        yield from parts_in(inner)


@cache
def record_classes() -> tuple[type, ...]:
    """All classes that a record of any kind can hold."""
    found = list[type]()
    waiting: list[type] = [load_named(RECORDS, kind) for kind in RECORDS]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            for _, hint, _ in described_fields(kind):
                waiting += parts_in(hint)
    return tuple(found)


def pairs_of(kind: type) -> list[str]:
    """The names of the values of a class that have an interval."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]


def test_every_interval_is_described_as_that_of_the_value_of_its_name() -> None:
    classes = [kind for kind in record_classes() if pairs_of(kind)]
    assert {"PassMetrics", "GroupAcceptance", "ContextAcceptance"} <= {
        kind.__name__ for kind in classes
    }
    for kind in record_classes():
        fields = {name: (hint, about) for name, hint, about in described_fields(kind)}
        for name, (_, about) in fields.items():
            assert ("95 % interval" in about.meaning) == name.endswith(SUFFIX), (kind, name)
        before = dict(zip(list(fields)[1:], fields, strict=False))
        for name in pairs_of(kind):
            hint, about = fields[name]
            ends, described = fields[f"{name}{SUFFIX}"]
            assert ends == list[hint], (kind, name)
            assert described.unit == about.unit, (kind, name)
            is_named = f"interval of `{name}`" in described.meaning
            is_named |= f"interval of each of `{name}`" in described.meaning
            is_own = described.meaning.startswith("its ") and before[f"{name}{SUFFIX}"] == name
            assert is_named or is_own, (kind, name)


@cache
def batches() -> tuple[list[Batch], list[Batch]]:
    """Those with drafts and those without, whose times scatter, each by its own factor: of steps,
    of all else, of the baseline and of prefill. What takes time before the first step halves the
    net speedup."""
    rng = np.random.default_rng(3)
    ours = draw_pass(rng, chances_of(0.7, 2 * NUM_BATCHES), GAMMA, NUM_TOKENS, NUM_BATCHES)
    base = baseline_pass(ours)
    ours = scaled(ours, 1 + rng.uniform(0, 0.1, NUM_BATCHES))
    base = scaled(base, 1 + rng.uniform(0, 0.1, NUM_BATCHES))
    begins = [sum(batch.step_ms) * rng.uniform(0.5, 0.7) for batch in ours]
    prefills = [len(batch.rows) * rng.uniform(1, 1.1) for batch in ours]
    ours = [replace(b, begin_ms=ms) for b, ms in zip(ours, begins, strict=True)]
    shared = [
        [replace(b, prefill_ms=ms) for b, ms in zip(groups, prefills, strict=True)]
        for groups in (ours, base)
    ]
    return shared[0], shared[1]


@cache
def passes() -> tuple[PassRecord, PassRecord]:
    """The pass without drafts and that with drafts."""
    ours, base = batches()
    plain, drafting = command_of(ours, baseline=base)
    return plain, drafting


def measured() -> PassMetrics:
    metrics = passes()[1].metrics
    assert metrics is not None
    return metrics


def t_quantile(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


def ratio_ends(ratios: list[float]) -> list[float]:
    """The interval of their geometric mean by Student's t."""
    logs = [math.log(ratio) for ratio in ratios]
    reach = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return [math.exp(middle - reach), math.exp(middle + reach)]


def speed_and_ends(tokens: list[int], times_ms: list[float]) -> tuple[float, list[float]]:
    """All tokens divided by all times, and the interval by leaving out each batch."""
    count = len(tokens)
    speed = 1e3 * sum(tokens) / sum(times_ms)
    without = [
        1e3 * (sum(tokens) - tokens[i]) / (sum(times_ms) - times_ms[i]) for i in range(count)
    ]
    error = math.sqrt((count - 1) * statistics.pvariance(without))
    reach = t_quantile(count - 1) * error / speed
    return speed, [speed * math.exp(-reach), speed * math.exp(reach)]


def test_intervals_of_a_run_are_those_of_their_own_values() -> None:
    """Each by the definition, from the samples that its value is of."""
    found = measured()
    plain, record = passes()
    assert plain.metrics is not None
    alone = plain.metrics
    assert alone.speedup is alone.net_speedup_interval is None, "it is compared with nothing"
    ours, _ = batches()
    later = [sum(batch.tokens) for batch in ours]
    ratios = {name: getattr(found, f"{name}_per_group") for name in RATIOS}
    drafts = [
        RequestDrafts(
            sum(step.drafted for step in steps),
            sum(step.accepted for step in steps),
            len(steps),
            sum(step.emitted for step in steps),
            [AlikeSteps(step.drafted, step.accepted, 1) for step in steps],
            GAMMA,
        )
        for steps in record.verifications().by_request.values()
    ]
    durations = [
        max(request.finished_ms for request in requests)
        for _, requests in record.groups_of_requests
    ]
    every = [tokens + len(batch.rows) for tokens, batch in zip(later, ours, strict=True)]
    prompts = [batch.prompt_len * len(batch.rows) for batch in ours]
    expected = {
        "decode_tokens_per_s": speed_and_ends(later, [sum(batch.step_ms) for batch in ours]),
        "prefill_tokens_per_s": speed_and_ends(
            prompts, [batch.prefill_ms or 0.0 for batch in ours]
        ),
        "output_throughput": speed_and_ends(every, durations),
        **{
            name: (statistics.median(group_ratios), ratio_ends(group_ratios))
            for name, group_ratios in ratios.items()
        },
    }
    draft_metrics = total(drafts)
    expected |= {
        name: (draft_metrics[name], draft_metrics[f"{name}{SUFFIX}"]) for name in DRAFT_METRICS
    }
    assert set(pairs_of(PassMetrics)) == expected.keys()
    for name, (value, ends) in expected.items():
        assert getattr(found, name) == pytest.approx(value), name
        both = getattr(found, f"{name}{SUFFIX}")
        assert list(flat(both)) == pytest.approx(list(flat(ends))), name


RATIOS = ("throughput_ratio", "speedup", "total_speedup", "net_speedup")
DRAFT_METRICS = (
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_verification",
    "acceptance_per_position",
)


def flat(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for inner in value:
            yield from flat(inner)
    else:
        yield value


def test_an_interval_of_many_batches_of_two_kinds_holds_their_median() -> None:
    for count in range(3, 20):
        for slow in range(1, count):
            ratios = [1.0 + 0.001 * i for i in range(slow)]
            ratios += [2.0 + 0.001 * i for i in range(count - slow)]
            ends = ratio_interval(ratios)
            assert ends is not None
            assert ends[0] <= statistics.median(ratios) <= ends[1], (count, slow)
            mean_ends = ratio_ends(ratios)
            assert ends == pytest.approx(mean_ends) or statistics.median(ratios) in ends


def check_pairs(row: dict[str, Any], kind: type) -> int:
    """That each value of a row lies between the ends of its interval, which exist both or not.
    Returns the number of intervals."""
    count = 0
    for name in pairs_of(kind):
        value = row[name]
        if f"{name}{SUFFIX}" in row:  # of several values
            values = value or []
            ends = row[f"{name}{SUFFIX}"] or [[]] * len(values)
            triples = [(number, *both) for number, both in zip(values, ends, strict=True) if both]
        else:
            low = row[f"{name}{SUFFIX}_low"]
            high = row[f"{name}{SUFFIX}_high"]
            assert (low is None) == (high is None) and (value is not None or low is None), name
            triples = [] if low is None else [(value, low, high)]
        for number, low, high in triples:
            assert low <= number <= high, (name, low, number, high)
        count += len(triples)
    return count


def records() -> Iterator[Record]:
    for path in COMMITTED:
        yield from read_records(ROOT / path, PassRecord)
    yield from passes()
    yield from map(served, KINDS)


def test_every_exported_value_lies_in_its_interval() -> None:
    count = 0
    for number, record in enumerate(records()):
        passed: Any = record
        for row in flat_rows(number, "file", record):
            metrics = passed.metrics
            if metrics is None:
                continue
            count += check_pairs(row, type(metrics))
            for name in pairs_of(type(metrics)):
                ends = getattr(metrics, f"{name}{SUFFIX}")
                if f"{name}{SUFFIX}_low" in row:
                    shown = [row[f"{name}{SUFFIX}_low"], row[f"{name}{SUFFIX}_high"]]
                    assert shown == (ends or [None, None]), name
            for group, part in (metrics.acceptance_by_category or {}).items():
                prefix = f"acceptance_by_category.{group}."
                inside = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}
                count += check_pairs(inside, type(part))
        for part in getattr(record, "acceptance_by_context", None) or ():
            count += check_pairs(metric_row(part, type(part)), type(part))
    assert count > 2000


def test_a_cell_shows_the_interval_of_its_own_value() -> None:
    """Of a run whose intervals are narrow, in the table of a run and in reports."""
    metrics = measured()
    row = metric_row(metrics, PassMetrics)
    described = {name: about for name, _, about in described_fields(PassMetrics)}
    for name in pairs_of(PassMetrics):
        about = described[name]
        if name == "acceptance_per_position":
            continue  # which has no two columns
        ends = getattr(metrics, f"{name}{SUFFIX}")
        shown = f"{about.show(getattr(metrics, name))} {about.show_interval(*ends)}"
        cells = cell(metrics, name, about), metric_cell(row, name, about)
        assert [text_of(cell) for cell in cells] == [shown, shown]
        assert len({about.show(end) for end in ends}) == 2, "it has a width"


def test_a_listing_has_the_interval_of_each_of_its_metrics() -> None:
    """CSV has the ends as numbers, and Markdown both in a column of their own behind the value."""
    record = passes()[1]
    metrics = record.metrics
    names = [name for name in pairs_of(PassMetrics) if name != "acceptance_per_position"]
    listing = list_records([record, record], names)
    for row in csv.DictReader(listing.table("csv").csv().splitlines()):
        for name in names:
            found = [float(row[f"{name}{SUFFIX}_{end}"]) for end in ("low", "high")]
            assert found == getattr(metrics, f"{name}{SUFFIX}"), name
            assert found[0] <= float(row[name]) <= found[1]
    heading, _, *rows = [
        [text.strip() for text in line.strip("|").split("|")]
        for line in listing.table("markdown").markdown().splitlines()
        if line.startswith("|")
    ]
    assert len(heading) == 2 * len(names) and len(rows) == 2
    described = {name: about for name, _, about in described_fields(PassMetrics)}
    for place, name in enumerate(names):
        label = f"{LABELS[name]}, 95 % interval"
        assert heading[2 * place : 2 * place + 2] == [LABELS[name], label]
        ends = getattr(metrics, f"{name}{SUFFIX}")
        assert rows[0][2 * place + 1] == described[name].show_interval(*ends), name


def test_the_break_even_length_of_unequal_batches_is_the_larger() -> None:
    """Of an even number of batches the larger of the two in the middle; each by hand: its net
    speedup is above 1 from that length on."""
    # A token takes 10 ms by the baseline and 5 ms here, after so many ms at the beginning.
    for added, expected in (
        ([0, 20], 4 + 2),
        ([20, 0], 4 + 2),
        ([40, 0, 20, 10], 4 + 2),
        ([0, 0, 20, 40], 4 + 2),
        ([10, 20, 40], 4 + 2),
        ([0, 20, 40, 60, 80, 100], 12 + 2),
    ):
        tokens = [[10, 10]] * len(added)
        base = timed([0] * len(added), [[10.0] * 10] * len(added), tokens)
        ours = timed(list(map(float, added)), [[5.0] * 10] * len(added), tokens)
        assert break_even_gen_len(base, ours) == expected, added
