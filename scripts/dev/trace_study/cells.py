"""The cells of the study: passes of arms, each beside that of `inflight`, by trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trace_study.arms import ARMS, Arm, arm_of
from trace_study.pieces import TRACES, Trace

from magicdec.records.computing import turns_with
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.records.record import commands_of

DRAFTS = ("self", "ngram", "eagle")  # arms


@dataclass(frozen=True)
class Cell:
    """The pass of an arm, and that of `inflight` in the same command."""

    plain: PassRecord
    record: PassRecord

    @property
    def ratio(self) -> float:
        """Its sessions an hour over those of `inflight`."""
        return sessions_an_hour(self.record) / sessions_an_hour(self.plain)


Cells = Mapping[tuple[str, str], Cell]  # by trace and arm


def sessions_an_hour(record: PassRecord) -> float:
    assert record.metrics is not None and record.metrics.sessions_per_hour is not None
    return record.metrics.sessions_per_hour


def cells_of(path: Path) -> dict[tuple[str, str], Cell]:
    """The cells that a file has, if it is there; of equal ones the last."""
    arrivals = {trace.arrival: trace.name for trace in TRACES}
    found = dict[tuple[str, str], Cell]()
    for passes in commands_of(load_passes(path)) if path.exists() else ():
        plain, *others = passes
        for record in others:
            name = arm_of(record)
            trace = arrivals.get(record.config["workload"]["arrival"])
            if name is not None and trace is not None and record.passed:
                found[trace, name] = Cell(plain, record)
    return found


@dataclass(frozen=True)
class Study:
    """The cells, in the order of traces and arms."""

    cells: Cells

    @property
    def traces(self) -> list[Trace]:
        return [trace for trace in TRACES if any(name == trace.name for name, _ in self.cells)]

    @property
    def arms(self) -> list[Arm]:
        return [arm for arm in ARMS if any(name == arm.name for _, name in self.cells)]

    def by_trace(self, arm: str) -> dict[str, Cell]:
        """The cells of an arm."""
        return {
            trace.name: self.cells[trace.name, arm]
            for trace in TRACES
            if (trace.name, arm) in self.cells
        }

    def by_arm(self, trace: str) -> dict[str, Cell]:
        """The cells of a trace."""
        return {
            arm.name: self.cells[trace, arm.name] for arm in ARMS if (trace, arm.name) in self.cells
        }

    def plain_of(self, trace: str) -> PassRecord:
        """The pass of `inflight` in the first command of a trace."""
        return next(iter(self.by_arm(trace).values())).plain

    def by_turn(self, arm: str, form: str) -> dict[str, float]:
        """The tokens that a step emits of a request, also one without drafts, by turns of the
        agents of all traces of a form."""
        steps = defaultdict[str, int](int)
        tokens = defaultdict[str, int](int)
        for name, cell in self.by_trace(arm).items():
            for request in cell.record.requests if form_of(name) == form else ():
                turns = turns_with(request.turn) or ""
                drafted = request.per_step_emitted or []  # of steps with drafts
                num_later = request.output_len - 1
                steps[turns] += len(drafted) + num_later - sum(drafted)
                tokens[turns] += num_later
        in_order = sorted(steps, key=first_turn)
        return {turns: tokens[turns] / steps[turns] for turns in in_order if steps[turns]}


def form_of(trace: str) -> str:
    return next(known.form for known in TRACES if known.name == trace)


def first_turn(turns: str) -> int:
    return int(turns.partition(" ")[0])
