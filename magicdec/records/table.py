"""The table of one run, its passes side by side, with the rows that matter most or all of them.
`bench/report/listing.py` lists many runs.

A percentile has a row only with enough sequences, and stalls only if a step stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from magicdec.records.performance import Metrics

from magicdec.names import BASELINE, EAGLE, FULL_KV_POLICY, NARROW
from magicdec.output.tables import Column, Line, Table, text_of
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.correctness import (
    Correctness,
    Divergence,
    ForwardErrors,
    JudgedAgain,
)
from magicdec.records.fields import Recorded, described_fields
from magicdec.records.metric_tables import (
    MANY,
    break_even_length,
    category_tables,
    has_enough,
    metric_rows,
)
from magicdec.records.record import RunRecord
from magicdec.records.workload import format_mark

STYLES = {"ok": "bold", "ok_with_ties": "bold yellow"}


def print_record(record: RunRecord, is_verbose: bool = False) -> None:
    tables = table_of(record, is_verbose), *category_tables(method(record), record.metrics)
    for table in tables:
        table.print()


def table_of(record: RunRecord, is_verbose: bool = False) -> Table:
    """The result of the check, the baseline and the strategy side by side, and whether speculation
    pays. With `is_verbose` what else was checked, and all rows."""
    verdict = Line(verdict_of(record, is_verbose), STYLES.get(record.status, "bold red"))
    if record.metrics is None:
        return Table(above=[verdict])
    # In two lines, so that 80 columns have room for the rows beside it.
    column = Column(method(record).replace(", ", ",\n", 1), key=method(record))
    passes = [column] if record.baseline_metrics is None else [BASELINE, column]
    shown = SHOWN if is_verbose else BRIEF
    rows = [(label, *cells) for label, cells in table_rows(record, shown)]
    return Table(
        [Column("", is_text=True), *passes],
        rows,
        _title(record),
        above=[verdict],
        below=[
            *pays_of(record),
            *stalls_of(record),
            *(record.workload.left_out_lines if record.workload is not None else ()),
        ],
    )


def method(record: RunRecord) -> str:
    """A run's way to decode: drafter, low-bit weights, KV policy, budget and gamma."""
    return method_of(record.config)


def method_of(config: dict[str, Any]) -> str:
    decoding = config["decoding"]
    if decoding["strategy"] == BASELINE:
        return BASELINE
    names = {"model": "standalone draft", "self": "self-speculation", EAGLE: "EAGLE-3 head"}
    looked_up, plus, last = decoding["drafter"].rpartition("+")
    drafter = looked_up + plus + names.get(last, f"{last} draft")
    weights = decoding.get("draft_weights")
    drafter += f" in {weights}" if weights else ""
    policy = policy_of(config)
    reads = []
    if policy is not None:
        reads = ["full KV" if policy == FULL_KV_POLICY else f"{policy} {config['kv']['budget']}"]
    gamma = f"gamma {decoding['gamma']}"
    emulated = decoding.get("emulate_acceptance")
    if emulated is not None:
        gamma += f", EMULATED acceptance {' '.join(f'{rate:g}' for rate in emulated)}"
    if decoding.get("pa") is not None:
        gamma += f", pa {decoding['pa']:g}"
    return ", ".join([drafter, *reads, gamma])


def _title(record: RunRecord) -> str:
    c = record.config
    e = record.environment
    w = c["workload"]
    parallel = c["parallel"]
    dataset = "" if record.workload is None else f", {record.workload.text}{format_mark(c)}"
    bandwidth = e.read_bandwidth_bytes_per_s
    read = "" if bandwidth is None else f", {bandwidth / 1e9:.1f} GB/s read"
    return (
        f"{c['model']['model']} ({dtypes_of(c['model'])}){dataset}: "
        f"B {w['batch_size']}, prefix {w['prefix_len']}, {w['gen_len']} new tokens, "
        f"{batches(w['num_batches'])}; "
        f"ranks {e.world_size} x threads {e.threads}, "
        f"{parallel.get('collectives') or parallel['device']}{read}"
    )


def dtypes_of(model: dict[str, Any]) -> str:
    """The dtype of a model from a record's config, and that of its weights if it is narrow."""
    dtype: str = model["dtype"]
    weights = model["target_dtype"]
    return f"{dtype}, {weights} weights" if weights in NARROW else dtype


