"""The predicted times of pipeline stages, from the costs of forwards. Pure arithmetic: imports no
torch, runs nothing. Scheduling, sampling and messages are left out."""

from __future__ import annotations

from dataclasses import replace

from magicdec.cost_model.costs import Deployment
from magicdec.distributed.layer_split import StageTimes


def ends_of(model: Deployment) -> Deployment:
    """The model without its layers: the final norm and the head."""
    return replace(model, config=replace(model.config, num_layers=0))


def stage_times(model: Deployment, B: int, S: int, T: int = 1) -> tuple[StageTimes, StageTimes]:
    """Of the first stage, which also has the ends of the model, and of each other stage: the time
    of a decode step of B rows with S cached tokens and T new ones each. `model.tp` ranks share a
    stage."""
    ends_s = ends_of(model).seconds(B, T, S)
    layer_s = (model.seconds(B, T, S) - ends_s) / model.config.num_layers
    return StageTimes(ends_s, layer_s), StageTimes(0.0, layer_s)
