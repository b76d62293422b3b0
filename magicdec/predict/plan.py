"""SpeculationPlan: the checked arguments of `magicdec plan` and their predictions from shapes and
rates; and PlanRecord with its tables, from which docs/record.md is made. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from magicdec.hardware.costs import Deployment
from magicdec.names import EVERY_TOKEN, NARROW
from magicdec.output.tables import Column, Table
from magicdec.predict.curves import AcceptanceCurve, contexts_of, expected_tokens, held
from magicdec.predict.lengths import AcceptanceLengths
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

    def flat_speedup(self, batch_size: int, prefix_len: int) -> float | None:
        """The speedup of steps that follows from the acceptance of the shortest context; None if
        the acceptance is the same at every one."""
        if not any(map(contexts_of, self.curves.values())):
            return None
        flat = replace(self, curves={budget: held(curve) for budget, curve in self.curves.items()})
        return flat.predict(batch_size, prefix_len).speedup

    @property
    def longest(self) -> int:
        return min(self.target.config.max_length, self.draft.config.max_length)

    def break_even(self, batch_size: int) -> int | None:
        return break_even_context(self.candidates(), batch_size, self.max_gamma, self.longest)


NOTHING_DRAFTED = "if drafts never pay, so that nothing is drafted"
WITHOUT_TEXTS = (
    "where the acceptance is not of acceptance records, or of fewer than 4 texts; between two "
    "contexts with different numbers of texts; if drafts never pay"
)
COSTS = (
    "decode_ms",
    "gamma",
    "budget",
    "draft_ms",
    "verify_ms",
    "tokens_per_step",
    "speedup",
    "begin_ms",
    "net_speedup",
    "break_even_gen_len",
)  # the columns of the first table
SPEEDUPS = ("gamma", "speedup", "net_speedup", "flat_speedup")
PREDICTED = "predicted, not measured: no kernel reaches its ceiling everywhere"


@dataclass(frozen=True, kw_only=True)
class PlanCell(RecordPart):
    batch_size: int = recorded("rows of the batch")
    prefix_len: int = recorded("cached tokens of a row", "tokens")
    decode_ms: float = recorded("an autoregressive step", "ms", label="decode, ms", digits=2)
    gamma: int = recorded("the best number of draft tokens; 0: none", "tokens", label="gamma")
    budget: int | None = recorded(
        "the best KV budget; -1: every token", "tokens", label="budget", null=NOTHING_DRAFTED
    )
    draft_ms: float | None = recorded(
        "all drafts of a step", "ms", label="draft, ms", digits=2, null=NOTHING_DRAFTED
    )
    verify_ms: float | None = recorded(
        "the verification", "ms", label="verify, ms", digits=2, null=NOTHING_DRAFTED
    )
    tokens_per_step: float = recorded(
        "tokens of a row that a step emits", label="tokens a step", digits=2
    )
    speedup: float = recorded("of decode steps", label="speedup", digits=2, suffix="x")
    speedup_interval: list[float] | None = recorded(
        "its 95 % interval over the texts of the acceptance", null=WITHOUT_TEXTS
    )
    begin_ms: float = recorded(
        "between prefill and the first step", "ms", label="before, ms", digits=2
    )
    net_speedup: float = recorded(
        "from the end of prefill to the last token", label="net", digits=2, suffix="x"
    )
    net_speedup_interval: list[float] | None = recorded(
        "its 95 % interval over the texts of the acceptance", null=WITHOUT_TEXTS
    )
    break_even_gen_len: int | None = recorded(
        "the smallest output length with a net speedup above 1",
        "tokens",
        label="net pays from",
        null="if there is none",
    )
    flat_speedup: float | None = recorded(
        "of decode steps, if the acceptance of its shortest context held at every one, with the "
        "gamma and budget that are best then",
        label="flat",
        digits=2,
        suffix="x",
        null="unless the acceptance is of several contexts",
    )


@dataclass(frozen=True, kw_only=True)
class PlanRecord(Record):
    kind: Literal["plan"] = recorded("`plan`", default="plan")
    status: Literal["predicted"] = recorded("`predicted`: nothing has run", default="predicted")
    config: dict[str, Any] = recorded(
        "the inputs: `model` and `draft` (null in self-speculation) with their dtypes and ranks, "
        "`parallel` with the rates of one rank, `workload` with the acceptance by budget (and by "
        "context where it was measured), and the `flags` of the command"
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
        "draft_kv_dtype": plan.draft.kv_dtype or plan.dtype,
        "parallel": describe_ranks(plan.target, plan.machine_source),
        "workload": {
            "acceptance": {
                str(budget): curve.to_dict() if isinstance(curve, AcceptanceLengths) else curve
                for budget, curve in plan.curves.items()
            },
            "acceptance_source": plan.acceptance_source,
            "max_gamma": plan.max_gamma,
            "gen_len": plan.gen_len,
        },
    }
    places = [(B, S) for B in plan.batch_sizes for S in plan.prefix_lens]
    return PlanRecord(
        config=inputs,
        cells=[_cell(plan, B, S) for B, S in places],
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
        "kv_dtype": model.kv_dtype or dtype,
        "tp": model.tp,
        "nodes": model.nodes,
    }


def describe_ranks(model: Deployment, machine_source: str) -> dict[str, Any]:
    return {"machine": machine_source, "hardware": asdict(model.hardware)}


def _cell(plan: SpeculationPlan, batch_size: int, prefix_len: int) -> PlanCell:
    p = plan.predict(batch_size, prefix_len)
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
        speedup_interval=p.speedup_interval,
        begin_ms=1e3 * p.begin_s,
        net_speedup=p.net_speedup(plan.gen_len),
        net_speedup_interval=p.net_speedup_interval(plan.gen_len),
        break_even_gen_len=p.break_even_gen_len,
        flat_speedup=plan.flat_speedup(batch_size, prefix_len),
    )


def tables(records: Sequence[PlanRecord]) -> list[Table]:
    """For each record a table with a line per batch size and prefix, a map of speedups, and of
    measured acceptance a table of its intervals and of what one context alone would predict."""
    return [
        table
        for record in records
        for table in (_cells(record), _map(record), _speedups(record))
        if table is not None
    ]


def _cells(record: PlanRecord) -> Table:
    model = record.config["model"]
    workload = record.config["workload"]
    ranks = record.config["parallel"]
    overhead_us = 1e6 * ranks["hardware"]["layer_overhead_s"] * model["num_layers"]
    curves = "; ".join(f"{_read(b)}: {_curve(a)}" for b, a in workload["acceptance"].items())
    contexts = _contexts(record)
    is_flat = all(len(measured) == 1 for measured in contexts.values())
    where = "the same at every context" if is_flat else "by context"
    lines = [
        PREDICTED,
        f"model       {_name(model)}, {model['dtype']}; draft: {_drafting(record)}",
        f"{describe_machine(ranks)}, {overhead_us:,.0f} us fixed per forward",
        f"acceptance  {workload['acceptance_source']}, {where}; {curves}",
    ]
    lines += [] if is_flat else _outside(record, contexts)
    limit = model["max_length"]
    beyond = sorted({cell.prefix_len for cell in record.cells if cell.prefix_len > limit})
    if beyond:
        lengths = ", ".join(map(str, beyond))
        supported = f"{model['model']} supports {limit} tokens"
        lines.append(f"note        {supported}; a run refuses prefixes of {lengths}")
    if model.get("planned_only"):
        lines.append(f"note        a run refuses this model: {model['planned_only']}")
    return replace(
        _table(record, [_bare(cell) for cell in record.cells], COSTS),
        title=f"predicted, with the best gamma and budget; net: of {workload['gen_len']} output "
        "tokens",
        above=lines,
    )


def _read(budget: str) -> str:
    """What drafts of a budget read, in words."""
    return "every token" if budget == str(EVERY_TOKEN) else f"budget {budget}"


def _table(record: PlanRecord, cells: Sequence[PlanCell], only: Sequence[str]) -> Table:
    columns, rows = metric_columns(PlanCell, cells, only)
    return Table(
        [Column("B", key="batch_size"), Column("prefix", key="prefix_len"), *columns],
        [
            [cell.batch_size, cell.prefix_len, *values]
            for cell, values in zip(cells, rows, strict=True)
        ],
    )


def _speedups(record: PlanRecord) -> Table | None:
    """The speedups with their intervals, and what the shortest context alone would predict; None of
    an acceptance without texts and contexts."""
    has_texts = any(cell.speedup_interval for cell in record.cells)
    has_contexts = any(cell.flat_speedup is not None for cell in record.cells)
    if not has_contexts and not has_texts:
        return None
    title = "speedups"
    title += " [95 % intervals over texts]" if has_texts else ""
    title += "; flat: by the shortest context alone" if has_contexts else ""
    return replace(_table(record, record.cells, SPEEDUPS), title=title)


def _bare(cell: PlanCell) -> PlanCell:
    """A cell without intervals, which stand in a table of their own."""
    return replace(cell, speedup_interval=None, net_speedup_interval=None)


def _contexts(record: PlanRecord) -> dict[str, list[int]]:
    """For each budget, the contexts at which its acceptance was measured, in rising order; none of
    budgets for which it was given without one."""
    curves = record.config["workload"]["acceptance"]
    return {
        budget: sorted(map(int, curve)) for budget, curve in curves.items() if _is_by_context(curve)
    }


def _is_by_context(acceptance: Any) -> bool:
    is_map = isinstance(acceptance, Mapping)
    return is_map and all(isinstance(by_gamma, Mapping) for by_gamma in acceptance.values())


def _outside(record: PlanRecord, contexts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Lines about prefixes that are shorter or longer than what was measured."""
    budgets: dict[str, list[str]] = {}
    for budget, measured in contexts.items():
        prefixes = dict.fromkeys(cell.prefix_len for cell in record.cells)
        outside = [str(S) for S in prefixes if not measured[0] <= S <= measured[-1]]
        budgets.setdefault(", ".join(outside), []).append(budget)
    for outside_text, same in budgets.items():
        if outside_text:
            yield (
                f"note        budget {' '.join(same)}: acceptance was not measured at "
                f"{outside_text}; that of the nearest context is held"
            )


