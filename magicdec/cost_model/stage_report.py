"""Prints a plan of stages as tables and converts it to JSON. All numbers are marked as
predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.console import make_console, print_table
from magicdec.cost_model.stage_plan import RingCell, StagePlan
from magicdec.hardware.ceiling_file import Hardware


@dataclass(frozen=True)
class StageReport:
    """The content of the JSON file: the cells, and the inputs of the prediction."""

    predicted: bool
    model: str
    dtype: str
    target_dtype: str
    num_stages: int
    tp: int  # ranks of a stage
    nodes: int
    layer_split: str | None  # as given
    hardware: Hardware
    machine_source: str
    one_process_has_all_ranks: bool  # of its host
    cells: list[RingCell]


def make_stage_report(plan: StagePlan) -> StageReport:
    stage = plan.stage
    return StageReport(
        predicted=True,
        model=stage.config.name,
        dtype=plan.dtype,
        target_dtype="int8" if stage.is_int8 else plan.dtype,
        num_stages=plan.num_stages,
        tp=stage.tp,
        nodes=plan.nodes,
        layer_split=plan.layer_split,
        hardware=stage.hardware,
        machine_source=plan.machine_source,
        one_process_has_all_ranks=plan.shares_host,
        cells=_cells(plan),
    )


def _cells(plan: StagePlan) -> list[RingCell]:
    return [plan.predict(B, S) for B in plan.lane_sizes for S in plan.prefix_lens]


def print_stages(plan: StagePlan) -> None:
    """Print the inputs, the stages of each lane size and context, and what the ring, tensor
    parallelism and one process give."""
    console, cells = make_console(), _cells(plan)
    for line in _header(plan):
        console.print(line, soft_wrap=True)
    for cell in cells:
        print_table(_stages(cell))
    print_table(_rounds(cells))


def _header(plan: StagePlan) -> list[str]:
    stage, h = plan.stage, plan.stage.hardware
    ranks = f"{stage.tp} rank{'s' * (stage.tp > 1)}"
    nodes = f" on {plan.nodes} hosts" if plan.nodes > 1 else ""
    one = f"all {plan.num_ranks // plan.nodes} ranks of a host" if plan.shares_host else "one rank"
    return [
        "predicted, not measured: no kernel reaches its ceiling everywhere, and scheduling and "
        "sampling are left out",
        f"model       {stage.config.name}{' in int8' if stage.is_int8 else ''}, {plan.dtype}; "
        f"{plan.num_stages} stages of {ranks}{nodes}; --layer_split {plan.layer_split or 'equal'}",
        f"machine     {plan.machine_source}: a rank reads {h.read_bytes_per_s / 1e9:,.1f} GB/s"
        f" (KV {(h.kv_bytes_per_s or h.read_bytes_per_s) / 1e9:,.1f}), "
        f"computes {h.flops_per_s / 1e12:,.2f} TFLOP/s; one process has the rates of {one}",
    ]


def _stages(cell: RingCell) -> Any:
    from rich.table import Table

    links = f"; a hop has {cell.hop_bytes:,} bytes" if cell.link_ms else ""
    title = f"stages for lanes of {cell.lane_size} with {cell.prefix_len} cached tokens{links}"
    table = Table(title=title, title_justify="left")
    for label in ("stage", "layers", "weights, MB", "KV of a lane, MB", "decode, ms", "hop, ms"):
        table.add_column(label, justify="right", no_wrap=True)
    for index, stage in enumerate(cell.stages):
        table.add_row(
            str(index), str(stage.num_layers), f"{stage.weight_bytes / 1e6:,.1f}",
            f"{stage.lane_kv_bytes / 1e6:,.1f}", f"{stage.decode_ms:.3f}",
            f"{cell.link_ms[index]:.3f}" if cell.link_ms else "",
        )  # fmt: skip
    return table


def _rounds(cells: list[RingCell]) -> Any:
    from rich.table import Table

    title = "round = max(lanes x slowest stage or link, sum of stages and hops); then tokens/s"
    table = Table(title=title, title_justify="left")
    for label in ("B", "prefix", "lanes", "samples", "round, ms", "ring", "tensor parallel"):
        table.add_column(label, justify="right", no_wrap=True)
    for label in ("one process", "fastest"):
        table.add_column(label, justify="right", no_wrap=True)
    for cell in cells:
        for r in cell.rounds:
            shared = r.tensor_parallel_tokens_per_s
            table.add_row(
                str(cell.lane_size), str(cell.prefix_len), str(r.num_lanes), str(r.n_samples),
                f"{r.round_ms:.2f}", f"{r.tokens_per_s:,.1f}",
                "" if shared is None else f"{shared:,.1f}",
                f"{r.one_process_tokens_per_s:,.1f}", r.fastest,
            )  # fmt: skip
    return table
