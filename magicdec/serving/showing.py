"""What the commands that serve requests show: a line for each pass, which says whether its tokens
are right, a table with a column for each pass or a row for each rate of `--sweep_rate`, and
pictures of requests over time and of the rates. Imports no torch, and matplotlib only to draw.

Reads records only. Must not know what any pass does, nor how a metric is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec import gantt
from magicdec.figures import COLOURS, saved_figure
from magicdec.gantt import Bar, Look, Panel
from magicdec.records.metric_tables import fixed, metric_columns, metric_rows
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import PassRecord, RequestRecord, ServingRecord
from magicdec.serving.saturation import (
    SUSTAINED,
    is_sustained,
    saturation_rate,
    share_sustained,
)
from magicdec.tables import Column, Line, Table

RATE_COLUMNS = (
    *("arrival_rate", "served_rate", "request_goodput", "output_throughput", "p50_ttft_ms"),
    *("p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "mean_in_flight", "peak_memory_bytes"),
)


def tables(records: Sequence[ServingRecord]) -> list[Table]:
    """Of what one command measured: several rates under one batching, or several batchings."""
    metrics = [record.metrics for record in records]
    if any(each is not None and each.served_rate is not None for each in metrics):
        return [rates_table(records)]
    workload = records[0].config["workload"]
    output = "" if workload["gen_len"] is None else f", output length {workload['gen_len']}"
    what = f"arrival {workload['arrival']}{output}, max concurrency {workload['max_concurrency']}"
    rows = metric_rows(ServingMetrics, metrics)
    return [passes_table(records, what, rows)]


def passes_table(
    records: Sequence[PassRecord], what: str, rows: Sequence[Sequence[object]]
) -> Table:
    """A table with a column for each pass, below whether its tokens are right. `what` is said of
    the requests in its title."""
    newest = records[-1]
    model, count = newest.config["model"], newest.config["workload"]["num_requests"]
    return Table(
        [Column("", is_text=True, key="metric"), *(record.name for record in records)],
        rows,
        title=f"{model['model']} ({model['dtype']}), {newest.workload.dataset}: "
        f"{count} request{'s' * (count != 1)}, {what}",
        above=[
            Line(verdict(record), "bold red" if record.status == "diverged" else "bold")
            for record in records
        ],
    )


def verdict(record: PassRecord) -> str:
    """Whether the tokens are those of the reference, in a line."""
    name, total = record.name, len(record.requests)
    if record.reference is None:
        return f"{name}: its tokens are not checked, because there is no other pass"
    if name == record.reference:
        return f"{name}: the reference of the others"
    if record.num_differing is None:
        return f"{name}: sampled, so the tokens of drafts are not compared"
    if record.num_differing == 0:
        return f"{name}: all {total} requests have the tokens of {record.reference}"
    text = f"{record.num_differing} of {total} requests differ from {record.reference}"
    why = "; rounding may be the reason" if record.status == "differs" else ""
    return f"{name}: {record.status.upper()}, {text}{why}"


def rates_table(records: Sequence[ServingRecord]) -> Table:
    """A row for each rate, and the saturation rate."""
    by_rate = measured(records)
    columns, rows = metric_columns(ServingMetrics, [m for _, m in by_rate], RATE_COLUMNS)
    return Table(
        ["rate", "sustained", *columns],
        [
            (f"{rate:.3g}", fixed(share_sustained(metrics), 0, "%", 100), *cells)
            for (rate, metrics), cells in zip(by_rate, rows, strict=True)
        ],
        below=[
            *(
                f"{rate_of(record):.3g}/s: {record.status.upper()}, {record.num_differing} "
                "requests have other tokens than at the first rate"
                for record in records
                if record.num_differing
            ),
            conclusion(records),
        ],
    )


def rate_of(record: ServingRecord) -> float:
    """Requests a second that `--sweep_rate` asked for."""
    return 1e3 / float(str(record.config["workload"]["arrival"]).partition(":")[2])


def measured(records: Sequence[ServingRecord]) -> list[tuple[float, ServingMetrics]]:
    """The rates in ascending order, with what was measured."""
    pairs = [(rate_of(r), r.metrics) for r in records if r.metrics is not None]
    return sorted(pairs, key=lambda pair: pair[0])


def saturation_of(records: Sequence[ServingRecord]) -> float | None:
    return saturation_rate([(rate, is_sustained(metrics)) for rate, metrics in measured(records)])


def conclusion(records: Sequence[ServingRecord]) -> str:
    """The saturation rate in a line."""
    rate = saturation_of(records)
    bounds = records[0].config["workload"]["goodput"]
    what = f"requests are served at {SUSTAINED:.0%} of the rate at which they arrive, or faster"
    if bounds:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in bounds.items())
        what = f"{SUSTAINED:.0%} of the requests keep {limits}"
    if rate is None:
        return f"no rate was sustained: at none of them {what}"
    return f"saturation rate: {rate:.3g} requests/s, the largest at which {what}"


def draw_rates(records: Sequence[ServingRecord], path: Path) -> None:
    """Draw the rate served and the times to the first token by rate, in the format that the name of
    `path` ends in."""
    from matplotlib.ticker import LogLocator, NullLocator

    by_rate = measured(records)
    saturation = saturation_of(records)
    rates = [rate for rate, _ in by_rate]
    curves = [
        (0, "served_rate", "served", "o-"), (0, "request_goodput", "goodput", "s--"),
        (1, "p50_ttft_ms", "median", "o-"), (1, "p99_ttft_ms", "p99", "s--"),
    ]  # fmt: skip
    with saved_figure("--plot", path, (9, 3.4), 1, 2) as (_, panels):
        panels[0].plot(rates, rates, ":", color="#666666", label="arrivals")
        for (place, name, label, line), colour in zip(curves, COLOURS, strict=False):
            values = [getattr(metrics, name) for _, metrics in by_rate]
            if None not in values:
                panels[place].plot(rates, values, line, color=colour, label=label)
        panels[0].set_ylim(bottom=0)
        panels[1].set_yscale("log")
        panels[1].yaxis.set_major_formatter("{x:g}")
        panels[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[1].yaxis.set_minor_locator(NullLocator())
        for axes, label in zip(panels, ("requests/s", "time to first token, ms"), strict=True):
            if saturation is not None:
                axes.axvline(saturation, color="#999999", linewidth=1, label="saturation rate")
            axes.set_xlim(left=0)
            axes.set_xlabel("arrivals, requests/s")
            axes.set_ylabel(label)
            axes.legend()


WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"
LOOKS = {WAITING: Look("#cccccc"), PREFILL: Look("#D55E00"), DECODE: Look("#0072B2")}
Span = tuple[str, float, float]  # the kind, its begin and its length in seconds
NUM_NAMES = 10  # rows of the picture whose request is named, at least


def spans_of(request: RequestRecord) -> list[Span]:
    """What happened to a request from its arrival to its end. After a preemption it waits again,
    and its text is prefilled again."""
    spans, left_ms = list[Span](), request.arrival_ms
    ends = [*request.preempted_ms, request.finished_ms]
    for joined, prefilled, end in zip(request.joined_ms, request.prefilled_ms, ends, strict=True):
        ready = min(prefilled, end)
        parts = ((WAITING, left_ms, joined), (PREFILL, joined, ready), (DECODE, ready, end))
        spans += [(kind, a / 1e3, (b - a) / 1e3) for kind, a, b in parts if b > a]
        left_ms = end
    return spans


def draw_timeline(records: Sequence[ServingRecord], path: Path) -> None:
    """Draw when each request waited, was prefilled and decoded, with a panel for each record, in
    the format that the name of `path` ends in."""
    end_s = max(request.finished_ms for each in records for request in each.requests) / 1e3
    gantt.draw("--plot", path, [timeline(record, end_s) for record in records], LOOKS)


def timeline(record: ServingRecord, end_s: float) -> Panel:
    """The panel of a record, with a row for each request."""
    count, own_end_s = len(record.requests), max(r.finished_ms for r in record.requests) / 1e3
    every = max(1, count // NUM_NAMES)
    return Panel(
        f"{record.name}: {own_end_s:.2f} s",
        [f"request {row}" if row % every == 0 else "" for row in range(count)],
        [
            Bar(row, begin_s, begin_s + length_s, LOOKS[kind])
            for row, request in enumerate(record.requests)
            for kind, begin_s, length_s in spans_of(request)
        ],
        end_s,
        marks_s=[own_end_s],
        row_inches=min(4.0, max(1.4, 0.07 * count + 0.6)) / (count + gantt.TITLE_ROWS),
    )