def verdict_of(record: RunRecord, is_verbose: bool = True) -> str:
    """One line with the verdict of a run, and with `is_verbose` or where it is not right the
    finding of each check."""
    c = record.correctness
    if record.status == "failed":
        return f"failed: {record.error}"
    assert c is not None, "only a record of a run that failed has none"
    if c.reference is None:
        return f"{c.num_tokens} tokens; not compared with another way of decoding them"
    compared = f"{c.num_tokens} tokens compared with {c.reference}"
    where = "" if c.first_divergence is None else f"; {place_text(c.first_divergence)}"
    checked = f"{judged_text(c.judged_again)}{measured_text(c.forwards)}"
    if not record.passed:
        differences = ", no difference" if c.identical else f"{where}{explained_text(c)}"
        return f"DIVERGED: {compared}{differences}{checked}; no performance is reported"
    if c.identical:
        return f"identical: {compared}, no difference{checked if is_verbose else ''}"
    ties = f"ok with {c.num_excused} tie(s), not identical: {compared}"
    if is_verbose:
        return f"{ties}{where}{explained_text(c)}{checked}"
    return f"{ties}; rounding explains what differs"


def judged_text(found: JudgedAgain | None) -> str:
    """What was judged again, to be added to a line about tokens."""
    if found is None:
        return ""
    text = f"; {found.num_steps} of {found.num_steps_of_all} steps judged again"
    first = found.first_wrong
    if first is None:
        return f"{text}, all right"
    return (
        f"{text}, {found.num_wrong} WRONG, first at sequence {first.sequence}, token {first.index}"
    )


def measured_text(found: ForwardErrors | None, other: str = "the baseline's") -> str:
    """How far the logits are from right ones, those of the reference too, and what could hide, to
    be added to a line about tokens."""
    if found is None or not found.num_positions:
        return ""
    if not found.num_unequal:
        return f"; logits of both passes equal at {found.num_positions} positions"
    text = f"; errors of the logits {found.verify_error:.2g}, {other} {found.decode_error:.2g}"
    if found.alarms:
        limits = ", ".join(
            f"{name} {getattr(found, name):.3g} of at most {getattr(found, f'most_{name}'):.3g}"
            for name in found.alarms
        )
        return f"{text}: TOO LARGE for rounding ({limits})"
    if found.hidden_error is None:
        return f"{text}, at too few positions to say what could hide in them"
    return f"{text}; more than {found.hidden_error:.2g} added to them would have been seen"


def explained_text(c: Correctness) -> str:
    if c.most_differing is None:
        return ""
    differing = (c.num_excused or 0) + (c.num_diverged or 0)
    text = f"; {differing} sequence(s) differ, {limits_text(c)}"
    if differing > c.most_differing:
        return text
    return (
        f"{text}; {c.num_short} token(s) are not the wider model's choice, of the baseline's "
        f"{c.num_short_reference}"
    )


def limits_text(c: Correctness) -> str:
    """What rounding explains: sequences that differ and, where they are no more, margins."""
    text = f"rounding explains up to {c.most_differing}"
    is_more = (c.num_excused or 0) + (c.num_diverged or 0) > (c.most_differing or 0)
    return text if is_more else f"{text}, and margins up to {c.margin_bound:.2g}"


def place_text(first: Divergence) -> str:
    margin = "it ends elsewhere" if first.margin is None else f"margin {first.margin:.2g}"
    return f"first at sequence {first.sequence}, token {first.index} ({margin})"


def stalls_of(record: RunRecord) -> list[str]:
    passes = {BASELINE: record.baseline_metrics, method(record): record.metrics}
    lines = [
        f"{name}: {stalls_in(m, m.num_steps)}"
        for name, m in passes.items()
        if m and m.stalled_steps
    ]
    has_speedup = record.metrics is not None and record.metrics.speedup is not None
    return [*lines, STEADY] if lines and has_speedup else lines


class StalledSteps(Protocol):
    """The metrics of stalled steps, of a run or of a mode."""

    @property
    def stalled_steps(self) -> int | None: ...
    @property
    def longest_stall_ms(self) -> float | None: ...
    @property
    def longest_stall_median_ms(self) -> float | None: ...


def stalls_in(metrics: StalledSteps, num_steps: int | None) -> str:
    longest = metrics.longest_stall_ms
    median = metrics.longest_stall_median_ms
    text = f"{metrics.stalled_steps} of {num_steps} steps stalled"
    if longest is None or median is None:
        return text
    return f"{text} ({longest:.3g} ms where the median is {median:.2g})"


