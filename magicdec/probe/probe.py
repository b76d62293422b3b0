"""What one machine can do at most, measured on all ranks together and put into a file's form.

Owns the order of the measurements; `ceilings.py` has each of them. Imports torch only when
it measures.
"""

from __future__ import annotations

import datetime

from magicdec.config.layer_choice import choose_elementwise, choose_linear
from magicdec.config.machine import Machine
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch, close_groups, make_groups
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.names import DTYPES


def measure(config: RunConfig, machine: Machine, launch: Launch) -> MachineFile:
    """`config` is resolved. All ranks go through it in lockstep."""
    import torch

    from magicdec.hardware.environment import describe_environment
    from magicdec.probe import ceilings
    from magicdec.setup.loading import Kinds

    started = datetime.datetime.now(datetime.timezone.utc)
    kind, everyone = config.parallel.device, tuple(range(launch.world_size))
    device = torch.device(kind, launch.local_rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(config.parallel.threads or 1)
    group = make_groups(launch, everyone, device, config.parallel.collectives).target
    bandwidth, link = ceilings.rank_bandwidth(group, device), ceilings.measure_link(group, device)
    found = {}
    for dtype in DTYPES:
        hardware = ceilings.measure_hardware(group, device, dtype, bandwidth)
        linear = choose_linear("auto", kind, dtype, machine)
        elementwise, _ = choose_elementwise("auto", kind, dtype, linear, machine)
        kinds = Kinds(dtype, dtype, linear, elementwise)
        found[dtype] = ceilings.measure_forwards(
            group, device, hardware, kinds, config.attention.backend
        )
    close_groups()
    description = describe_environment(launch, kind, started)
    del description["read_bandwidth_bytes_per_s"]  # of all ranks, in a record
    description["collectives"] = config.parallel.collectives
    # Over several hosts it was their network that bound.
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