def _name(model: dict[str, Any]) -> str:
    tp = model["tp"]
    nodes = model["nodes"]
    over = f" over {nodes} nodes" if nodes > 1 else ""
    weights = f" in {model['target_dtype']}" if model["target_dtype"] in NARROW else ""
    kv_dtype = model.get("kv_dtype", model["dtype"])
    cache = f" with K and V in {kv_dtype}" if kv_dtype != model["dtype"] else ""
    return f"{model['model']}{weights}{cache} on {tp} rank{'s' * (tp > 1)}{over}"


def _drafting(record: PlanRecord) -> str:
    model = record.config["model"]
    draft = record.config["draft"]
    if draft is not None:
        return _name(draft)
    weights = record.config.get("draft_weights", model["target_dtype"])
    own = model.get("kv_dtype", model["dtype"])
    copied = record.config.get("draft_kv_dtype", own)
    over = f" over a copy of K and V in {copied}" if copied != own else ""
    return (
        "the model itself" + (f" in {weights}" if weights != model["target_dtype"] else "") + over
    )


def describe_machine(ranks: dict[str, Any]) -> str:
    rates = ranks["hardware"]
    kv_rate = rates["kv_bytes_per_s"] or rates["read_bytes_per_s"]
    return (
        f"machine     {ranks['machine']}: a rank reads "
        f"{rates['read_bytes_per_s'] / 1e9:,.1f} GB/s (KV {kv_rate / 1e9:,.1f}), computes "
        f"{rates['flops_per_s'] / 1e12:,.2f} TFLOP/s"
    )