STEADY = "in the speedup a stalled step counts as the median of its kind; in the others in full"
# The rows in order.
SHOWN = (
    "decode_tokens_per_s",
    "speedup",
    "total_speedup",
    "net_speedup",
    "break_even_gen_len",
    "mean_tpot_ms",
    "p50_tpot_ms",
    "p90_tpot_ms",
    "p99_tpot_ms",
    "mean_ttft_ms",
    "prefill_tokens_per_s",
    "answer_score",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "mean_emitted_tokens",
    "acceptance_per_position",
    "num_cancelled_draft_tokens",
    "mean_draft_tokens",
    "kv_tokens_read",
    "begin_ms",
    "draft_prefill_ms",
    "calibration_ms",
    "warmup_calibration_ms",
    "median_step_ms",
    "mean_step_ms",
    "decode_ms",
    "draft_ms",
    "verify_ms",
    "other_ms",
    "num_steps",
    "stalled_steps",
    "stalled_ms",
    "bytes_read",
    "roofline_fraction",
    "peak_memory_bytes",
)
# Those of them that are shown by default.
BRIEF = (
    "decode_tokens_per_s",
    "speedup",
    "total_speedup",
    "net_speedup",
    "mean_tpot_ms",
    "mean_ttft_ms",
    "answer_score",
    "draft_acceptance_rate",
    "mean_emitted_tokens",
    "mean_draft_tokens",
    "median_step_ms",
    "roofline_fraction",
    "peak_memory_bytes",
)
POSITION = Recorded("", digits=2)  # how the share of a draft position is shown
OF_STALLS = ("total_speedup", "stalled_steps", "stalled_ms")  # rows where a step stalled
MEDIANS = ("speedup", "total_speedup", "net_speedup")  # over batches


def table_rows(record: RunRecord, names: Sequence[str] = SHOWN) -> list[tuple[str, list[str]]]:
    """(label, cells of the passes that have metrics) for each row of these that says something."""
    columns = [m for m in (record.baseline_metrics, record.metrics) if m is not None]
    count = MANY if record.workload is None else record.workload.num_prompts
    shown = [name for name in names if has_enough(name, count)]
    if not any(metrics.stalled_steps for metrics in columns):
        shown = [name for name in shown if name not in OF_STALLS]
    rows = []
    for (label, name), *cells in metric_rows(Metrics, columns, shown):
        texts = [text_of(cell) for cell in cells]
        if name in MEDIANS:
            each = getattr(columns[-1], f"{name}_per_batch") or ()
            label = f"{label}, median of {batches(len(each))}"
        if name == "acceptance_per_position":
            texts = [positions_of(metrics) for metrics in columns]
        rows.append((label, texts))
        if name == "mean_emitted_tokens":
            length = break_even(record)
            if length is not None:
                texts = [""] * (len(columns) - 1) + [f"{length:.2f}"]
                rows.append(("  of them that pay (break-even)", texts))
    return rows


def break_even(record: RunRecord) -> float | None:
    """`break_even_length` of the run's drafts, without stalls."""
    metrics = record.metrics
    samples = (record.samples or {}).get(record.config["decoding"]["strategy"])
    if metrics is None or not metrics.speedup or samples is None:
        return None
    num_tokens = sum(map(sum, samples.sequence_tokens))
    of_drafts = metrics.num_spec_steps, metrics.mean_emitted_tokens
    return break_even_length(num_tokens, num_tokens / metrics.speedup, *of_drafts)


def batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"


def pays_of(record: RunRecord) -> list[str]:
    """A sentence that says whether speculation pays, by the net speedup; none without one."""
    metrics = record.metrics
    if metrics is None or metrics.net_speedup is None:
        return []
    count = len(metrics.net_speedup_per_batch or ())
    ends = metrics.net_speedup_interval
    pays = "pays" if metrics.net_speedup > 1 else "does not pay"
    sure = f" in {batches(count)}" if ends is None else ""
    if ends is not None and ends[0] <= 1 <= ends[1]:
        pays = "may or may not pay"
    is_emulated = record.config["decoding"].get("emulate_acceptance") is not None
    subject = "Speculation with EMULATED acceptance" if is_emulated else "Speculation"
    described = {key: about for key, _, about in described_fields(Metrics)}
    net = described["net_speedup"].show_between(metrics.net_speedup, ends)
    return [f"{subject} {pays} here: net speedup {net}{sure}; {_emitted_and_needed(record)}."]


def _emitted_and_needed(record: RunRecord) -> str:
    """The tokens of a verification beside those that it needs, as a part of a sentence."""
    metrics = record.metrics
    assert metrics is not None and metrics.net_speedup is not None, "the run has a speedup"
    emitted = metrics.mean_emitted_tokens
    if emitted is None:
        return "nothing was drafted"
    text = f"a verification emits {emitted:.2f} tokens"
    needed = break_even(record)
    if needed is None:
        return text
    text = f"{text} and pays from {needed:.2f} on"
    if metrics.net_speedup > 1 or emitted <= needed:
        return text
    return f"{text}, which is less than what comes before the first step costs"


def positions_of(metrics: Metrics) -> str:
    shares = metrics.acceptance_per_position or []
    ends = metrics.acceptance_per_position_interval or [[]] * len(shares)
    judged: Sequence[int | None] = metrics.judged_per_position or [None] * len(shares)
    described = POSITION.show_between
    return "\n".join(
        described(share, both) + ("" if count is None else f", {count} judged")
        for share, both, count in zip(shares, ends, judged, strict=True)
    )
