"""StagedSystem: the common base of systems whose ranks are stages of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from magicdec.config.capacity import Capacity
from magicdec.config.choices.collectives import NCCL, check_stage_group, choose_transport
from magicdec.config.resolve import Placement
from magicdec.config.run_config import RunConfig
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.layer_split import FLAG, StageTimes, split_layers
from magicdec.distributed.layout import StageGrid, read_split
from magicdec.model.checkpoint.source import ModelSource
from magicdec.output.console import Progress
from magicdec.setup.loading import LoadedModels
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.model_checks import check_shared
from magicdec.setup.prepare import ResolvedRun, SetupCache
from magicdec.systems.modes import Pass
from magicdec.systems.stages.auto_split import Timing, choose_split
from magicdec.systems.stages.emulation import (
    EmulatedTime,
    LateConnector,
    SleepingModels,
    without_weights,
)
from magicdec.systems.stages.settings import StagesSettings
from magicdec.systems.system import System


class StagedSystem(System):
    settings: StagesSettings

    @property
    def sleeps(self) -> bool:
        """Whether stages sleep in place of computing."""
        return self.settings.emulates

    @cached_property
    def emulated_time(self) -> EmulatedTime:
        return EmulatedTime()

    @property
    def _why_on_host(self) -> str | None:
        """The reason why hidden states pass through host memory, also between GPUs."""
        if self.settings.emulate_link_ms is not None:
            return "an emulated link delays messages on the host"
        return "stages that sleep have no hidden states" if self.sleeps else None

    def find_part(
        self, run_config: RunConfig, capacity: Capacity, cache: SetupCache, num_ranks: int
    ) -> ResolvedRun:
        """The models for stages of `num_ranks` ranks, which read a part of a checkpoint and
        exchange messages."""
        if self.sleeps:
            run_config = without_weights(run_config)
        placement = Placement(is_staged=True, is_alone=num_ranks == 1)
        models = self.find(run_config, capacity, cache, placement)
        parallel = models.config.parallel
        self.transport = choose_transport(parallel, models.machine, self._why_on_host)
        return models

    def check_stages(self, models: ResolvedRun, num_ranks: int, has_others: bool) -> None:
        """Raises ValueError if the `num_ranks` ranks of a stage cannot share its layers.
        `has_others`: some ranks have no stage."""
        if num_ranks == 1:
            return
        flag_text = f"{FLAG} {self.settings.layer_split}"
        check_stage_group(flag_text, models.config.parallel)
        check_shared(f"{flag_text}, stages of {num_ranks} ranks", num_ranks, models.source.config)
        if self.settings.is_measured and has_others:
            raise ValueError(
                f"{flag_text}: stages of {num_ranks} ranks are timed together, but other ranks "
                "have no stage; give layer counts or shares"
            )

    def choose_layers(self, timing: Timing, what: str) -> tuple[range, ...]:
        """The layers of each stage. `what` names the timed step of `--layer_split auto`."""
        split = read_split(self.settings.layer_split)
        num_layers = self.run.source.config.num_layers
        chosen = choose_split(
            split.stages,
            timing.stages,
            num_layers,
            self.launch,
            f"measured for {what}",
            timing.find_times,
        )
        if self.settings.layer_split is not None:
            self.layer_split = str(replace(split, stages=chosen.layer_split))
        self.split = chosen.reason and f"{FLAG} {self.layer_split}: {chosen.reason}"
        return chosen.layers

    def plan(self, serving_pass: Pass, ranks: Sequence[int]) -> MemoryPlan:
        plan = super().plan(serving_pass, ranks)
        return replace(plan, weights=0, working=0) if self.sleeps else plan

    def make_models(self, device: torch.device, progress: Progress) -> LoadedModels:
        stage_ms = self.settings.emulate_stage_ms
        if stage_ms is None:
            return LoadedModels(device, progress)
        return SleepingModels(device, progress, stage_ms / 1e3, self.emulated_time)

    def connector(self, form: MessageForm, device: torch.device, *sizes: int) -> Connector:
        """The connector of this rank with the others; `sizes` as in `Connector`."""
        transport = self.transport
        headers = None if transport is None else transport.headers
        apart = NCCL if transport is not None and transport.payloads == NCCL else None
        link_s = (self.settings.emulate_link_ms or 0.0) / 1e3
        kind: Callable[..., Connector] = Connector
        if link_s or self.sleeps:
            kind = partial(LateConnector, link_s, self.emulated_time if self.sleeps else None)
        return kind(self.launch, headers, form, device, apart, *sizes)

    def describe_settings(self) -> dict[str, Any]:
        split = self.settings.layer_split if self.layer_split is None else self.layer_split
        return super().describe_settings() | {"layer_split": split}

    def config_of(self, serving_pass: Pass) -> dict[str, Any]:
        config = super().config_of(serving_pass)
        transport = self.transport
        config["parallel"]["transport"] = None if transport is None else transport.to_dict()
        return config


def check_split(split: str | None, grid: StageGrid, source: ModelSource) -> None:
    """Raises ValueError for an impossible split, before any timing."""
    any_times = [StageTimes(0.0, 1.0)] * grid.num_stages
    split_layers(split, grid.num_stages, source.config.num_layers, any_times)
