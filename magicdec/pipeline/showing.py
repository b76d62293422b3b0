"""What `magicdec recurrent` shows of a ring: a table of its passes and one of its stages, Gantt
charts of the samples that every stage computed, and tokens and memory against time, as CSV files
and as plots with curves for each number of nodes. Imports no torch, and matplotlib only to draw.

Must not know how a metric is computed.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec import gantt
from magicdec.figures import LINES, look, saved_figure
from magicdec.gantt import Bar, Look, Panel
from magicdec.pipeline.metrics import PipelineRecord, RingMetrics
from magicdec.pipeline.options import RING, SPECULATIVE_RING
from magicdec.records.metric_tables import fixed, metric_rows
from magicdec.records.writing import append_line, write_text
from magicdec.request import Request
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.showing import passes_table
from magicdec.tables import Table, csv_text

if TYPE_CHECKING:
    from torch import Tensor

    from magicdec.pipeline.tracing import RingTrace

ROWS = (
    *("makespan_s", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p50_itl_ms", "p99_itl_ms", "mean_e2el_ms"),
)


def tables(records: Sequence[PipelineRecord]) -> list[Table]:
    """Of the passes of one command, and of the stages of each ring."""
    rows = metric_rows(ServingMetrics, [record.metrics for record in records], ROWS)
    in_flight = records[-1].config["workload"]["n_samples"]
    return [
        passes_table(records, f"{in_flight} in flight", rows),
        *(stage_table(record.name, record.ring) for record in records if record.ring is not None),
        *describe_speedup(records),
    ]


def stage_table(name: str, ring: RingMetrics) -> Table:
    """A row for each stage, and the round as predicted and as measured."""
    numbers = zip(
        *(ring.num_layers, ring.busy, ring.decode_ms, ring.queue_depth),
        *(ring.sent_messages, ring.sent_bytes),
        strict=True,
    )
    labels = "stage", "layers", "busy", "idle", "ms a message", "queue depth", "messages"
    return Table(
        [*labels, "bytes a message"],
        [
            (stage, layers, fixed(busy, 0, "%", 100), fixed(1 - busy, 0, "%", 100), fixed(ms, 2),
             fixed(depth, 2), fixed(messages, 0), fixed(num_bytes / messages, 0))
            for stage, (layers, busy, ms, depth, messages, num_bytes) in enumerate(numbers)
        ],
        title=name,
        below=describe_round(ring),
    )  # fmt: skip


def describe_round(ring: RingMetrics) -> list[str]:
    """The link, and the round as predicted and as measured."""
    lines = []
    if ring.link_ms is not None:
        lines.append(f"link: {1e3 * ring.link_ms:.0f} us for {ring.decode_hop_bytes:,} bytes")
    if ring.acceptance_rate is not None:
        lines.append(
            f"drafts: {ring.num_accepted:,} of {ring.num_drafted:,} accepted "
            f"({ring.acceptance_rate:.0%}), {ring.tokens_per_round:.2f} tokens a round, drafted in "
            f"{ring.draft_ms:.2f} ms a message"
        )
    if ring.measured_round_ms is not None:
        lines.append(
            f"round of {ring.num_lanes} lanes: predicted {ring.predicted_round_ms:.2f} ms, "
            f"measured {ring.measured_round_ms:.2f} ms"
        )
    return lines


def describe_speedup(records: Sequence[PipelineRecord]) -> list[Table]:
    """What drafts gain over the ring without them, in a line."""
    metrics = {record.name: record.metrics for record in records}
    plain, drafted = metrics.get(RING), metrics.get(SPECULATIVE_RING)
    if plain is None or drafted is None:
        return []
    times = drafted.output_throughput / plain.output_throughput
    return [Table(above=[f"with drafts, the ring has {times:.2f}x the output tokens/s"])]


# Light, so that the text on a bar can be read.
COLOURS = (
    *("#8ecae6", "#ffb703", "#95d5b2", "#f4a6a0", "#c8b6ff", "#d4a373", "#ffd6a5", "#a3cef1"),
    *("#e9c46a", "#b5e48c"),
)
PROMPT, HEAD, DECODE = "prompt", "head, sampling, drafting and scheduling", "decoding"
LEGEND = {
    DECODE: Look("#d9d9d9"),
    PROMPT: Look("#d9d9d9", hatch="////"),
    HEAD: Look("#555555", height=0.3),
}
SHOWN_SPANS = 60  # of the slowest stage, of messages that decode: what a chart shows
SHOWN_BEFORE = 0.25  # of that is shown before the last stage computes the first of these messages


def draw_ring(flag: str, path: Path, trace: RingTrace, until_ms: float | None) -> None:
    """Draw which sample every stage computed when, and where every sample was, of the first
    `until_ms`. Without it, the charts show how the first samples begin to decode. Raises
    ValueError, naming the flag, if there are too many rows or the file cannot be written."""
    origin_s = trace.stages[0][0][0]
    end_s = max(end for spans in [*trace.stages, trace.head] for _, end in spans) - origin_s
    begin_s, until_s = decoding_window(trace) if until_ms is None else (0.0, until_ms / 1e3)
    gantt.draw(flag, path, panels_of(trace, origin_s, begin_s, min(until_s, end_s)), LEGEND)


def decoding_window(trace: RingTrace) -> tuple[float, float]:
    """When the time that is shown begins and ends, in seconds after the first message began. A
    trace in which nothing decodes is shown from its beginning."""
    are_prompts = trace.are_prompts if not all(trace.are_prompts) else [False] * len(trace.samples)
    decoding = [
        [span for span, is_prompt in zip(spans, are_prompts, strict=True) if not is_prompt]
        for spans in trace.stages
    ]
    length_s = SHOWN_SPANS * max(sum(e - b for b, e in spans) / len(spans) for spans in decoding)
    first_s = decoding[-1][0][0] - trace.stages[0][0][0]
    begin_s = max(0.0, first_s - SHOWN_BEFORE * length_s)
    return begin_s, begin_s + length_s


def panels_of(trace: RingTrace, origin_s: float, begin_s: float, until_s: float) -> list[Panel]:
    """Both charts between two times after `origin_s`."""
    bars = [
        bar for bar in bars_of(trace, origin_s)
        if bar[1].begin_s < until_s and bar[1].end_s > begin_s
    ]  # fmt: skip
    samples = sorted({sample for each, _ in bars for sample in each})
    place = {sample: row for row, sample in enumerate(samples)}
    error = f" (clocks within {1e3 * trace.clock_error_s:.2f} ms)" if trace.clock_error_s else ""
    names = [f"stage {n}" for n in range(len(trace.stages))]
    of_stages = [bar for _, bar in bars]
    of_samples = [
        Bar(place[sample], bar.begin_s, bar.end_s, look_of(sample, bar.look), str(bar.row))
        for each, bar in bars for sample in each if bar.look is not LEGEND[HEAD]
    ]  # fmt: skip
    return [
        Panel(f"stages, and the sample that each computes{error}", names, of_stages, until_s,
              begin_s=begin_s),
        Panel("samples, and the stage that computes each",
              [f"sample {sample}" for sample in samples], of_samples, until_s,
              begin_s=begin_s),
    ]  # fmt: skip


def bars_of(trace: RingTrace, begin_s: float) -> Iterator[tuple[Sequence[int], Bar]]:
    """The bars of the chart of stages, each with its samples."""
    for stage, spans in enumerate(trace.stages):
        messages = zip(spans, trace.samples, trace.are_prompts, strict=True)
        for (begin, end), samples, is_prompt in messages:
            look = look_of(samples[0], LEGEND[PROMPT if is_prompt else DECODE])
            text = ",".join(map(str, samples))
            yield samples, Bar(stage, begin - begin_s, end - begin_s, look, text)
    for begin, end in trace.head:
        yield (), Bar(0, begin - begin_s, end - begin_s, LEGEND[HEAD])


def look_of(sample: int, look: Look) -> Look:
    """The same look in the colour of the sample."""
    return Look(COLOURS[sample % len(COLOURS)], look.height, look.hatch)


Points = list[tuple[float, ...]]
ALL_SAMPLES, EACH_SAMPLE = "tokens_time_samples", "tokens_time_per_sample"
MEMORY = "memory"
SAMPLE_COLUMNS = ("sample", "tokens", "time_s")
MEMORY_COLUMNS = ("rank", "time_s", "memory_mb")
RUN_COLUMNS = ("timestamp", "n_samples", "n_layers", "context_size", "gen_time", "n_nodes")
BYTES_PER_MB = 1e6
SIZE = 7.4, 3.6  # inches


@dataclass(frozen=True)
class Curves:
    """The files of runs that generate `num_samples` samples with one model, in `folder`, which the
    user named by `flag`. `tokens_time_samples_*.csv` has the form of MDI-LLM's logs: seconds and
    the number of tokens so far, without a header."""

    flag: str
    folder: Path
    model: str
    num_samples: int

    @property
    def name(self) -> str:
        model = re.sub(r"[^\w.-]+", "-", self.model.rstrip("/").rpartition("/")[2])
        return f"{model}_{self.num_samples}samples"

    def plot(self, what: str) -> Path:
        """The plot of `time_vs_tokens` or `memory_vs_time`."""
        return self.folder / f"{what}_{self.name}.png"

    def path(self, what: str, num_nodes: int) -> Path:
        """The file of a run: `ALL_SAMPLES`, `EACH_SAMPLE` or `MEMORY`."""
        return self.folder / f"{what}_{num_nodes}nodes_{self.name}.csv"

    def write(
        self, num_nodes: int, requests: Sequence[Request], memory: Sequence[Tensor], begin_s: float
    ) -> None:
        """Write the files of a run, in place of those of an earlier one. `memory` has the samples
        of each rank, [N, 2]: seconds and bytes. Times count from `begin_s`. Raises ValueError."""
        together = [(f"{at_s:.6f}", count) for at_s, count in points_of(requests, begin_s)]
        tokens = [
            (request.request_id, count, f"{at_s - begin_s:.6f}")
            for request in requests
            for count, at_s in enumerate(request.token_times_s, 1)
        ]
        sizes = [
            (rank, f"{at_s - begin_s:.3f}", f"{num_bytes / BYTES_PER_MB:.3f}")
            for rank, samples in enumerate(memory)
            for at_s, num_bytes in samples.tolist()
        ]
        write_text(self.flag, self.path(ALL_SAMPLES, num_nodes), csv_text(together))
        write_text(
            self.flag, self.path(EACH_SAMPLE, num_nodes), csv_text([SAMPLE_COLUMNS, *tokens])
        )
        write_text(self.flag, self.path(MEMORY, num_nodes), csv_text([MEMORY_COLUMNS, *sizes]))

    def numbers_of_nodes(self, what: str) -> list[int]:
        """Of all runs that have such a file."""
        begin, end = re.escape(self.path(what, 0).name).split("0", 1)
        matches = (re.fullmatch(rf"{begin}(\d+){end}", file.name) for file in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match is not None)

    def draw(self) -> None:
        """Draw the files of all numbers of nodes. Raises ValueError if one cannot be read, or a
        plot cannot be written."""
        self.draw_tokens()
        self.draw_memory()

    def draw_tokens(self) -> None:
        """A colour for each number of nodes; the curves of single samples are thinner."""
        plot = self.plot("time_vs_tokens")
        with saved_figure(self.flag, plot, SIZE, 1, 2) as (figure, (ours, each)):
            for index, num_nodes in enumerate(self.numbers_of_nodes(ALL_SAMPLES)):
                style = look(index)
                points = self.rows(self.path(ALL_SAMPLES, num_nodes))
                end_s, count = points[-1]
                label = f"{num_nodes} node{'s' * (num_nodes > 1)}: {count / end_s:,.1f} tokens/s"
                line = {"color": style.colour, "linestyle": style.line}
                times, counts = zip(*points, strict=True)
                ours.plot(counts, times, label=label, **line)
                for curve in by_first(self.rows(self.path(EACH_SAMPLE, num_nodes), has_head=True)):
                    each.plot(*zip(*curve, strict=True), linewidth=0.6, **line)
            for ax, whose in ((ours, f"all {self.num_samples} samples"), (each, "each sample")):
                ax.set(title=whose, ylabel="seconds", xlabel=f"output tokens of {whose}")
                ax.set_xlim(left=0)
                ax.set_ylim(bottom=0)
            figure.suptitle(self.model)
            figure.legend(loc="outside lower center", ncols=3)

    def draw_memory(self) -> None:
        """A colour for each number of nodes, a line style for each rank."""
        plot = self.plot("memory_vs_time")
        with saved_figure(self.flag, plot, SIZE) as (figure, (ax,)):
            for index, num_nodes in enumerate(self.numbers_of_nodes(MEMORY)):
                ranks = by_first(self.rows(self.path(MEMORY, num_nodes), has_head=True))
                for rank, points in enumerate(ranks):
                    ax.plot(*zip(*points, strict=True), color=look(index).colour,
                            linestyle=LINES[rank % len(LINES)],
                            label=memory_label(num_nodes, rank, points))  # fmt: skip
            ax.axvline(0, color="black", linewidth=0.6)
            ax.set(title="memory of each rank", ylabel="MB")
            ax.set_xlabel("seconds since the prompts arrived; loading and warm-up before")
            ax.set_ylim(bottom=0)
            figure.suptitle(self.model)
            figure.legend(loc="outside lower center", ncols=3)

    def rows(self, path: Path, has_head: bool = False) -> Points:
        """The numbers of a file. Raises ValueError if it cannot be read."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.reader(file))[has_head:]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.flag} {path} cannot be read: {error}") from None
        return [tuple(map(float, line)) for line in lines]


def points_of(requests: Sequence[Request], begin_s: float) -> list[tuple[float, int]]:
    """When how many tokens of all requests together were known, from (0, 0) on."""
    times_s = sorted(at_s - begin_s for request in requests for at_s in request.token_times_s)
    return [(0.0, 0), *((at_s, count) for count, at_s in enumerate(times_s, 1))]


def by_first(rows: Points) -> list[Points]:
    """The rows without their first number, a list for each of its values in their order."""
    curves: dict[float, Points] = defaultdict(list)
    for first, *rest in rows:
        curves[first].append(tuple(rest))
    return list(curves.values())


def memory_label(num_nodes: int, rank: int, points: Points) -> str:
    most = max(megabytes for _, megabytes in points)
    place = "1 node" if num_nodes == 1 else f"{num_nodes} nodes, rank {rank}"
    return f"{place}: at most {most:,.0f} MB"


def append_run(path: Path, values: Sequence[object]) -> None:
    """Append a line with the values of RUN_COLUMNS; a new file gets their names first. Raises
    OSError."""
    if not path.exists() or not path.stat().st_size:
        append_line(path, ",".join(RUN_COLUMNS))
    append_line(path, csv_text([values]).rstrip())
