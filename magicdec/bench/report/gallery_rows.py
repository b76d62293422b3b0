"""The tables of the gallery: a row for each run and for each pass that was served, and one for each
machine and model. What is in doubt is in tables of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from magicdec.bench.report.frame import FrameRow, metric_row
from magicdec.bench.report.listing import DESCRIBED, LABELS, rank, settings
from magicdec.bench.report.tables import MISSING, extent, metric_cell
from magicdec.bench.serving import recomputing
from magicdec.bench.serving.metrics import ServingMetrics
from magicdec.bench.serving.record import UNCHECKED, ServingRecord
from magicdec.hardware.other_load import BUSY
from magicdec.names import BASELINE
from magicdec.output.console import printable
from magicdec.output.tables import Shown
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.fields import Recorded, described_fields
from magicdec.records.performance import Metrics
from magicdec.records.recomputing import unfounded_metric
from magicdec.records.record import RunRecord, is_greedy
from magicdec.records.table import dtypes_of, method_of
from magicdec.records.workload import format_mark

MOST_TEXT = 160  # characters of a cell
# The instructions that decide how fast the CPU kernels are, the fastest first.
FAST = ("AMX_BF16", "AVX512BF16")
MARKS = re.compile(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b")  # of the name of a CPU, which say nothing
SPEED = "decode_tokens_per_s"
NET = "net_speedup"
OF_RUNS = (
    *(NET, "speedup", "draft_acceptance_rate", "mean_emitted_tokens"),
    *("roofline_fraction", SPEED),
)
OF_PASSES = (
    *("output_throughput", "request_tokens_per_s", "p50_ttft_ms", "p50_tpot_ms"),
    "draft_acceptance_rate",
)
OF_SERVING = {name: about for name, _, about in described_fields(ServingMetrics)}


@dataclass(frozen=True)
class RecordSource:
    """The line of a file that a record is in."""

    path: Path
    name: str  # of the file, from the folder that was contributed
    line: int

    @property
    def place(self) -> str:
        return f"{self.name}:{self.line}"


class GalleryCell(NamedTuple):
    """A cell of the page. It is sorted by `order`, if it has one, and selected by `group`; both are
    its text otherwise. With `source` it is a link to that record."""

    text: str
    order: str = ""
    group: str = ""
    source: RecordSource | None = None


class GalleryColumn(NamedTuple):
    label: str
    is_selected: bool = False  # whether the rows with one of its values can be selected
    is_number: bool = False
    width: int = 0  # rem; at least that of its longest word


@dataclass(frozen=True)
class GalleryTable:
    name: str
    title: str
    note: str
    columns: Sequence[GalleryColumn]
    rows: list[list[GalleryCell]]


@dataclass(frozen=True)
class GalleryRow:
    """A record as a row, without its samples, of which many records have more than fits in memory.
    `doubt` is why it is in no ranking, empty if its tokens are right."""

    is_run: bool  # not a pass that was served
    doubt: str
    group: tuple[str, str, str]  # machine, ranks, model
    place: tuple[Any, ...]  # what those did with which it is compared, among the rows of its group
    bandwidth_bytes_per_s: float | None
    # The ends of the interval by which it is ranked; of a single value twice this.
    reach: Sequence[float] | None
    cells: list[GalleryCell]


def row_of(record: RunRecord | ServingRecord, doubt: str, cells: list[GalleryCell]) -> GalleryRow:
    environment = record.environment
    workload = record.workload
    asked = record.config["workload"]
    passed = record if isinstance(record, ServingRecord) else None
    return GalleryRow(
        is_run=passed is None,
        doubt=doubt,
        group=(machine_of(environment), ranks_of(environment), model_of(record)),
        place=(
            "" if workload is None else workload.dataset,
            0 if workload is None else workload.prefix_len,
            rank(asked["batch_size"]),
            rank(asked.get("gen_len")),
            *((passed.arrival, len(passed.requests), passed.concurrency or 0) if passed else ()),
        ),
        bandwidth_bytes_per_s=environment.read_bandwidth_bytes_per_s,
        reach=reach_of(record.metrics),
        cells=cells,
    )


def reach_of(metrics: Metrics | ServingMetrics | None) -> Sequence[float] | None:
    """What a run or a pass is ranked by: the interval of its net speedup, or its tokens/s."""
    if isinstance(metrics, ServingMetrics):
        return [metrics.output_throughput] * 2
    return None if metrics is None else metrics.net_speedup_interval


def short(text: object) -> str:
    """A text of a record that fits into a cell."""
    shown = " ".join(printable(str(text)).split())
    return shown if len(shown) <= MOST_TEXT else f"{shown[:MOST_TEXT]}..."


def text_cell(text: object, group: object = "") -> GalleryCell:
    return GalleryCell(short(text), group=short(group))


def number_cell(shown: Shown) -> GalleryCell:
    value = shown.value
    assert isinstance(value, int | float), "what is shown is a number"
    # An interval may stand below its number, but is not broken itself.
    return GalleryCell(short(shown.text).replace(", ", ",\u00a0"), order=f"{value:.6g}")


def machine_of(environment: Environment) -> str:
    """The GPU, or the CPU with the instructions that decide its speed."""
    if environment.gpu:
        return environment.gpu
    known = [name for name in FAST if name in (environment.instructions or ())]
    name = " ".join(MARKS.sub("", environment.cpu).split()) or "unknown CPU"
    return f"{name}, {(known or [environment.cpu_capability])[0]}"


def ranks_of(environment: Environment) -> str:
    return f"{environment.world_size} x {environment.threads}"


def model_of(record: RunRecord | ServingRecord) -> str:
    config = record.config["model"]
    is_random = record.workload is not None and record.workload.random_weights
    weights = ", random weights" if is_random else ""
    return f"{config['model']} ({dtypes_of(config)}{weights})"


# What a row ends with: of what, on what, and where it is written.
TAIL = (
    GalleryColumn("model", is_selected=True, width=8),
    GalleryColumn("machine", is_selected=True, width=7),
    GalleryColumn("ranks x threads", is_selected=True),
    GalleryColumn("text", is_selected=True, width=5),
    GalleryColumn("cores taken by others", is_number=True),
    GalleryColumn("versions", width=14),
    GalleryColumn("date", width=6),
    GalleryColumn("record", width=10),
)
RUN_COLUMNS = (
    GalleryColumn("way", is_selected=True, width=10),
    GalleryColumn(LABELS["prefix_len"], is_selected=True),
    GalleryColumn("B", is_selected=True),
    *(GalleryColumn(DESCRIBED[name].label, is_number=True) for name in OF_RUNS),
    GalleryColumn(f"{BASELINE}, tokens/s", is_number=True),
)
PASS_COLUMNS = (
    GalleryColumn("way", is_selected=True, width=10),
    GalleryColumn("longest prompt", is_selected=True),
    GalleryColumn("requests"),
    GalleryColumn("arrival"),
    GalleryColumn("concurrency"),
    *(GalleryColumn(OF_SERVING[name].label, is_number=True) for name in OF_PASSES),
)
RANK = GalleryColumn("rank", is_number=True)
VERDICT = GalleryColumn("verdict", width=6)
DOUBT = GalleryColumn("why", width=12)
MACHINE_COLUMNS = (
    GalleryColumn("machine", width=9),
    GalleryColumn("ranks x threads"),
    GalleryColumn("model", width=9),
    GalleryColumn("records", is_number=True),
    GalleryColumn("ranked", is_number=True),
    GalleryColumn("read, GB/s", width=6),
    GalleryColumn(f"largest {DESCRIBED[NET].label}", is_number=True),
    GalleryColumn("way", width=12),
    GalleryColumn(LABELS["prefix_len"]),
    GalleryColumn("B"),
)
NOTE_OF_MACHINES = (
    "The largest net speedup is that of the ranked run whose interval begins highest, of any text "
    "and prefix. Read: the bandwidth that the runs measured."
)
NOTE_OF_RUNS = (
    "A run decodes the same prompts autoregressively as well, and all tokens are compared. The "
    "speedup is of the decode steps, and net of all the time after prefill. In brackets: 95 % "
    "intervals, which need three batches. The rank is among the runs of one machine, model, text, "
    "prefix, output length and B: 1 and those whose interval of the net speedup lies above this "
    "one's, so that equal ranks cannot be told apart."
)
NOTE_OF_PASSES = (
    "The rank is by output tokens/s among the passes of one machine and model that served equal "
    "requests. A pass has no interval, so that near ones may change places when measured again. "
    "Output tokens/s count the waiting and the prefill of all requests, and are no numbers of a "
    "run. The tokens of a mode are compared with those of the first mode of its command."
)
NOTE_OF_DOUBTS = (
    "They are apart from those above because they failed, because their tokens were not "
    "compared, or because their numbers are in doubt; the column \u201cwhy\u201d has the reason."
)


def tail_cells(source: RecordSource, record: RunRecord | ServingRecord) -> list[GalleryCell]:
    environment = record.environment
    dataset = ""
    if record.workload is not None:
        dataset = record.workload.dataset + format_mark(record.config)
    taken = environment.cores_taken
    load = MISSING if taken is None else Shown(f"{taken:.0%}", taken)
    return [
        text_cell(model_of(record)),
        text_cell(machine_of(environment)),
        text_cell(ranks_of(environment)),
        text_cell(dataset),
        number_cell(load),
        text_cell(f"{environment.magicdec}, torch {environment.torch}"),
        text_cell(environment.time_utc[:10]),
        GalleryCell(short(source.place), source=source),
    ]


def found_of(correctness: Correctness | None) -> str:
    """What comparing the tokens of a ranked record has found."""
    # An older record of a pass that was served says by its status alone that all are equal.
    count = 0 if correctness is None else correctness.num_excused or 0
    return f"{count} tie{'s' * (count != 1)} that rounding explains" if count else "identical"


def run_row(source: RecordSource, record: RunRecord) -> GalleryRow:
    doubt = doubt_of_run(record)
    values = settings(record)
    is_alone = values["drafter"] is None
    ours = metric_row(record.metrics, Metrics)
    alone = ours if is_alone else metric_row(record.baseline_metrics, Metrics)
    if is_alone:  # what it measures is in the column of autoregressive decoding
        ours = metric_row(None, Metrics)
    cells = [
        text_cell(method_of(record.config), values["drafter"] or BASELINE),
        text_cell(values["prefix_len"]),
        text_cell(values["B"]),
        *(metric(ours, name, DESCRIBED[name]) for name in OF_RUNS),
        metric({SPEED: alone[SPEED]}, SPEED, DESCRIBED[SPEED]),  # without its interval
        text_cell(doubt or found_of(record.correctness)),
        *tail_cells(source, record),
    ]
    return row_of(record, doubt, cells)


def pass_row(source: RecordSource, record: ServingRecord) -> GalleryRow:
    doubt = doubt_of_pass(record)
    metrics = metric_row(record.metrics, ServingMetrics)
    has_drafts = "draft" in record.config or metrics["draft_acceptance_rate"] is not None
    way = [record.way, *([method_of(record.config_as_run())] if has_drafts else [])]
    cells = [
        text_cell(": ".join(way), record.way),
        text_cell(record.workload.prefix_len),
        text_cell(record.workload.num_prompts),
        text_cell(record.arrival),
        text_cell(record.concurrency or ""),
        *(metric(metrics, name, OF_SERVING[name]) for name in OF_PASSES),
        text_cell(doubt or f"{found_of(record.correctness)}, with {record.reference}"),
        *tail_cells(source, record),
    ]
    return row_of(record, doubt, cells)


def metric(row: FrameRow, name: str, described: Recorded) -> GalleryCell:
    return number_cell(metric_cell(row, name, described))


def doubt_of_run(record: RunRecord) -> str:
    """Why a run is in no ranking; empty if its tokens are right."""
    if record.status == "failed":
        return f"failed: {record.error}"
    if not record.passed:
        return "DIVERGED: its tokens are not those of autoregressive decoding"
    if record.config["decoding"].get("emulate_acceptance") is not None:
        return "emulated: --emulate_acceptance"
    if record.correctness is None or record.correctness.reference is None:
        if record.config["decoding"]["strategy"] == BASELINE:
            return "not compared: it is autoregressive decoding alone"
        reason = "it has no baseline" if is_greedy(record.config) else "its tokens were sampled"
        return f"not compared: {reason}"
    name = unfounded_metric(record)
    if name is not None:
        return f"CONTRADICTION: its {name} does not follow from its samples"
    return doubt_of_times(record.environment)


def doubt_of_pass(record: ServingRecord) -> str:
    """The same of a pass that was served."""
    if record.error is not None:
        return f"failed: {record.error}"
    reasons = {
        "diverged": f"DIVERGED: its tokens are not those of {record.reference}",
        "differs": f"{record.num_differing} requests have other tokens than with "
        f"{record.reference}, which nothing explains",
        UNCHECKED: "not compared with another mode",
    }
    if record.status in reasons:
        return reasons[record.status]
    if record.emulated_by:
        return f"emulated: {', '.join(record.emulated_by)}"
    name = recomputing.unfounded_metric(record)
    if name is not None:
        return f"CONTRADICTION: its {name} does not follow from its requests"
    return doubt_of_times(record.environment)


def doubt_of_times(environment: Environment) -> str:
    """Why a record with the right tokens is in no ranking: its command said to measure again."""
    taken = environment.cores_taken
    if taken is None or taken < BUSY:
        return ""
    return f"busy host: another load took {taken:.0%} of its cores"


def gallery_tables(rows: Iterable[GalleryRow]) -> list[GalleryTable]:
    """The tables of the page, without those that are empty."""
    ordered = sorted(rows, key=lambda row: (row.group, row.place, row.cells[0].text))
    runs = [row for row in ordered if row.is_run]
    passes = [row for row in ordered if not row.is_run]
    tables = [
        machines_table(ordered),
        GalleryTable(
            "runs",
            "Ranked runs",
            NOTE_OF_RUNS,
            [RANK, *RUN_COLUMNS, VERDICT, *TAIL],
            ranked_cells(row for row in runs if not row.doubt),
        ),
        GalleryTable(
            "passes",
            "Ranked passes of served requests",
            NOTE_OF_PASSES,
            [RANK, *PASS_COLUMNS, VERDICT, *TAIL],
            ranked_cells(row for row in passes if not row.doubt),
        ),
        GalleryTable(
            "doubted_runs",
            "Runs that are not ranked",
            NOTE_OF_DOUBTS,
            [*RUN_COLUMNS, DOUBT, *TAIL],
            [row.cells for row in runs if row.doubt],
        ),
        GalleryTable(
            "doubted_passes",
            "Passes of served requests that are not ranked",
            NOTE_OF_DOUBTS,
            [*PASS_COLUMNS, DOUBT, *TAIL],
            [row.cells for row in passes if row.doubt],
        ),
    ]
    return [table for table in tables if table.rows]


def ranked_cells(rows: Iterable[GalleryRow]) -> list[list[GalleryCell]]:
    """The cells of the rows behind their ranks, the best of each place first: 1 and the number of
    rows of the same place that are better beyond doubt."""
    cells = []
    for _, group in groupby(rows, lambda row: (row.group, row.place)):
        of = list(group)
        lows = [row.reach[0] for row in of if row.reach is not None]
        placed = [
            (None if row.reach is None else 1 + sum(low > row.reach[1] for low in lows), row)
            for row in of
        ]
        placed.sort(key=lambda each: (each[0] or len(of) + 1, -(each[1].reach or [0.0])[0]))
        for number, row in placed:
            shown = MISSING if number is None else Shown(str(number), number)
            cells.append([number_cell(shown), *row.cells])
    return cells


def machines_table(ordered: Sequence[GalleryRow]) -> GalleryTable:
    """A row for each machine, ranks and model, with the ranked run whose net speedup is the largest
    beyond doubt: whose interval begins highest."""
    rows = []
    for names, group in groupby(ordered, lambda row: row.group):
        of = list(group)
        bandwidths = pd.Series([row.bandwidth_bytes_per_s for row in of], dtype=float)
        ranked = [row for row in of if not row.doubt]
        rows.append(
            [
                *map(text_cell, names),
                text_cell(len(of)),
                text_cell(len(ranked)),
                text_cell(extent(bandwidths.dropna() / 1e9)),
                *best_cells(ranked),
            ]
        )
    return GalleryTable("machines", "Machines and models", NOTE_OF_MACHINES, MACHINE_COLUMNS, rows)


def best_cells(ranked: Sequence[GalleryRow]) -> list[GalleryCell]:
    found = [(row.reach[0], row.cells) for row in ranked if row.is_run and row.reach is not None]
    if not found:
        return [number_cell(MISSING), *[text_cell("")] * 3]
    _, best = max(found, key=lambda each: each[0])
    cells = dict(zip((column.label for column in RUN_COLUMNS), best, strict=False))
    return [cells[DESCRIBED[NET].label], cells["way"], cells["prefix"], cells["B"]]
