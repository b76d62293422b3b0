"""The page of the study, with its tables and the sentences that have numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from trace_study.arms import ARMS, LLAMA, VLLM
from trace_study.cells import DRAFTS, Cell, Study, cells_of, form_of, sessions_an_hour
from trace_study.figure import FORMS, draw
from trace_study.pieces import MLPERF, TRACES, WEKA
from wrap_pages import wrapped

from magicdec.output.tables import Column, Table
from magicdec.records.intervals import ratio_interval
from magicdec.records.pass_record import PassRecord

BEGIN = "<!-- {}: scripts/dev/traces_study.py -->"
END = "<!-- end of {} -->"


def arms_table(study: Study) -> str:
    columns: list[Column | str] = [
        Column("arm", is_text=True),
        "traces",
        "sessions an hour, in flight = 1",
        *(f"of {name}" for name in FORMS.values()),
        "TTFT",
        "TPOT",
        "found, in flight",
        "found",
        "acceptance rate",
        "acceptance length",
        "requests with other tokens",
    ]
    rows = []
    for arm in study.arms:
        named = study.by_trace(arm.name)
        cells = list(named.values())
        parts = [[c for name, c in named.items() if form_of(name) == form] for form in FORMS]
        rows.append(
            [
                arm.label,
                len(cells),
                *(shown(mean_ratio(part, "sessions_per_hour"), 2) for part in (cells, *parts)),
                shown(mean_ratio(cells, "mean_ttft_ms"), 2),
                shown(mean_ratio(cells, "mean_tpot_ms"), 2),
                shown(share_found([cell.plain for cell in cells]), 3),
                shown(share_found([cell.record for cell in cells]), 3),
                *(shown(value, 2) for value in acceptance_of(cells)),
                differing(cells),
            ]
        )
    return Table(columns, rows).markdown()


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def mean_ratio(cells: Sequence[Cell], key: str) -> float | None:
    """The geometric mean of a metric over that of `inflight`."""
    pairs = [(getattr(c.record.metrics, key), getattr(c.plain.metrics, key)) for c in cells]
    ratios = [value / plain for value, plain in pairs if value and plain]
    return geometric_mean(ratios) if ratios else None


def share_found(records: Sequence[PassRecord]) -> float | None:
    """Tokens that prefix caches found, of those that one without limits would have found."""
    requests = [request for record in records for request in record.requests]
    found = [sum(r.joined_prefix_tokens) for r in requests if r.joined_prefix_tokens is not None]
    known = [r.num_known_tokens or 0 for r in requests if r.joined_prefix_tokens is not None]
    return sum(found) / sum(known) if sum(known) else None


def acceptance_of(cells: Sequence[Cell]) -> tuple[float | None, float | None]:
    """The acceptance rate and length of all traces together."""
    every = [cell.record.metrics for cell in cells if cell.record.metrics is not None]
    drafted = sum(metrics.num_draft_tokens or 0 for metrics in every)
    accepted = sum(metrics.num_accepted_draft_tokens or 0 for metrics in every)
    steps = sum(metrics.num_spec_steps or 0 for metrics in every)
    return (accepted / drafted, 1 + accepted / steps) if drafted and steps else (None, None)


def differing(cells: Sequence[Cell]) -> str:
    counts = [cell.record.num_differing for cell in cells]
    if any(count is None for count in counts):
        return "not compared"
    total = sum(len(cell.record.requests) for cell in cells)
    return f"{sum(count or 0 for count in counts)} of {total:,}"


def traces_table(study: Study) -> str:
    columns: list[Column | str] = [
        Column("trace", is_text=True),
        Column("file", is_text=True),
        Column("part", is_text=True),
        "scale",
        "at once",
        "sessions, calls",
        "prompt tokens, longest",
        "output tokens",
        "sessions an hour in flight",
        "known before",
        *(arm.label for arm in study.arms),
    ]
    rows = []
    for trace in study.traces:
        cells = study.by_arm(trace.name)
        plain = study.plain_of(trace.name)
        requests = plain.requests
        assert plain.metrics is not None
        prompts = [request.prompt_len for request in requests]
        rows.append(
            [
                trace.name,
                f"`{trace.file}`",
                trace.part,
                trace.scale,
                trace.concurrency,
                f"{len({r.conversation for r in requests})}, {len(requests)}",
                f"{sum(prompts):,}, {max(prompts):,}",
                f"{sum(r.output_len for r in requests):,}",
                f"{sessions_an_hour(plain):,.0f}",
                shown(plain.metrics.theoretical_hit_rate, 3),
                *(shown(cells[a.name].ratio if a.name in cells else None, 2) for a in study.arms),
            ]
        )
    return Table(columns, rows).markdown()


def findings(study: Study) -> str:
    """What follows from the numbers, in sentences."""
    return "\n".join(f"- {sentence}" for sentence in sentences(study))


def sentences(study: Study) -> Iterator[str]:
    plains = [study.plain_of(trace.name) for trace in study.traces]
    prompts = sum(request.prompt_len for plain in plains for request in plain.requests)
    outputs = sum(request.output_len for plain in plains for request in plain.requests)
    calls = sum(len(plain.requests) for plain in plains)
    yield (
        f"The {len(plains)} traces have {calls:,} calls with {prompts:,} prompt tokens and "
        f"{outputs:,} new ones."
    )
    for arm in study.arms:
        ratios = {name: cell.ratio for name, cell in study.by_trace(arm.name).items()}
        least = min(ratios, key=ratios.__getitem__)
        most = max(ratios, key=ratios.__getitem__)
        ends = ratio_interval([*ratios.values()])
        interval = "" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]"
        yield (
            f"{arm.label}: {geometric_mean(ratios.values()):.2f}{interval} times as many sessions "
            f"end in an hour as in flight, {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} "
            f"({most})."
        )
    if (share := share_found(plains)) is not None:
        others = {
            name: share_found([cell.record for cell in study.by_trace(name).values()])
            for name in (LLAMA, VLLM)
        }
        rest = "".join(f", that of {n} {v:.3f}" for n, v in others.items() if v is not None)
        yield f"Our prefix cache finds {share:.3f} of what one without limits has{rest}."
    for form, what in ((MLPERF, "real text"), (WEKA, "text of blocks")):
        parts = list[str]()
        for arm in study.arms:
            lengths = study.by_turn(arm.name, form) if arm.name in DRAFTS else {}
            if len(lengths) > 1:
                (first, begin), *_, (last, end) = lengths.items()
                parts.append(f"{arm.label} {begin:.2f} and {end:.2f}")
        if parts:
            yield (
                f"On {what} a step emits in turn {first} and in turns {last}: {', '.join(parts)} "
                "tokens."
            )


def measured_on(study: Study) -> str:
    records = [record for cell in study.cells.values() for record in (cell.plain, cell.record)]
    found = {record.environment.cpu: record.environment for record in records}
    days = sorted({record.environment.time_utc[:10] for record in records})
    machines = " and ".join(
        f"{env.num_cpus} cores of an {cpu} with {env.cpu_capability}" for cpu, env in found.items()
    )
    taken = max(record.environment.cores_taken or 0.0 for record in records)
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Measured on {machines}, {dates}, {len(study.cells)} of {len(TRACES) * len(ARMS)} cells; "
        f"other programs took at most {100 * taken:.0f} % of the cores during a command."
    )


PARTS: dict[str, Callable[[Study], str]] = {
    "machine": measured_on,
    "findings": findings,
    "arms": arms_table,
    "traces": traces_table,
}


def page_of(text: str, study: Study) -> str:
    """The page with its generated parts as they are now."""
    for name, make in PARTS.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        assert begin and end, name
        text = f"{before}{begin}\n\n{make(study).strip()}\n\n{end}{after}"
    return wrapped(text)


def write_page(records: Path, page: Path, figure: Path) -> None:
    """Draws the figure, and writes the generated parts of the page if there is one."""
    study = Study(cells_of(records))
    if not study.cells:
        raise SystemExit(f"{records} has no cells yet; give --traces")
    draw(study, figure)
    if page.is_file():
        page.write_text(page_of(page.read_text(), study))
    print(findings(study))
