"""Measures the ceilings of a machine on all ranks together, for a machine file.

Owns the order of the measurements, which are in `ceilings.py`, and what is kept of a probe that was
interrupted. Imports torch only to measure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from magicdec.config.choices.layers import (
    StepParts,
    choose_elementwise,
    choose_linear,
    choose_native_steps,
)
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import Hardware, Link, MachineFile
from magicdec.names import DTYPES


@dataclass
class Found:
    """What a probe has measured so far. A dtype is here when all of its measurements are done."""

    description: dict[str, Any] = field(default_factory=dict)
    bandwidth: float | None = None
    link: Link | None = None
    spans_nodes: bool = False
    by_dtype: dict[str, Hardware] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)

    def machine_file(self) -> MachineFile | None:
        """The machine file with the dtypes that are done; None if none is."""
        if self.bandwidth is None or not self.by_dtype:
            return None
        found, bandwidth = self.by_dtype, self.bandwidth
        # Between ranks of several hosts, the all-reduce was limited by their network.
        return MachineFile(
            self.description,
            bandwidth,
            {dtype: h.flops_per_s for dtype, h in found.items()},
            {dtype: h.layer_overhead_s for dtype, h in found.items()},
            {dtype: h.kv_bytes_per_s or bandwidth for dtype, h in found.items()},
            None if self.spans_nodes else self.link,
            self.link if self.spans_nodes else None,
            {dtype: h.attention_flops_per_s or h.flops_per_s for dtype, h in found.items()},
            {dtype: h.token_overhead_s for dtype, h in found.items()},
            dict(self.spreads),
        )


def measure(config: ResolvedConfig, machine: Machine, launch: Launch, found: Found) -> None:
    """Measure all ceilings into `found`. All ranks must call this together."""
    from magicdec.probe import ceilings
    from magicdec.setup.loading import Kinds
    from magicdec.setup.session import RankSession

    kind, collectives = config.parallel.device, config.parallel.collectives
    spreads = ceilings.Spreads()
    found.spreads, found.spans_nodes = spreads, launch.world_size > launch.local_world_size
    with RankSession(launch, config.parallel) as session:
        group, device = session.groups.target, session.device
        found.description = asdict(session.describe_environment()) | {"collectives": collectives}
        del found.description["read_bandwidth_bytes_per_s"]  # a record's, of all ranks together
        bandwidth = ceilings.rank_bandwidth(group, device, spreads)
        found.bandwidth = bandwidth
        found.link = ceilings.measure_link(group, device, spreads)
        for dtype in DTYPES:
            hardware = ceilings.measure_hardware(group, device, dtype, bandwidth, spreads)
            linear = choose_linear("auto", kind, dtype, machine)
            elementwise = choose_elementwise("auto", kind, dtype, linear, machine).name
            parts = StepParts(
                *(kind, config.attention.backend_choice, linear, elementwise, None),
                machine.avoids_native_steps,
            )
            steps = choose_native_steps("auto", parts, None).name
            kinds = Kinds(dtype, dtype, linear, elementwise, steps)
            found.by_dtype[dtype] = ceilings.measure_forwards(
                group, device, hardware, kinds, config.attention.backend, spreads
            )
