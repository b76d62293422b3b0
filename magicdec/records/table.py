"""Prints one record as a table, with the passes of the run side by side. `report/listing.py` prints
many records. `printed.py` has the rows."""

from __future__ import annotations

from typing import Any

from magicdec.console import make_console
from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.correctness import Correctness, Divergence
from magicdec.records.environment import threads_of_ranks
from magicdec.records.printed import table_rows
from magicdec.records.record import RunRecord

STYLES = {"ok": "bold", "ok_with_ties": "bold yellow"}


def print_record(record: RunRecord) -> None:
    """Print one run: the result of the check, and the baseline and the strategy side by side."""
    from rich.table import Table

    console = make_console()
    console.print(_verdict(record), style=STYLES.get(record.status, "bold red"))
    if record.metrics is None:
        return
    table = Table(title=_title(record), title_justify="left")
    table.add_column("")
    if record.baseline_metrics is not None:
        table.add_column("autoregressive", justify="right")
    table.add_column(method(record), justify="right")
    for label, cells in table_rows(record):
        table.add_row(label, *cells)
    console.print(table)


def method(record: RunRecord) -> str:
    """How a run decoded, in a few words: drafter, KV policy, budget, and gamma or
    the tree."""
    return method_of(record.config)


def method_of(config: dict[str, Any]) -> str:
    """As `method`, from the `config` of a record."""
    decoding, kv = config["decoding"], config["kv"]
    if decoding["strategy"] == BASELINE:
        return BASELINE
    names = {"model": "standalone draft", "self": "self-speculation"}
    drafter = names.get(decoding["drafter"], f"{decoding['drafter']} draft")
    budget = "full KV" if kv["policy"] == FULL_KV_POLICY else f"{kv['policy']} {kv['budget']}"
    tree, gamma = decoding.get("tree"), f"gamma {decoding['num_draft_tokens']}"
    if tree is not None:
        gamma = f"tree {tree} ({decoding['tree_nodes']} tokens)"
    # Prompt lookup reads no cache, whatever policy the run names.
    return ", ".join([drafter, *([budget] if decoding["drafter"] in names else []), gamma])


def _title(record: RunRecord) -> str:
    c, e = record.config, record.environment
    w, parallel = c["workload"], c["parallel"]
    dataset = "" if record.workload is None else f", {record.workload.dataset}"
    bandwidth, batches = e.read_bandwidth_bytes_per_s, w["num_batches"]
    read = "" if bandwidth is None else f", {bandwidth / 1e9:.1f} GB/s read"
    return (
        f"{c['model']['model']} ({_dtypes(c['model'])}){dataset}: "
        f"B {w['batch_size']}, prefix {w['prefix_len']}, {w['gen_len']} new tokens, "
        f"{batches} batch{'es' * (batches != 1)}; "
        f"ranks {e.world_size} x threads {threads_of_ranks(c, e)}, "
        f"{parallel.get('collectives') or parallel['device']}{read}"
    )


def _dtypes(model: dict[str, Any]) -> str:
    """The dtypes of a run's model."""
    dtype: str = model["dtype"]
    return f"{dtype}, int8 weights" if model["target_dtype"] == "int8" else dtype


def _verdict(record: RunRecord) -> str:
    c = record.correctness
    if record.status == "failed":
        return f"failed: {record.error}"
    if record.status == "interrupted":
        return f"{record.error}; the rows below are of these batches"
    assert c is not None, "only a record of a run that ended early has none"
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
