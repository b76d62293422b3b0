"""Measures the ceilings of a machine on all ranks together, for a machine file.

Owns the order of the measurements, which are in `ceilings.py`. Imports torch only to measure.
"""

from __future__ import annotations

from dataclasses import asdict

from magicdec.config.layer_choice import (
    StepParts,
    choose_elementwise,
    choose_linear,
    choose_native_steps,
)
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.names import DTYPES


def measure(config: ResolvedConfig, machine: Machine, launch: Launch) -> MachineFile:
    """Measure all ceilings. All ranks must call this together."""
    from magicdec.probe import ceilings
    from magicdec.setup.loading import Kinds
    from magicdec.setup.session import RankSession

    kind, collectives = config.parallel.device, config.parallel.collectives
    with RankSession(launch, config.parallel) as session:
        group, device = session.groups.target, session.device
        bandwidth = ceilings.rank_bandwidth(group, device)
        link = ceilings.measure_link(group, device)
        found = {}
        for dtype in DTYPES:
            hardware = ceilings.measure_hardware(group, device, dtype, bandwidth)
            linear = choose_linear("auto", kind, dtype, machine)
            elementwise = choose_elementwise("auto", kind, dtype, linear, machine).name
            parts = StepParts(kind, config.attention.backend_choice, linear, elementwise, None)
            steps = choose_native_steps("auto", parts, None).name
            kinds = Kinds(dtype, dtype, linear, elementwise, steps)
            found[dtype] = ceilings.measure_forwards(
                group, device, hardware, kinds, config.attention.backend
            )
    description = asdict(session.describe_environment()) | {"collectives": collectives}
    del description["read_bandwidth_bytes_per_s"]  # a record's, of all ranks together
    # Between ranks of several hosts, the all-reduce was limited by their network.
    spans_nodes = launch.world_size > launch.local_world_size
    return MachineFile(
        description,
        bandwidth,
        {dtype: h.flops_per_s for dtype, h in found.items()},
        {dtype: h.layer_overhead_s for dtype, h in found.items()},
        {dtype: h.kv_bytes_per_s or bandwidth for dtype, h in found.items()},
        None if spans_nodes else link,
        link if spans_nodes else None,
        {dtype: h.attention_flops_per_s or h.flops_per_s for dtype, h in found.items()},
        {dtype: h.token_overhead_s for dtype, h in found.items()},
    )
