"""SpeculationPlan: the checked arguments of `magicdec plan` and their predictions from shapes and
rates; and PlanRecord with its tables, from which docs/record.md is made. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from magicdec.hardware.costs import Deployment
from magicdec.names import NARROW
from magicdec.output.tables import Column, Table
from magicdec.predict.curves import AcceptanceCurve, expected_tokens
from magicdec.predict.speculation import (
    Prediction,
    SelectionCost,
    SpeculationCost,
    best_gamma,
    break_even_context,
)
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.metric_tables import metric_columns
from magicdec.records.record import Record


@dataclass(frozen=True)
class SpeculationPlan:
    """The models, hardware, acceptance and places of a prediction."""

    target: Deployment
    draft: Deployment  # the target itself in self-speculation
    dtype: str
    curves: dict[int, AcceptanceCurve]  # by KV budget
    acceptance_source: str
    machine_source: str
    batch_sizes: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    max_gamma: int
    gen_len: int  # output tokens of a sequence, for the net speedup
    kv_policy: str
    choices: dict[int, SelectionCost]  # what the KV policy does before the first step, by KV budget

    @property
    def is_self_speculation(self) -> bool:
        return self.draft.config is self.target.config

    def candidates(self) -> list[SpeculationCost]:
        return [
            SpeculationCost(self.target, self.draft, budget, curve, self.choices[budget])
            for budget, curve in self.curves.items()
        ]

    def predict(self, batch_size: int, prefix_len: int) -> Prediction:
        return best_gamma(self.candidates(), batch_size, prefix_len, self.max_gamma)

    @property
    def longest(self) -> int:
        return min(self.target.config.max_length, self.draft.config.max_length)

    def break_even(self, batch_size: int) -> int | None:
        return break_even_context(self.candidates(), batch_size, self.max_gamma, self.longest)


NOTHING_DRAFTED = "if drafts never pay, so that nothing is drafted"
PREDICTED = "predicted, not measured: no kernel reaches its ceiling everywhere"


@dataclass(frozen=True, kw_only=True)
class PlanCell(RecordPart):
    batch_size: int = recorded("rows of the batch")
    prefix_len: int = recorded("cached tokens of a row", "tokens")
    decode_ms: float = recorded("an autoregressive step", "ms", label="decode, ms", digits=2)
    gamma: int = recorded("the best number of draft tokens; 0: none", "tokens", label="gamma")
    budget: int | None = recorded(
        "the best KV budget", "tokens", label="budget", null=NOTHING_DRAFTED
    )
    draft_ms: float | None = recorded(
        "all drafts of a step", "ms", label="draft, ms", digits=2, null=NOTHING_DRAFTED
    )
    verify_ms: float | None = recorded(
        "the verification", "ms", label="verify, ms", digits=2, null=NOTHING_DRAFTED
    )
    tokens_per_step: float = recorded(
        "tokens of a row that a step emits", label="tokens/step", digits=2
    )
    speedup: float = recorded("of decode steps", label="speedup", digits=2, suffix="x")
    begin_ms: float = recorded(
        "between prefill and the first step", "ms", label="before, ms", digits=2
    )
    net_speedup: float = recorded(
        "from the end of prefill to the last token", label="net", digits=2, suffix="x"
    )
    break_even_gen_len: int | None = recorded(
        "the smallest output length with a net speedup above 1",
        "tokens",
        label="net pays from",
        suffix=" tokens",
        null="if there is none",
    )


@dataclass(frozen=True, kw_only=True)
class PlanRecord(Record):
    kind: Literal["plan"] = recorded("`plan`", default="plan")
    status: Literal["predicted"] = recorded("`predicted`: nothing has run", default="predicted")
    config: dict[str, Any] = recorded(
        "the inputs: `model` and `draft` (null in self-speculation) with their dtypes and ranks, "
        "`parallel` with the rates of one rank, `workload` with the acceptance by budget, and the "
        "`flags` of the command"
    )
    cells: list[PlanCell] = recorded("the predictions, each with the best gamma and budget")
    break_even_prefix_len: dict[str, int | None] = recorded(
        "the shortest prefix from which on steps are faster, by batch size; null: there is none up "
        "to the longest context of the models",
        "tokens",
    )


def make_record(plan: SpeculationPlan) -> PlanRecord:
    inputs = {
        "model": describe_model(plan.target, plan.dtype),
        "draft": None if plan.is_self_speculation else describe_model(plan.draft, plan.dtype),
        "draft_weights": plan.draft.low_bit or plan.dtype,
        "parallel": describe_ranks(plan.target, plan.machine_source),
        "workload": {
            "acceptance": {str(budget): curve for budget, curve in plan.curves.items()},
            "acceptance_source": plan.acceptance_source,
            "max_gamma": plan.max_gamma,
            "gen_len": plan.gen_len,
        },
    }
    places = [(B, S) for B in plan.batch_sizes for S in plan.prefix_lens]
    return PlanRecord(
        config=inputs,
        cells=[_cell(B, S, plan.gen_len, plan.predict(B, S)) for B, S in places],
        break_even_prefix_len={str(B): plan.break_even(B) for B in plan.batch_sizes},
    )


def describe_model(model: Deployment, dtype: str) -> dict[str, Any]:
    return {
        "model": model.config.name,
        "num_layers": model.config.num_layers,
        "max_length": model.config.max_length,
        "planned_only": model.config.planned_only,
        "dtype": dtype,
        "target_dtype": model.low_bit or dtype,
        "tp": model.tp,
        "nodes": model.nodes,
    }


def describe_ranks(model: Deployment, machine_source: str) -> dict[str, Any]:
    return {"machine": machine_source, "hardware": asdict(model.hardware)}


def _cell(batch_size: int, prefix_len: int, gen_len: int, p: Prediction) -> PlanCell:
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


def tables(records: Sequence[PlanRecord]) -> list[Table]:
    """For each record a table with a line per batch size and prefix, and a map of speedups."""
    return [table for record in records for table in (_cells(record), _map(record))]


def _cells(record: PlanRecord) -> Table:
    model = record.config["model"]
    workload = record.config["workload"]
    ranks = record.config["parallel"]
    overhead_us = 1e6 * ranks["hardware"]["layer_overhead_s"] * model["num_layers"]
    curves = "; ".join(f"budget {b}: {_curve(a)}" for b, a in workload["acceptance"].items())
    lines = [
        PREDICTED,
        f"model       {_name(model)}, {model['dtype']}; draft: {_drafting(record)}",
        f"{describe_machine(ranks)}, {overhead_us:,.0f} us fixed per forward",
        f"acceptance  {workload['acceptance_source']}, the same at every context; {curves}",
    ]
    limit = model["max_length"]
    beyond = sorted({cell.prefix_len for cell in record.cells if cell.prefix_len > limit})
    if beyond:
        lengths = ", ".join(map(str, beyond))
        supported = f"{model['model']} supports {limit} tokens"
        lines.append(f"note        {supported}; a run refuses prefixes of {lengths}")
    if model.get("planned_only"):
        lines.append(f"note        a run refuses this model: {model['planned_only']}")
    columns, rows = metric_columns(PlanCell, record.cells)
    return Table(
        [Column("B", key="batch_size"), Column("prefix", key="prefix_len"), *columns],
        [
            [cell.batch_size, cell.prefix_len, *cells]
            for cell, cells in zip(record.cells, rows, strict=True)
        ],
        f"predicted, with the best gamma and budget; net: of {workload['gen_len']} output tokens",
        above=lines,
    )


def _name(model: dict[str, Any]) -> str:
    tp = model["tp"]
    nodes = model["nodes"]
    over = f" over {nodes} nodes" if nodes > 1 else ""
    weights = f" in {model['target_dtype']}" if model["target_dtype"] in NARROW else ""
    return f"{model['model']}{weights} on {tp} rank{'s' * (tp > 1)}{over}"


def _drafting(record: PlanRecord) -> str:
    model = record.config["model"]
    draft = record.config["draft"]
    if draft is not None:
        return _name(draft)
    weights = record.config.get("draft_weights", model["target_dtype"])
    return "the model itself" + (f" in {weights}" if weights != model["target_dtype"] else "")


def describe_machine(ranks: dict[str, Any]) -> str:
    rates = ranks["hardware"]
    kv_rate = rates["kv_bytes_per_s"] or rates["read_bytes_per_s"]
    return (
        f"machine     {ranks['machine']}: a rank reads "
        f"{rates['read_bytes_per_s'] / 1e9:,.1f} GB/s (KV {kv_rate / 1e9:,.1f}), computes "
        f"{rates['flops_per_s'] / 1e12:,.2f} TFLOP/s"
    )


def _curve(acceptance: float | Sequence[float] | Mapping[Any, float]) -> str:
    if isinstance(acceptance, Mapping):
        lengths = " ".join(f"{gamma}: {length:.2f}" for gamma, length in acceptance.items())
        return f"acceptance lengths by gamma {lengths}"
    if not isinstance(acceptance, float | int):
        return " ".join(f"{share:.2f}" for share in acceptance)
    tokens = f"{expected_tokens(acceptance, 4):.2f} tokens per step at gamma 4"
    return f"conditional rate {acceptance:.3g} ({tokens})"


def _map(record: PlanRecord) -> Table:
    """A row for each batch size and a column for each prefix."""
    prefixes = list(dict.fromkeys(cell.prefix_len for cell in record.cells))
    cells = {(str(cell.batch_size), cell.prefix_len): cell for cell in record.cells}

    def row(B: str, pays_from: int | None) -> list[str]:
        of_batch = [cells[B, S] for S in prefixes]
        end = "short ones only" if any(cell.gamma for cell in of_batch) else "never"
        end = end if pays_from is None else f"{pays_from} tokens"
        return [B, *(f"{cell.speedup:.2f} ({cell.gamma})" for cell in of_batch), end]

    return Table(
        ["B", *(f"prefix {S}" for S in prefixes), "pays from"],
        [row(*each) for each in record.break_even_prefix_len.items()],
        "predicted speedup of steps (best gamma); 1.00 (0): speculation does not pay",
    )