def _curve(acceptance: Any) -> str:
    if _is_by_context(acceptance):
        most = min(max(map(int, by_length)) for by_length in acceptance.values())
        return f"acceptance lengths of {most} draft tokens " + ", ".join(
            f"{by_length[str(most)]:.2f} at {context}" for context, by_length in acceptance.items()
        )
    if isinstance(acceptance, Mapping):
        lengths = " ".join(f"{gamma}: {length:.2f}" for gamma, length in acceptance.items())
        return f"acceptance lengths by gamma {lengths}"
    if not isinstance(acceptance, float | int):
        return " ".join(f"{share:.2f}" for share in acceptance)
    tokens = f"{expected_tokens(acceptance, 4):.2f} tokens a step at gamma 4"
    return f"conditional rate {acceptance:.3g} ({tokens})"


def _map(record: PlanRecord) -> Table:
    """A row for each batch size and a column for each prefix."""
    prefixes = list(dict.fromkeys(cell.prefix_len for cell in record.cells))
    cells = {(str(cell.batch_size), cell.prefix_len): cell for cell in record.cells}

    def row(B: str, pays_from: int | None) -> list[str]:
        batch_cells = [cells[B, S] for S in prefixes]
        end = "short ones only" if any(cell.gamma for cell in batch_cells) else "never"
        end = end if pays_from is None else str(pays_from)
        return [B, *(f"{cell.speedup:.2f} ({cell.gamma})" for cell in batch_cells), end]

    return Table(
        ["B", *(f"prefix {S}" for S in prefixes), "pays from prefix"],
        [row(*budget_and_context) for budget_and_context in record.break_even_prefix_len.items()],
        "predicted speedup of steps (best gamma); 1.00 (0): speculation does not pay",
    )
