"""Prints one record as a table, with the passes of the run side by side. `report/listing.py` prints
many records. The label and the format of a metric are declared with its field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from magicdec.console import make_console
from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.correctness import Correctness, Divergence
from magicdec.records.fields import Recorded, description_of
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord

# The rows of one run's table, in order.
SHOWN = (
    *("decode_tokens_per_s", "speedup", "net_speedup", "break_even_gen_len"),
    *("mean_tpot_ms", "p50_tpot_ms", "p90_tpot_ms", "p99_tpot_ms"),
    *("mean_ttft_ms", "prefill_tokens_per_s", "answer_score"),
    *("acceptance_rate", "acceptance_length", "mean_emitted_tokens"),
    *("acceptance_per_position", "mean_draft_tokens", "kv_tokens_read"),
    *("begin_ms", "draft_prefill_ms", "calibration_ms", "warmup_calibration_ms"),
    *("mean_step_ms", "decode_ms", "draft_ms", "verify_ms", "other_ms"),
    *("bytes_read", "roofline_fraction", "peak_memory_bytes"),
)
STYLES = {"ok": "bold", "ok_with_ties": "bold yellow"}


def rows() -> list[tuple[str, Recorded]]:
    """(metric, its description) for each row of the table of one run."""
    found = {item.name: description_of(item) for item in fields(Metrics)}
    return [(name, found[name]) for name in SHOWN]


def print_record(record: RunRecord) -> None:
    """Print one run: the result of the check, and the baseline and the strategy side by side."""
    from rich.table import Table

    console = make_console()
    console.print(_verdict(record), style=STYLES.get(record.status, "bold red"))
    if record.metrics is None:
        return
    columns = [m for m in (record.baseline_metrics, record.metrics) if m is not None]
    table = Table(title=_title(record), title_justify="left")
    table.add_column("")
    if len(columns) == 2:
        table.add_column("autoregressive", justify="right")
    table.add_column(method(record), justify="right")
    for name, description in rows():
        cells = [cell(metrics, name, description) for metrics in columns]
        if any(cells):
            table.add_row(description.label, *cells)
    console.print(table)


def cell(metrics: Metrics, name: str, description: Recorded) -> str:
    """A metric with its interval, if it has one; empty if it is None. Each draft position has a
    line, with the number of verifications that judged it."""
    value, ends = getattr(metrics, name), getattr(metrics, f"{name}_interval", None)
    if value is None:
        return ""
    judged = metrics.judged_per_position
    if name != "acceptance_per_position" or judged is None:
        return description.show_between(value, ends)
    ends = ends or [[]] * len(value)
    return "\n".join(
        f"{description.show_between(share, both)} of {count}"
        for share, both, count in zip(value, ends, judged, strict=True)
    )


def method(record: RunRecord) -> str:
    """How a run decoded, in a few words: drafter, KV policy, budget and gamma."""
    decoding, kv = record.config["decoding"], record.config["kv"]
    if decoding["strategy"] == BASELINE:
        return BASELINE
    names = {"model": "standalone draft", "self": "self-speculation"}
    drafter = names.get(decoding["drafter"], f"{decoding['drafter']} draft")
    budget = "full KV" if kv["policy"] == FULL_KV_POLICY else f"{kv['policy']} {kv['budget']}"
    gamma = f"gamma {decoding['num_draft_tokens']}"
    # Prompt lookup reads no cache, whatever policy the run names.
    return ", ".join([drafter, *([budget] if decoding["drafter"] in names else []), gamma])


def _title(record: RunRecord) -> str:
    c, e = record.config, record.environment
    w, parallel = c["workload"], c["parallel"]
    dataset = "" if record.workload is None else f", {record.workload.dataset}"
    bandwidth = e.read_bandwidth_bytes_per_s
    read = "" if bandwidth is None else f", {bandwidth / 1e9:.1f} GB/s read"
    return (
        f"{c['model']['model']} ({_dtypes(c['model'])}){dataset}: "
        f"B {w['batch_size']}, prefix {w['prefix_len']}, {w['gen_len']} new tokens, "
        f"{w['num_batches']} batches; ranks {e.world_size} x threads {e.threads}, "
        f"{parallel.get('collectives') or parallel['device']}{read}"
    )


def _dtypes(model: dict[str, Any]) -> str:
    """The dtypes of a run's model. Records that are older than `target_dtype` have only one."""
    dtype: str = model["dtype"]
    return f"{dtype}, int8 weights" if model.get("target_dtype") == "int8" else dtype


def _verdict(record: RunRecord) -> str:
    c = record.correctness
    if record.status == "failed":
        return f"failed: {record.error}"
    assert c is not None, "only a failed record has none"
    if c.reference is None:
        return f"{c.num_tokens} tokens; not compared with another way of decoding them"
    compared = f"{c.num_tokens} tokens compared with {c.reference}"
    if c.identical:
        return f"identical: {compared}, no difference"
    where = "" if c.first_divergence is None else f"; {_place(c.first_divergence)}"
    explained = _explained(c)
    if record.passed:
        return f"ok with {c.num_excused} tie(s), not identical: {compared}{where}{explained}"
    return f"DIVERGED: {compared}{where}{explained}; no performance is reported"


def _explained(c: Correctness) -> str:
    """What the rounding of the run explains. Older records do not say it."""
    if c.most_differing is None:
        return ""
    differing = (c.num_excused or 0) + (c.num_diverged or 0)
    text = f"; {differing} sequence(s) differ, rounding explains up to {c.most_differing}"
    if differing > c.most_differing:
        return text
    return (
        f"{text}, and margins up to {c.margin_bound:.2g}; {c.num_short} token(s) are not the wider "
        f"model's choice, of the baseline's {c.num_short_reference}"
    )


def _place(first: Divergence) -> str:
    margin = "it ends elsewhere" if first.margin is None else f"margin {first.margin:.2g}"
    return f"first at sequence {first.sequence}, token {first.index} ({margin})"
