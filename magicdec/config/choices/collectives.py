"""The meaning of `--collectives auto`, and how messages travel between stages: from GPU to GPU, or
through host memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.config.choices.choice import Choice, How, asked_for, first_obstacle
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedParallel

# Most bytes of shared memory that a rank makes for the sums of its groups, and for these and the
# messages of a pipeline.
GROUP_BYTES = 2 << 20
STAGE_BYTES = 14 << 20
IN_MESSAGES = "in_messages"
HOST_COPIES = "host_copies"
NCCL = "nccl"
GPU_FREE = "--device cpu --collectives gloo"  # what serves more ranks than GPUs


def choose_collectives(
    value: str, device: str, machine: Machine, is_staged: bool = False
) -> Choice | None:
    """The collectives, None for one rank. Stages (`is_staged`) may pass hidden states through host
    memory, and so share a GPU. Raises ValueError for named ones that cannot serve."""
    ranks = machine.local_world_size
    gpus = machine.num_gpus
    if machine.world_size == 1:
        return None
    if device != "cuda":
        return choose_host_collectives(value, device, machine, is_staged)
    if is_staged and value == "auto" and ranks > gpus:
        choice = choose_host_collectives(value, device, machine, is_staged)
        return Choice(choice, f"auto: {ranks} ranks share {gpus} GPUs", How.SECOND_BEST)
    if is_staged and value not in ("auto", NCCL):
        return choose_host_collectives(value, device, machine, is_staged)
    if ranks > gpus and value in ("auto", NCCL):
        raise ValueError(
            f"--collectives {value} --device cuda: NCCL wants a GPU for each of the {ranks} ranks "
            f"of a host, and this one has {gpus}; start at most {gpus}, or choose "
            f"{'--collectives gloo' if is_staged else GPU_FREE}"
        )
    if value == "auto":
        return Choice(NCCL, "auto: CUDA")
    obstacle = None if value == NCCL else f"it cannot serve --device {device}"
    return asked_for("--collectives", value, obstacle, "auto, nccl")


def choose_host_collectives(
    value: str, device: str, machine: Machine, is_staged: bool = False
) -> Choice:
    """As `choose_collectives`, for exchange through the memory of hosts."""
    has_other_hosts = machine.local_world_size != machine.world_size
    obstacles = {
        "several hosts": has_other_hosts,
        "no C++ compiler": not machine.has_compiler,
    }
    obstacle = first_obstacle(obstacles) or lacking_memory(machine, is_staged)
    if value == "auto":
        if obstacle:
            how = How.AUTO if has_other_hosts else How.SECOND_BEST  # between hosts none is better
            return Choice("gloo", f"auto: {obstacle}", how)
        return Choice("shared_memory", "auto: one host")
    refusals = {
        NCCL: f"it cannot serve --device {device}",
        "shared_memory": f"{obstacle}" if obstacle else None,
    }
    return asked_for("--collectives", value, refusals.get(value), "auto, gloo")


def lacking_memory(machine: Machine, is_staged: bool) -> str | None:
    """The reason why this host's ranks cannot exchange through shared memory, or None."""
    needed = machine.local_world_size * (STAGE_BYTES if is_staged else GROUP_BYTES)
    free = machine.shared_memory_bytes
    if machine.shared_memory_obstacle or free is None or free >= needed:
        return machine.shared_memory_obstacle
    return f"{free / 1e6:.1f} MB left in /dev/shm, {needed / 1e6:.1f} MB may be needed"


SHOWN = {"shared_memory": "shared memory", "gloo": "gloo"}


@dataclass(frozen=True)
class Transport:
    """The way of messages. `headers` is gloo or shared_memory; `payloads` IN_MESSAGES (CPU),
    HOST_COPIES (by host memory) or NCCL. `why` is the reason on a GPU."""

    headers: str
    payloads: str
    why: str = ""

    def describe(self) -> str:
        headers = SHOWN[self.headers]
        if self.payloads == NCCL:
            return f"headers through {headers}, hidden states from GPU to GPU by NCCL ({self.why})"
        if self.payloads == HOST_COPIES:
            return f"through {headers}, hidden states copied to the host and back ({self.why})"
        return f"through {headers}"

    def to_dict(self) -> dict[str, Any]:
        """The `transport` of a record's `config.parallel`."""
        return {"headers": self.headers, "payloads": self.payloads, "reason": self.why or None}


def choose_transport(
    parallel: ResolvedParallel, machine: Machine, obstacle: str | None = None
) -> Transport | None:
    """The transport, None for one rank. `obstacle` forbids GPU to GPU."""
    choice = parallel.collectives
    if choice is None:
        return None
    if parallel.device == "cpu":
        return Transport(choice, IN_MESSAGES)
    if choice != NCCL:
        flag = f"--collectives {choice}"
        return Transport(choice, HOST_COPIES, choice.why if choice.is_auto else flag)
    headers = choose_host_collectives("auto", "cpu", machine, is_staged=True)
    if obstacle is not None:
        return Transport(headers, HOST_COPIES, obstacle)
    return Transport(headers, NCCL, "each rank has a GPU of its own")


def check_stage_group(flag: str, parallel: ResolvedParallel) -> None:
    """Raises ValueError, naming `flag`, if ranks on CUDA share layers without NCCL."""
    name = parallel.collectives
    if parallel.device == "cuda" and name not in (None, NCCL):
        raise ValueError(
            f"{flag}: ranks that share layers on CUDA need a GPU each and --collectives nccl; here "
            f"they have {name}"
        )
