"""ParallelGroups: this rank and its groups. Also the only reader and writer of torchrun's
environment variables. Imports torch only to make a group, so that refusals are immediate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from magicdec.distributed.layout import StageGrid

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """This process's ranks as set by torchrun; rank 0 of 1 without it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def local_ranks(self) -> range:
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def read_launch() -> Launch:
    env = os.environ
    return Launch(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
    )


def set_launch(launch: Launch, address: str, port: int) -> None:
    """Make this process that rank, with that rendezvous store, as torchrun would."""
    os.environ |= {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def first_refusal(launch: Launch, refusal: str, topic: str) -> str:
    """The refusal of the lowest rank that has one, or an empty text, on every rank. All ranks must
    call it."""
    return next((text for text in exchange_texts(launch, refusal, topic) if text), "")


def check_equal(launch: Launch, facts: Mapping[str, object], topic: str) -> None:
    """Raises ValueError, on every rank, naming a fact in which a rank differs from rank 0 (as JSON
    or text). All ranks must call it."""
    texts = exchange_texts(launch, json.dumps(facts, default=str), topic)
    first = json.loads(texts[0])
    for rank, theirs in enumerate(map(json.loads, texts)):
        for name in {**first, **theirs}:
            if (ours := first.get(name)) != (other := theirs.get(name)):
                raise ValueError(f"{name}: rank 0 has {ours}, rank {rank} has {other}")


def exchange_texts(launch: Launch, text: str, topic: str = "refusals") -> list[str]:
    """Every rank's text, on every rank, through torch's rendezvous store, before any process group.
    All ranks must call it equally often for each topic."""
    if launch.world_size == 1:
        return [text]
    return exchange_in(rendezvous_store(launch), next_name(launch, topic), launch, text)


def exchange_in(shared: Store, name: str, launch: Launch, text: str) -> list[str]:
    """As `exchange_texts`, in a shared store under a new name."""
    from torch.distributed import PrefixStore

    store = PrefixStore(name, shared)
    store.set(str(launch.rank), text)
    texts = [store.get(str(rank)).decode() for rank in range(launch.world_size)]
    if store.add("read", 1) == launch.world_size:
        store.set("all have read", "")
    if launch.rank == 0:  # the store's server may run in this process, so it must not end yet
        store.get("all have read")
    return texts


def next_name(launch: Launch, topic: str) -> str:
    """The topic with a number, equal on all ranks that call equally often."""
    return f"{topic} {rendezvous_store(launch).add(f'{topic}, rank {launch.rank}', 1)}"


@cache
def rendezvous_store(launch: Launch) -> Store:
    """The store of all ranks, cached because its server may run in rank 0. Raises ValueError, on
    every rank, if a rank runs another command, whose keys would differ."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size)))
    ours = PrefixStore("magicdec", store)
    check_commands(launch, ours, Path(sys.argv[0]).name)
    return ours


def check_commands(launch: Launch, store: Store, command: str) -> None:
    first, *others = exchange_in(store, "command", launch, command)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(
                f"rank 0 runs {first}, rank {rank} runs {other}; start one command on all"
            )


class Exchange(Protocol):
    """Collectives that replace those of the process group."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Group:
    """Ranks that share a model by tensor parallelism, in shard order; `index` is this rank's place.
    `handle` is None for one rank."""

    ranks: tuple[int, ...]
    index: int
    handle: ProcessGroup | None = None
    exchange: Exchange | None = None  # None: the process group's own collectives

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
        """Every rank's x, stacked: [size, ...], in a fixed order, not always shard order."""
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
        """Every rank's `span`, in the order of `all_gather`. Synchronises with the device."""
        import torch

        spans = self.all_gather(torch.tensor(span, device=device)).tolist()
        return [(first, last) for first, last in spans]

    def broadcast(self, x: Tensor, index: int) -> Tensor:
        """The x of rank `index` of the group. The others pass one of equal shape and dtype."""
        if self.exchange is not None:
            return self.exchange.all_gather(x)[index]
        if self.handle is not None:
            import torch.distributed as dist

            x = x.contiguous()
            dist.broadcast(x, src=self.ranks[index], group=self.handle)
        return x

    def all_gather_values(self, value: T, kind: type[T]) -> list[T]:
        if self.handle is None:
            return [value]
        from magicdec.distributed.values import all_gather_values

        return all_gather_values(value, kind, self.size, self.handle)

    def barrier(self) -> None:
        if self.handle is not None:
            import torch.distributed as dist

            dist.barrier(group=self.handle)


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's group for the target (in a pipeline, its stage) and for a standalone draft (None
    without a shard). `grid` has the stages."""

    rank: int
    world_size: int
    target: Group
    draft: Group | None = None
    grid: StageGrid = StageGrid(1)

    @property
    def stage(self) -> int:
        return 0 if self.grid.num_stages == 1 else self.grid.stage_of(self.rank)
