"""Shows what `--sweep_rate` found: a table with a row for each rate, the saturation rate, and a
picture of the rate served and times to first token by rate.

Reads records only. Imports rich and matplotlib only when it shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec.console import make_console
from magicdec.files import save_figure
from magicdec.records.fields import described_fields
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import ServingRecord
from magicdec.serving.saturation import (
    SUSTAINED,
    is_sustained,
    saturation_rate,
    share_sustained,
)
from magicdec.serving.showing.table import print_table

COLUMNS = (
    *("arrival_rate", "served_rate", "request_goodput", "output_throughput", "p50_ttft_ms"),
    *("p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "mean_in_flight", "peak_memory_bytes"),
)


def print_records(records: Sequence[ServingRecord]) -> None:
    """Print what one command measured: several rates under one batching, or several batchings."""
    is_sweep = len({record.config["workload"]["arrival"] for record in records}) > 1
    (print_rates if is_sweep else print_table)(records)


def rate_of(record: ServingRecord) -> float:
    """Requests a second that `--sweep_rate` asked for."""
    return 1e3 / float(str(record.config["workload"]["arrival"]).partition(":")[2])


def measured(records: Sequence[ServingRecord]) -> list[tuple[float, ServingMetrics]]:
    """The rates in ascending order, with what was measured."""
    pairs = [(rate_of(r), r.metrics) for r in records if r.metrics is not None]
    return sorted(pairs, key=lambda pair: pair[0])


def conclusion(records: Sequence[ServingRecord]) -> str:
    """The saturation rate in a line."""
    found = measured(records)
    rate = saturation_rate([(rate, is_sustained(metrics)) for rate, metrics in found])
    bounds = records[0].config["workload"]["goodput"]
    what = f"requests are served at {SUSTAINED:.0%} of the rate at which they arrive, or faster"
    if bounds:
        kept = ", ".join(f"{name} {ms:g} ms" for name, ms in bounds.items())
        what = f"{SUSTAINED:.0%} of the requests keep {kept}"
    if rate is None:
        return f"no rate was sustained: at none of them {what}"
    return f"saturation rate: {rate:.3g} requests/s, the largest at which {what}"


def print_rates(records: Sequence[ServingRecord]) -> None:
    from rich.table import Table

    console, found = make_console(), measured(records)
    descriptions = {key: about for key, _, about in described_fields(ServingMetrics)}
    columns = [c for c in COLUMNS if any(getattr(m, c) is not None for _, m in found)]
    table = Table("rate", "sustained", *(descriptions[c].label for c in columns))
    for column in table.columns:
        column.justify = "right"
    for rate, metrics in found:
        values = [getattr(metrics, column) for column in columns]
        cells = ["" if v is None else descriptions[c].show(v)
                 for c, v in zip(columns, values, strict=True)]  # fmt: skip
        table.add_row(f"{rate:.3g}", f"{share_sustained(metrics):.0%}", *cells)
    console.print(table)
    for record in records:
        if record.num_differing:
            text = f"{record.num_differing} requests have other tokens than at the first rate"
            console.print(f"{rate_of(record):.3g}/s: {record.status.upper()}, {text}")
    console.print(conclusion(records), style="bold")


def draw_rates(records: Sequence[ServingRecord], path: Path) -> None:
    """Write the picture in the format that the name of `path` says."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    found = measured(records)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [rate for rate, _ in found]
    left.plot(rates, rates, ":", color="#666666", label="arrivals")
    left.plot(rates, [m.served_rate for _, m in found], "o-", color="#0072B2", label="served")
    if found and found[0][1].request_goodput is not None:
        good = [m.request_goodput for _, m in found]
        left.plot(rates, good, "s--", color="#009E73", label="goodput")
    right.plot(rates, [m.p50_ttft_ms for _, m in found], "o-", color="#0072B2", label="median")
    right.plot(rates, [m.p99_ttft_ms for _, m in found], "s--", color="#D55E00", label="p99")
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_minor_locator(NullLocator())
    saturation = saturation_rate([(rate, is_sustained(metrics)) for rate, metrics in found])
    for axes, label in ((left, "requests/s"), (right, "time to first token, ms")):
        if saturation is not None:
            axes.axvline(saturation, color="#999999", linewidth=1, label="saturation rate")
        axes.set_xlim(left=0)
        axes.set_xlabel("arrivals, requests/s")
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure("--plot", path, figure)
