"""Prints a plan as tables and converts it to JSON. All numbers are marked as predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.console import make_console, print_table
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import Acceptance, expected_tokens
from magicdec.cost_model.plan import Plan
from magicdec.cost_model.speculation import Prediction
from magicdec.hardware.ceiling_file import Hardware


@dataclass(frozen=True)
class PlanCell:
    """The prediction for one batch size and context. Fields are None if nothing is drafted."""

    batch_size: int
    prefix_len: int
    gamma: int
    budget: int | None
    decode_ms: float
    draft_ms: float | None
    verify_ms: float | None
    tokens_per_step: float
    speedup: float  # of decode steps
    begin_ms: float  # between prefill and the first step
    net_speedup: float  # from the end of prefill to the last token
    break_even_gen_len: int | None  # smallest output length with a net speedup above 1


@dataclass(frozen=True)
class PlanReport:
    """The content of the JSON file: the cells, and the inputs of the prediction."""

    predicted: bool
    model: str
    draft_model: str | None  # None: self-speculation
    dtype: str
    target_dtype: str
    draft_dtype: str
    tp: int
    draft_tp: int
    nodes: int
    hardware: Hardware
    acceptance: dict[str, Acceptance]  # by budget
    acceptance_source: str
    max_gamma: int
    gen_len: int
    cells: list[PlanCell]
    break_even_prefix_len: dict[str, int | None]  # by batch size


def make_report(plan: Plan) -> PlanReport:
    return PlanReport(
        predicted=True,
        model=plan.target.config.name,
        draft_model=None if plan.is_self_speculation else plan.draft.config.name,
        dtype=plan.dtype,
        target_dtype="int8" if plan.target.is_int8 else plan.dtype,
        draft_dtype="int8" if plan.draft.is_int8 else plan.dtype,
        tp=plan.target.tp,
        draft_tp=plan.draft.tp,
        nodes=plan.target.nodes,
        hardware=plan.target.hardware,
        acceptance={str(budget): curve for budget, curve in plan.curves.items()},
        acceptance_source=plan.acceptance_source,
        max_gamma=plan.max_gamma,
        gen_len=plan.gen_len,
        cells=[
            make_cell(B, S, plan.gen_len, plan.predict(B, S))
            for B in plan.batch_sizes
            for S in plan.prefix_lens
        ],
        break_even_prefix_len={str(B): plan.break_even(B) for B in plan.batch_sizes},
    )


def make_cell(batch_size: int, prefix_len: int, gen_len: int, p: Prediction) -> PlanCell:
    return PlanCell(
        batch_size=batch_size,
        prefix_len=prefix_len,
        gamma=p.gamma,
        budget=p.budget,
        decode_ms=1e3 * p.decode_s,
        draft_ms=None if p.draft_s is None else 1e3 * p.draft_s,
        verify_ms=None if p.verify_s is None else 1e3 * p.verify_s,
        tokens_per_step=p.tokens_per_step,
        speedup=p.speedup,
        begin_ms=1e3 * p.begin_s,
        net_speedup=p.net_speedup(gen_len),
        break_even_gen_len=p.break_even_gen_len,
    )


def print_plan(plan: Plan) -> None:
    """Print the inputs, a table with one line per batch size and prefix length, and a table of the
    speedups."""
    console = make_console()
    for line in _header(plan):
        console.print(line, soft_wrap=True)
    print_table(_cells(plan))
    print_table(_map(plan))


def _header(plan: Plan) -> list[str]:
    h, c = plan.target.hardware, plan.target.config
    drafts = "the model itself" if plan.is_self_speculation else _name(plan.draft)
    curves = "; ".join(f"budget {b}: {_curve(a)}" for b, a in plan.curves.items())
    lines = [
        "predicted, not measured: no kernel reaches its ceiling everywhere",
        f"model       {_name(plan.target)}, {plan.dtype}; draft: {drafts}",
        f"machine     {plan.machine_source}: a rank reads {h.read_bytes_per_s / 1e9:,.1f} GB/s"
        f" (KV {(h.kv_bytes_per_s or h.read_bytes_per_s) / 1e9:,.1f}), "
        f"computes {h.flops_per_s / 1e12:,.2f} TFLOP/s, "
        f"{h.layer_overhead_s * c.num_layers * 1e6:,.0f} us fixed per forward",
        f"acceptance  {plan.acceptance_source}, the same at every context; {curves}",
    ]
    beyond = [S for S in plan.prefix_lens if c.max_length < S]
    if beyond:
        shown = ", ".join(map(str, beyond))
        limit = f"{c.name} supports {c.max_length} tokens"
        lines.append(f"note        {limit}; a run refuses prefixes of {shown}")
    return lines


def _name(deployment: Deployment) -> str:
    d = deployment
    nodes = f" over {d.nodes} nodes" if d.nodes > 1 else ""
    weights = " in int8" if d.is_int8 else ""
    return f"{d.config.name}{weights} on {d.tp} rank{'s' * (d.tp > 1)}{nodes}"


def _curve(acceptance: Acceptance) -> str:
    if isinstance(acceptance, tuple):
        return " ".join(f"{share:.2f}" for share in acceptance)
    tokens = f"{expected_tokens(acceptance, 4):.2f} tokens per step at gamma 4"
    return f"conditional rate {acceptance:.3g} ({tokens})"


def _cells(plan: Plan) -> Any:
    from rich.table import Table

    title = f"predicted, with the best gamma and budget; net: of {plan.gen_len} output tokens"
    table = Table(title=title, title_justify="left")
    labels = ("B", "prefix", "decode, ms", "gamma", "budget", "draft, ms", "verify, ms")
    for label in (*labels, "tokens/step", "speedup", "before, ms", "net", "net pays from"):
        table.add_column(label, justify="right", no_wrap=True)
    for B in plan.batch_sizes:
        for S in plan.prefix_lens:
            p = plan.predict(B, S)
            times = ("" if s is None else f"{1e3 * s:.2f}" for s in (p.draft_s, p.verify_s))
            budget = "" if p.budget is None else str(p.budget)
            length = p.break_even_gen_len
            table.add_row(
                str(B), str(S), f"{1e3 * p.decode_s:.2f}", str(p.gamma), budget, *times,
                f"{p.tokens_per_step:.2f}", f"{p.speedup:.2f}x", f"{1e3 * p.begin_s:.2f}",
                f"{p.net_speedup(plan.gen_len):.2f}x", "" if length is None else f"{length} tokens",
            )  # fmt: skip
    return table


def _map(plan: Plan) -> Any:
    from rich.table import Table

    table = Table(
        title="predicted speedup of steps (best gamma); 1.00 (0): speculation does not pay",
        title_justify="left",
    )
    table.add_column("B", justify="right")
    for S in plan.prefix_lens:
        table.add_column(f"prefix {S}", justify="right", no_wrap=True)
    table.add_column("pays from", justify="right")
    for B in plan.batch_sizes:
        cells = (plan.predict(B, S) for S in plan.prefix_lens)
        shown = (f"{p.speedup:.2f} ({p.gamma})" for p in cells)
        context = plan.break_even(B)
        table.add_row(str(B), *shown, "never" if context is None else f"{context} tokens")
    return table
