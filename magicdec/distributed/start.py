"""Starts torch.distributed, makes this rank's groups, and shuts down. Imports torch only to make a
group.

By itself gloo listens on the address of the host's name: reachable without need, or loopback
although ranks are elsewhere. `GLOO_SOCKET_IFNAME` names another interface.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from magicdec.distributed.groups import (
    Exchange,
    Group,
    Launch,
    ParallelGroups,
    next_name,
    rendezvous_store,
)
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.loopback import LOOPBACK
from magicdec.distributed.watching.processes import processes_of
from magicdec.distributed.watching.watch import leave_ranks, watch_ranks

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

VARIABLE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
REQUEST_BYTES = 40  # sizeof(struct ifreq)
ADDRESS_AT = 20  # where the IPv4 address lies in it
ANY_PORT = 9


def use_interface_towards(host: str) -> None:
    """Let gloo listen on the interface towards `host`, the first rank's, unless the user has set
    one."""
    name = interface_towards(host)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def interface_towards(host: str) -> str | None:
    """The interface towards `host` (a name or an IPv4 address; nothing is sent), or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name, probe) == own), None)


def _address_of(name: str, any_socket: socket.socket) -> str | None:
    request = struct.pack(f"{REQUEST_BYTES}s", name.encode())
    try:
        answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[ADDRESS_AT : ADDRESS_AT + 4])


def start_process_group(launch: Launch, device: torch.device) -> None:
    """Initialize torch.distributed if there are several ranks. The default group is for host
    tensors: NCCL does not let ranks share a GPU."""
    _start(launch, device, "gloo")


def make_groups(
    launch: Launch,
    rank_group: tuple[int, ...],
    device: torch.device,
    collectives: str | None,
    draft_ranks: tuple[int, ...] | None = None,
) -> ParallelGroups:
    """Initialize torch.distributed, and make the groups in the same order on every rank. The
    default group is for tensors on `device`; `collectives` is resolved."""
    _start(launch, device, backend_of(device))
    return _make_parallel_groups(
        launch, StageGrid(1), [rank_group], device, collectives, draft_ranks
    )


def make_stage_groups(
    launch: Launch,
    grid: StageGrid,
    device: torch.device,
    collectives: str | None,
    draft_ranks: tuple[int, ...] | None = None,
) -> ParallelGroups:
    """Make a group for each stage; a rank in no stage is alone. The default group is for host
    tensors."""
    assert launch.world_size >= grid.world_size, "the grid was made for the launched ranks"
    _start(launch, device, "gloo")
    stages = [grid.ranks_of(stage) for stage in range(grid.num_stages)]
    return _make_parallel_groups(launch, grid, stages, device, collectives, draft_ranks)


def _make_parallel_groups(
    launch: Launch,
    grid: StageGrid,
    ranks_of_stages: Sequence[tuple[int, ...]],
    device: torch.device,
    collectives: str | None,
    draft_ranks: tuple[int, ...] | None,
) -> ParallelGroups:
    groups = [_make_group(launch, ranks, device, collectives) for ranks in ranks_of_stages]
    alone = Group((launch.rank,), 0)
    target = next((group for group in groups if group is not None), alone)
    draft = None
    if draft_ranks is not None:
        draft = _make_group(launch, draft_ranks, device, collectives)
    return ParallelGroups(launch.rank, launch.world_size, target, draft, grid)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def stage_groups_before_run(
    launch: Launch, grid: StageGrid, device: torch.device, collectives: str | None
) -> Iterator[ParallelGroups]:
    """The groups of `make_stage_groups` for a measurement before the run starts
    torch.distributed."""
    import torch.distributed as dist

    # A store of its own, because later groups must not find the addresses of these.
    name = next_name(launch, "before the run")
    store = dist.PrefixStore(name, rendezvous_store(launch))
    _start(launch, device, "gloo", store)
    yield make_stage_groups(launch, grid, device, collectives)
    dist.destroy_process_group()  # not after an error: it waits for the other ranks


def _start(launch: Launch, device: torch.device, backend: str, store: Store | None = None) -> None:
    """Initialize torch.distributed with the default group's `backend`, and begin to watch the other
    ranks. Without `store`, they meet as torchrun says."""
    if launch.world_size == 1:
        return
    import torch.distributed as dist

    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
    watch_ranks(launch)
    if not dist.is_initialized():
        has_other_hosts = launch.local_world_size != launch.world_size
        use_interface_towards(os.environ["MASTER_ADDR"] if has_other_hosts else LOOPBACK)
        if store is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.world_size
            )


def _make_group(
    launch: Launch, ranks: tuple[int, ...], device: torch.device, collectives: str | None
) -> Group | None:
    """The group of `ranks`, None on other ranks. All ranks must call it alike, which an all-reduce
    checks."""
    if len(ranks) == 1:
        return Group(ranks, 0) if launch.rank in ranks else None
    import torch
    import torch.distributed as dist

    handle = dist.new_group(sorted(ranks), backend=backend_of(device))
    exchange: Exchange | None = None
    if launch.rank not in ranks:
        return None
    index = ranks.index(launch.rank)
    if collectives == "shared_memory":
        from magicdec.distributed.shared_memory import SharedMemoryExchange

        exchange = SharedMemoryExchange(handle, ranks, index)
    elif collectives == "gloo":
        from magicdec.distributed.channels.carriers import DirectExchange

        exchange = DirectExchange(handle, ranks, index, processes_of(launch))
    group = Group(ranks, index, handle, exchange)
    total = group.all_reduce(torch.ones(1, device=device))
    assert int(total.item()) == len(ranks), f"the group of ranks {ranks} sums to {total.item():g}"
    return group


def close_groups() -> None:
    """Shut down torch.distributed. All ranks must call it, and need no other afterwards."""
    import torch.distributed as dist

    leave_ranks()
    if dist.is_initialized():
        dist.destroy_process_group()
