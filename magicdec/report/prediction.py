"""What `magicdec plan` predicts for the runs of a report, from the machine file of `magicdec probe`
and the acceptance that each run measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.speculation import Prediction, Speculation, break_even_context
from magicdec.hardware.ceiling_file import MachineFile, load_machine
from magicdec.model.presets.presets import find_config

NO_MACHINE = "no machine was given; --machine FILE names what magicdec probe wrote"
Run = Mapping[str, Any]
"""A row of the data frame of runs."""


class NotPredicted(ValueError):
    """Why a run cannot be predicted, in one line."""


@dataclass(frozen=True)
class Predictor:
    """The plan of runs on the machine that `machine` describes; None if none was given."""

    machine: MachineFile | None = None

    def run(self, run: Run) -> Prediction:
        """The prediction of one run at the mean length of its context. Raises NotPredicted."""
        curve = acceptance_of(run)
        context = run["prefix_len"] + run["gen_len"] // 2
        return self.way(run, curve).predict_step(run["B"], context, len(curve))

    def break_even(self, runs: Sequence[Run], batch_size: int) -> int | None:
        """The shortest context from which steps of the method of these runs are predicted to be
        faster than autoregressive ones; None if there is none. Raises NotPredicted."""
        curves: dict[int, tuple[Run, tuple[float, ...]]] = {}
        for run in runs:
            budget, curve = budget_of(run), acceptance_of(run)
            if budget not in curves or len(curve) >= len(curves[budget][1]):
                curves[budget] = run, curve
        ways = [self.way(run, curve) for run, curve in curves.values()]
        return break_even_context(ways, batch_size, min(len(c) for _, c in curves.values()))

    def way(self, run: Run, curve: tuple[float, ...]) -> Speculation:
        target = self.deployment(run, run["model"], run["ranks"])
        if run["drafter"] not in ("self", "model"):
            raise NotPredicted(f"the plan does not know drafts by {run['drafter']}")
        draft = target
        if run["drafter"] == "model":
            draft = self.deployment(run, run["draft_model"], run["draft_ranks"] or 1)
        return Speculation(target, draft, budget_of(run), curve)

    def deployment(self, run: Run, name: str, ranks: int) -> Deployment:
        if self.machine is None:
            raise NotPredicted(NO_MACHINE)
        check_machine(self.machine, run)
        try:
            hardware = self.machine.hardware(run["dtype"])
            config = find_config("--model", name)
        except ValueError as error:
            raise NotPredicted(str(error)) from None
        if ranks > 1 and hardware.link is None:
            raise NotPredicted("the machine file has no link between ranks")
        is_int8 = run["target_dtype" if name == run["model"] else "draft_dtype"] == "int8"
        return Deployment(config, hardware, DTYPE_BYTES[run["dtype"]], ranks, 1, is_int8)


def load_predictor(path: Path | None) -> Predictor:
    """Raises ValueError, naming the file, if it is not a machine file."""
    return Predictor(None if path is None else load_machine(path))


def check_machine(machine: MachineFile, run: Run) -> None:
    """Raises NotPredicted if the run was made on another machine, or with other ranks or
    threads."""
    columns = {"cpu": "environment.cpu", "gpu": "environment.gpu", "world_size": "ranks",
               "threads": "threads"}  # fmt: skip
    for key, column in columns.items():
        value = run[column]
        measured = machine.description.get(key, value)
        if measured != value:
            raise NotPredicted(f"the machine was probed with {key} {measured}, not {value}")


def acceptance_of(run: Run) -> tuple[float, ...]:
    """The measured share of verifications that accepted at least 1, 2, ... drafts."""
    curve = run["acceptance_per_position"]
    if not curve:
        raise NotPredicted("the run has no acceptance")
    if run["gamma"] != len(curve):
        raise NotPredicted("the plan needs a fixed gamma")
    return tuple(curve)


def budget_of(run: Run) -> int:
    """The budget of a draft; of one that reads everything, the longest context."""
    return 1 << 30 if run["budget"] is None else int(run["budget"])
