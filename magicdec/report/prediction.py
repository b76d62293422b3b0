"""What `magicdec plan` predicts for the runs of a report, from the machine file of `magicdec probe`
and the acceptance that each run measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.speculation import Prediction, Speculation, break_even_context
from magicdec.hardware.ceiling_file import MachineFile, load_machine
from magicdec.model.presets.presets import find_config
from magicdec.report.point import Point

NO_MACHINE = "no machine was given; --machine FILE names what magicdec probe wrote"


class NotPredicted(ValueError):
    """Why a run cannot be predicted, in one line."""


@dataclass(frozen=True)
class Predictor:
    """The plan of runs on the machine that `machine` describes; None if none was given."""

    machine: MachineFile | None = None

    def run(self, point: Point) -> Prediction:
        """The prediction of one run at the mean length of its context. Raises NotPredicted."""
        curve = acceptance_of(point)
        s = point.settings
        context = int(s["prefix_len"] or 0) + int(s["gen_len"] or 0) // 2
        way = self.way(point, curve)
        return way.predict_step(int(s["B"] or 0), context, len(curve))

    def break_even(self, points: Sequence[Point], batch_size: int) -> int | None:
        """The shortest context from which steps of the method of these runs are predicted to be
        faster than autoregressive ones; None if there is none. Raises NotPredicted."""
        curves: dict[int, tuple[Point, tuple[float, ...]]] = {}
        for point in points:
            budget, curve = budget_of(point), acceptance_of(point)
            if budget not in curves or len(curve) >= len(curves[budget][1]):
                curves[budget] = point, curve
        ways = [self.way(point, curve) for point, curve in curves.values()]
        return break_even_context(ways, batch_size, min(len(c) for _, c in curves.values()))

    def way(self, point: Point, curve: tuple[float, ...]) -> Speculation:
        target = self.deployment(point, str(point.settings["model"]))
        drafter = point.settings["drafter"]
        if drafter not in ("self", "model"):
            raise NotPredicted(f"the plan does not know drafts by {drafter}")
        draft = target
        if drafter == "model":
            ranks = int(point.settings["draft_ranks"] or 1)
            draft = self.deployment(point, str(point.settings["draft_model"]), ranks)
        return Speculation(target, draft, budget_of(point), curve)

    def deployment(self, point: Point, name: str, ranks: int | None = None) -> Deployment:
        if self.machine is None:
            raise NotPredicted(NO_MACHINE)
        check_machine(self.machine, point)
        s = point.settings
        dtype = str(s["dtype"])
        try:
            hardware, config = self.machine.hardware(dtype), find_config("--model", name)
        except ValueError as error:
            raise NotPredicted(str(error)) from None
        ranks = ranks or point.environment.world_size
        if ranks > 1 and hardware.link is None:
            raise NotPredicted("the machine file has no link between ranks")
        is_int8 = s["target_dtype" if name == s["model"] else "draft_dtype"] == "int8"
        return Deployment(config, hardware, DTYPE_BYTES[dtype], ranks, 1, is_int8)


def load_predictor(path: Path | None) -> Predictor:
    """Raises ValueError, naming the file, if it is not a machine file."""
    return Predictor(None if path is None else load_machine(path))


def check_machine(machine: MachineFile, point: Point) -> None:
    """Raises NotPredicted if the run was made on another machine, or with other ranks or
    threads."""
    here = point.environment
    found = {
        "cpu": here.cpu,
        "gpu": here.gpu,
        "world_size": here.world_size,
        "threads": point.settings["threads"],
    }
    for key, value in found.items():
        measured = machine.description.get(key, value)
        if measured != value:
            raise NotPredicted(f"the machine was probed with {key} {measured}, not {value}")


def acceptance_of(point: Point) -> tuple[float, ...]:
    """The measured share of verifications that accepted at least 1, 2, ... drafts."""
    curve = point.metrics and point.metrics.acceptance_per_position
    if not curve:
        raise NotPredicted("the run has no acceptance")
    if point.settings["gamma"] != len(curve):
        raise NotPredicted("the plan needs a fixed gamma")
    return tuple(curve)


def budget_of(point: Point) -> int:
    """The budget of a draft; of one that reads everything, the longest context."""
    budget = point.settings["budget"]
    return int(budget) if budget is not None else 1 << 30
