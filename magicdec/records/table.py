"""Tables for people, from records alone: one run's passes side by side, or many runs a line
each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magicdec.console import make_console

Show = Callable[[Any], str]


def _number(digits: int, unit: str = "", scale: float = 1.0) -> Show:
    return lambda value: f"{value * scale:,.{digits}f}{unit}"


def _list(values: Any) -> str:
    return " ".join(f"{v:.2f}" for v in values)


# What the table shows, in order: record key, label, how to print it.
ROWS: tuple[tuple[str, str, Show], ...] = (
    ("decode_tokens_per_s", "decode, tokens/s", _number(1)),
    ("speedup", "speedup (median of batches)", _number(2, "x")),
    ("mean_tpot_ms", "TPOT mean, ms", _number(2)),
    ("p50_tpot_ms", "TPOT p50, ms", _number(2)),
    ("p90_tpot_ms", "TPOT p90, ms", _number(2)),
    ("p99_tpot_ms", "TPOT p99, ms", _number(2)),
    ("mean_ttft_ms", "TTFT mean, ms (shared prefill)", _number(0)),
    ("prefill_tokens_per_s", "prefill, tokens/s", _number(0)),
    ("draft_prefill_ms", "draft's own prefill, ms/batch", _number(0)),
    ("answer_score", "answer score", _number(3)),
    ("acceptance_rate", "acceptance rate", _number(3)),
    ("acceptance_length", "acceptance length", _number(2)),
    ("acceptance_per_position", "acceptance per position", _list),
    ("mean_draft_tokens", "draft tokens a step", _number(2)),
    ("calibration_ms", "calibration for gamma, ms", _number(0)),
    ("mean_step_ms", "step, ms", _number(2)),
    ("decode_ms", "  decode, ms/step", _number(2)),
    ("draft_ms", "  draft, ms/step", _number(2)),
    ("verify_ms", "  verify, ms/step", _number(2)),
    ("other_ms", "  other, ms/step", _number(2)),
    ("bytes_read", "bytes to read, GB", _number(2, scale=1e-9)),
    ("roofline_fraction", "of the memory roofline", _number(1, " %", 100)),
    ("peak_memory_bytes", "peak memory, all ranks, MB", _number(0, scale=1e-6)),
)


def print_record(record: dict[str, Any]) -> None:
    """One run: the baseline and the strategy side by side, and the verdict."""
    from rich.table import Table

    console, decoding = make_console(), record["config"]["decoding"]
    console.print(_verdict(record), style="bold" if record["status"] == "ok" else "bold red")
    if record["metrics"] is None:
        return
    columns = [m for m in (record.get("baseline_metrics"), record["metrics"]) if m is not None]
    table = Table(title=_title(record), title_justify="left")
    table.add_column("")
    if len(columns) == 2:
        table.add_column("autoregressive", justify="right")
    table.add_column(_name(decoding, record["config"]["kv"]), justify="right")
    for key, label, show in ROWS:
        cells = ["" if m.get(key) is None else show(m[key]) for m in columns]
        if any(cells):
            table.add_row(label, *cells)
    console.print(table)


def print_records(records: list[dict[str, Any]]) -> None:
    """Many runs, a line each."""
    from rich.table import Table

    table = Table()
    for label in (
        "model",
        "strategy",
        "ranks",
        "B",
        "prefix",
        "tokens/s",
        "speedup",
        "accept",
        "roofline",
        "status",
    ):
        # On a narrow page texts fold; a number is never cut.
        is_text = label in ("model", "strategy")
        table.add_column(label, justify="right", overflow="fold", no_wrap=not is_text)
    for r in records:
        w, metrics = r["config"]["workload"], r["metrics"] or {}
        table.add_row(
            str(r["config"]["model"]["model"]),
            _name(r["config"]["decoding"], r["config"]["kv"]),
            str(r["environment"]["world_size"]),
            str(w["batch_size"]),
            str(w["prefix_len"]),
            *(
                "" if metrics.get(key) is None else f"{metrics[key]:.{digits}f}"
                for key, digits in (
                    ("decode_tokens_per_s", 1),
                    ("speedup", 2),
                    ("acceptance_rate", 3),
                    ("roofline_fraction", 2),
                )
            ),
            r["status"],
        )
    make_console().print(table)


def _name(decoding: dict[str, Any], kv: dict[str, Any]) -> str:
    if decoding["strategy"] == "autoregressive":
        return "autoregressive"
    budget = "full KV" if kv["policy"] == "full" else f"{kv['policy']} {kv['budget']}"
    names = {"model": "standalone draft"}
    drafter = names.get(decoding["drafter"], f"{decoding['drafter']}-speculation")
    return f"{drafter}, {budget}, gamma {decoding['num_draft_tokens']}"


def _title(record: dict[str, Any]) -> str:
    c, e = record["config"], record["environment"]
    w = c["workload"]
    return (
        f"{c['model']['model']} ({_dtypes(c['model'])}), {record['workload']['dataset']}: "
        f"B {w['batch_size']}, prefix {w['prefix_len']}, {w['gen_len']} new tokens, "
        f"{w['num_batches']} batches; ranks {e['world_size']} x threads {e['threads']}, "
        f"{c['parallel']['collectives'] or c['parallel']['device']}, "
        f"{e['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s read"
    )


def _dtypes(model: dict[str, Any]) -> str:
    """Records older than `target_dtype` had one for all."""
    dtype: str = model["dtype"]
    return f"{dtype}, int8 weights" if model.get("target_dtype") == "int8" else dtype


def _verdict(record: dict[str, Any]) -> str:
    correctness, status = record["correctness"], record["status"]
    if status == "failed":
        return f"failed: {record['error']}"
    if correctness["reference"] is None:
        return f"{correctness['num_tokens']} tokens; not compared with another way of decoding them"
    compared = f"{correctness['num_tokens']} tokens compared with {correctness['reference']}"
    if correctness["identical"]:
        return f"identical: {compared}, no difference"
    first = correctness["first_divergence"]
    where = (
        f"first at sequence {first['sequence']}, token {first['index']} "
        f"({_margin(first['margin'])})"
    )
    if status == "ok":
        return f"equal up to {correctness['num_excused']} settled tie(s): {compared}; {where}"
    return f"DIVERGED: {compared}; {where}; no performance is reported"


def _margin(margin: float | None) -> str:
    return "it ends elsewhere" if margin is None else f"margin {margin:.2g}"
