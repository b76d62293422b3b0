"""The rows of the table of one run: what its sample can carry, in numbers that agree with each
other. Imports no torch.

A percentile is printed only where the sequences are enough for it; otherwise the largest value is,
with the number of sequences. The first speedup is the ratio of the two rates above it; the medians
over batches say over how many.
"""

from __future__ import annotations

from dataclasses import fields

from magicdec.names import BASELINE
from magicdec.records.fields import Recorded, description_of
from magicdec.records.metrics import tpots
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord

# The rows in order.
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
# The sequences that a percentile needs: with fewer, it would be the largest value or the next one.
LEAST_SEQUENCES = {"p90_tpot_ms": 10, "p99_tpot_ms": 100}
MEDIANS = {"speedup": "  ", "net_speedup": "net speedup, "}


def table_rows(record: RunRecord) -> list[tuple[str, list[str]]]:
    """(label, a cell for each pass that the record has metrics of) for each row that says
    something."""
    described = {item.name: description_of(item) for item in fields(Metrics)}
    columns = [m for m in (record.baseline_metrics, record.metrics) if m is not None]
    num_sequences, found = _num_sequences(record), []
    for name in SHOWN:
        if num_sequences is not None and num_sequences < LEAST_SEQUENCES.get(name, 0):
            continue
        label = described[name].label
        if name in MEDIANS:
            each = getattr(columns[-1], f"{name}_per_batch") or ()
            label = f"{MEDIANS[name]}median of {len(each)} batch{'' if len(each) == 1 else 'es'}"
        found.append((label, [cell(metrics, name, described[name]) for metrics in columns]))
        if name == "decode_tokens_per_s":
            found.append(_ratio_of_rates(columns))
        if name == "p50_tpot_ms" and num_sequences is not None:
            found += _largest_tpot(record, num_sequences)
    return [(label, cells) for label, cells in found if any(cells)]


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
        f"{description.show_between(share, both)}, {count} judged"
        for share, both, count in zip(value, ends, judged, strict=True)
    )


def _ratio_of_rates(columns: list[Metrics]) -> tuple[str, list[str]]:
    """The speedup over all batches together: the ratio of the two rates of decode steps."""
    rates = [metrics.decode_tokens_per_s for metrics in columns]
    if len(rates) < 2 or not rates[0] or rates[1] is None:
        return "", []
    return "speedup of decode steps", ["", f"{rates[1] / rates[0]:.2f}x"]


def _passes(record: RunRecord) -> list[str]:
    names = [BASELINE] if record.baseline_metrics is not None else []
    return [*names, record.config["decoding"]["strategy"]]


def _num_sequences(record: RunRecord) -> int | None:
    """Sequences with a TPOT, of the pass that has the fewest. None if the record has no samples."""
    if record.samples is None:
        return None
    counts = [record.samples[name].sequence_tokens or [] for name in _passes(record)]
    return min(sum(tokens > 0 for batch in count for tokens in batch) for count in counts)


def _largest_tpot(record: RunRecord, num_sequences: int) -> list[tuple[str, list[str]]]:
    """The largest TPOT, where there are too few sequences for the last percentile."""
    if not 1 < num_sequences < LEAST_SEQUENCES["p99_tpot_ms"]:
        return []
    assert record.samples is not None, "they were counted"
    found = [tpots(record.samples[name].restored()) for name in _passes(record)]
    return [(f"TPOT max of {num_sequences}, ms", [f"{max(each):.2f}" for each in found])]
