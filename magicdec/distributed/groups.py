"""ParallelGroups: who is who among the ranks, passed explicitly. The only reader of torchrun's
environment.

Imports torch only when a group is made, so that a command line can be refused at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store


@dataclass(frozen=True)
class Launch:
    """This process's place as torchrun launched it; a plain `python` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch() -> Launch:
    env = os.environ
    return Launch(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
    )


def first_refusal(launch: Launch, refusal: str) -> str:
    """What the first rank that refuses has to say, on every rank; empty where none refuses.

    Before any process group: through the store by which the ranks will find each other. Called by
    all ranks."""
    if launch.world_size == 1:
        return refusal
    store = _meeting_place(launch)
    store.set(str(launch.rank), refusal)
    said = [store.get(str(rank)).decode() for rank in range(launch.world_size)]
    if store.add("read", 1) == launch.world_size:
        store.set("all have read", "")
    if launch.rank == 0:  # the store may be this process's own
        store.get("all have read")
    return next((text for text in said if text), "")


@cache
def _meeting_place(launch: Launch) -> Store:
    """Of all ranks, before there are groups. Kept: without torchrun its server lives in rank 0, and
    the groups will meet there too."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size)))
    return PrefixStore("magicdec/refusals", store)


class Exchange(Protocol):
    """What carries tensors in place of the process group."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Group:
    """Ranks that compute together. `ranks` is in shard order; `handle` is None for a group of
    one."""

    ranks: tuple[int, ...]
    index: int
    handle: ProcessGroup | None = None
    exchange: Exchange | None = None  # None: the process group carries tensors itself

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.exchange is not None:
            return self.exchange.all_reduce(x)
        if self.handle is not None:
            import torch.distributed as dist

            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, stacked in front: [size, ...], in an order of the group's own."""
        if self.exchange is not None:
            return self.exchange.all_gather(x)
        if self.handle is None:
            return x.unsqueeze(0)
        import torch
        import torch.distributed as dist

        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self.handle)
        return out

    def all_gather_range(
        self, span: tuple[int, int], device: torch.device
    ) -> list[tuple[int, int]]:
        """Every rank's `span`, in the order of `all_gather`. Read by the host."""
        import torch

        spans = self.all_gather(torch.tensor(span, device=device)).tolist()
        return [(first, last) for first, last in spans]

    def broadcast(self, x: Tensor, index: int) -> Tensor:
        """The x of rank `index` of the group, on every rank; the others give one of its shape and
        dtype."""
        if self.exchange is not None:
            return self.exchange.all_gather(x)[index]
        if self.handle is not None:
            import torch.distributed as dist

            x = x.contiguous()
            dist.broadcast(x, src=self.ranks[index], group=self.handle)
        return x

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value (small, picklable, from our own ranks)."""
        if self.handle is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def barrier(self) -> None:
        if self.handle is not None:
            import torch.distributed as dist

            dist.barrier(group=self.handle)


@dataclass(frozen=True)
class ParallelGroups:
    """The layout of a run: this rank, the group that holds the target model, and the one that holds
    a standalone draft; None where there is no draft, or this rank holds none of it."""

    rank: int
    world_size: int
    target: Group
    draft: Group | None = None


def make_groups(
    launch: Launch,
    rank_group: tuple[int, ...],
    device: torch.device,
    collectives: str | None,
    draft_ranks: tuple[int, ...] | None = None,
) -> ParallelGroups:
    """Start torch.distributed if there are several ranks, and build the groups in the same order on
    every rank. `collectives` is a resolved name of `names.COLLECTIVES`, None for one rank."""
    if launch.world_size > 1:
        import torch.distributed as dist

        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    target = _make_group(launch.rank, rank_group, device, collectives)
    assert target is not None, "every rank is one of the target's"
    draft = None
    if draft_ranks is not None:
        draft = _make_group(launch.rank, draft_ranks, device, collectives)
    return ParallelGroups(launch.rank, launch.world_size, target, draft)


def _make_group(
    rank: int, ranks: tuple[int, ...], device: torch.device, collectives: str | None
) -> Group | None:
    """A group of `ranks`, and None on the others. Called by all ranks, which must name it alike:
    a group that adds up to another size is an error here, not a deadlock later."""
    if len(ranks) == 1:
        return Group(ranks, 0) if rank in ranks else None
    import torch
    import torch.distributed as dist

    handle = dist.new_group(sorted(ranks))
    exchange: Exchange | None = None
    if rank not in ranks:
        return None
    index = ranks.index(rank)
    if collectives == "shared_memory":
        from magicdec.distributed.shared_memory import SharedMemoryExchange

        exchange = SharedMemoryExchange(handle, index, len(ranks))
    elif collectives == "symmetric_memory":
        from magicdec.distributed.symmetric_memory import SymmetricMemoryExchange

        exchange = SymmetricMemoryExchange(handle, device)
    group = Group(ranks, index, handle, exchange)
    total = group.all_reduce(torch.ones(1, device=device))
    assert int(total.item()) == len(ranks), f"the group of ranks {ranks} has {total.item():g}"
    return group


def close_groups() -> None:
    """Leave torch.distributed, if it was started."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
