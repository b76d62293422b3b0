"""What `magicdec plan` predicts for the runs of a report, from the machine file of `magicdec probe`
and the acceptance that each run measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.speculation import Prediction, Speculation
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.model.presets.presets import find_config

NO_MACHINE = "no machine was given; --machine FILE names what magicdec probe wrote"
Run = Mapping[str, Any]
"""A row of the data frame of runs."""


class NotPredicted(ValueError):
    """Why a run cannot be predicted, in one line."""


def predict(machine: MachineFile | None, run: Run) -> Prediction:
    """What the plan predicts of one run on the machine that was described, if one was, at the mean
    length of its context. Raises NotPredicted."""
    curve = run["acceptance_per_position"]
    if not curve:
        raise NotPredicted("the run has no acceptance")
    if run["gamma"] != len(curve):
        raise NotPredicted("the plan needs a fixed gamma")
    target = draft = deployment(machine, run, run["model"], run["ranks"])
    if run["drafter"] not in ("self", "model"):
        raise NotPredicted(f"the plan does not know drafts by {run['drafter']}")
    if run["drafter"] == "model":
        draft = deployment(machine, run, run["draft_model"], run["draft_ranks"] or 1)
    # A draft that reads everything has the budget of the longest context.
    budget = 1 << 30 if run["budget"] is None else int(run["budget"])
    context = run["prefix_len"] + run["gen_len"] // 2
    way = Speculation(target, draft, budget, tuple(curve))
    return way.predict_step(run["B"], context, len(curve))


def deployment(machine: MachineFile | None, run: Run, name: str, ranks: int) -> Deployment:
    """A model of the run on the machine. Raises NotPredicted."""
    if machine is None:
        raise NotPredicted(NO_MACHINE)
    check_machine(machine, run)
    try:
        hardware = machine.hardware(run["dtype"])
        config = find_config("--model", name)
    except ValueError as error:
        raise NotPredicted(str(error)) from None
    if ranks > 1 and hardware.link is None:
        raise NotPredicted("the machine file has no link between ranks")
    is_int8 = run["target_dtype" if name == run["model"] else "draft_dtype"] == "int8"
    return Deployment(config, hardware, DTYPE_BYTES[run["dtype"]], ranks, 1, is_int8)


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
