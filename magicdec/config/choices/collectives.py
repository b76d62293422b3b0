"""What `--collectives auto` means on a machine, which collectives cannot serve there, and how the
messages of a pipeline travel between its stages: from GPU to GPU, or through the memory of the
host. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from magicdec.config.choices.choice import Choice, How, asked_for
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedParallel

GPU_COLLECTIVES = ("nccl", "symmetric_memory")
GPU_FREE = "--device cpu --collectives gloo"  # what serves more ranks than GPUs


def choose_collectives(
    value: str, device: str, machine: Machine, is_staged: bool = False
) -> Choice | None:
    """The collectives to use; None for one rank. `is_staged`: the ranks are stages of a pipeline.
    Raises ValueError if the user named some that cannot serve on this device or between these
    hosts."""
    if machine.world_size == 1:
        return None
    if device != "cuda":
        return choose_host_collectives(value, device, machine)
    if is_staged:
        return choose_stage_collectives(value, machine)
    return choose_gpu_collectives(value, machine)


def choose_stage_collectives(value: str, machine: Machine) -> Choice:
    """As `choose_collectives`, for stages on CUDA. Between stages only hidden states pass, which
    can also be copied through the memory of the host. So ranks may share a GPU."""
    ranks, gpus = machine.local_world_size, machine.num_gpus
    if value in GPU_COLLECTIVES or (value == "auto" and ranks <= gpus):
        return choose_gpu_collectives(value, machine, "--collectives gloo")
    choice = choose_host_collectives(value, "cuda", machine)
    if value != "auto":
        return choice
    return replace(choice, why=f"auto: {ranks} ranks share {gpus} GPUs", how=How.SECOND_BEST)


def choose_host_collectives(value: str, device: str, machine: Machine) -> Choice:
    """As `choose_collectives`, for what ranks exchange through the memory of hosts."""
    obstacles = {
        "several hosts": machine.local_world_size != machine.world_size,
        "no C++ compiler": not machine.has_compiler,
        "no /dev/shm": not machine.has_shared_memory,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if value == "auto":
        if obstacle:
            return Choice("gloo", f"auto: {obstacle}", How.SECOND_BEST)
        return Choice("shared_memory", "auto: one host")
    if value in GPU_COLLECTIVES:
        raise ValueError(
            f"--collectives {value} cannot serve --device {device}; choose from gloo, shared_memory"
        )
    if value == "shared_memory" and obstacle:
        raise ValueError(f"--collectives shared_memory: {obstacle} here; choose from auto, gloo")
    return asked_for(value)


def choose_gpu_collectives(value: str, machine: Machine, otherwise: str = GPU_FREE) -> Choice:
    """As `choose_collectives`, for several ranks with a GPU each. `auto` is symmetric memory if
    ENABLE_INTRA_NODE_COMM=1 asks for it and it is available, otherwise NCCL. `otherwise` is what to
    choose with more ranks than GPUs."""
    ranks, gpus = machine.local_world_size, machine.num_gpus
    if value not in ("auto", *GPU_COLLECTIVES):
        fitting = ", ".join(GPU_COLLECTIVES)
        raise ValueError(f"--collectives {value} cannot serve --device cuda; choose from {fitting}")
    if ranks > gpus:
        raise ValueError(
            f"--collectives {value} --device cuda: NCCL wants a GPU for each of the {ranks} ranks "
            f"of a host, and this one has {gpus}; start at most {gpus}, or choose {otherwise}"
        )
    obstacle = machine.missing_symmetric_memory
    if machine.local_world_size != machine.world_size:
        obstacle = "several hosts"
    if value == "symmetric_memory" and obstacle:
        raise ValueError(f"--collectives symmetric_memory: {obstacle}; choose from auto, nccl")
    if value == "auto" and machine.wants_symmetric_memory:
        if obstacle:
            why = f"auto: ENABLE_INTRA_NODE_COMM=1, but {obstacle}"
            return Choice("nccl", why, How.SECOND_BEST)
        return Choice("symmetric_memory", "auto: ENABLE_INTRA_NODE_COMM=1")
    return Choice("nccl", "auto: CUDA") if value == "auto" else asked_for(value)


IN_MESSAGES, HOST_COPIES, NCCL = "in_messages", "host_copies", "nccl"
SHOWN = {"shared_memory": "shared memory", "gloo": "gloo"}


@dataclass(frozen=True)
class Transport:
    """`headers` is gloo or shared_memory. `payloads` says how hidden states travel. IN_MESSAGES:
    behind their header, from a CPU. HOST_COPIES: the same way, copied from the GPU to the host and
    back. NCCL: from GPU to GPU. `why` is the reason on a GPU."""

    headers: str
    payloads: str
    why: str = ""

    def describe(self) -> str:
        """One line to print."""
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
    """None for one rank. `obstacle` says why hidden states cannot go from GPU to GPU, even if each
    rank has a GPU of its own."""
    choice = parallel.collectives_choice
    if choice is None:
        return None
    if parallel.device == "cpu":
        return Transport(choice.name, IN_MESSAGES)
    if choice.name not in GPU_COLLECTIVES:
        flag = f"--collectives {choice.name}"
        return Transport(choice.name, HOST_COPIES, choice.why if choice.is_auto else flag)
    headers = choose_host_collectives("auto", "cpu", machine).name
    if obstacle is not None:
        return Transport(headers, HOST_COPIES, obstacle)
    return Transport(headers, NCCL, "each rank has a GPU of its own")


def check_stage_group(flag: str, parallel: ResolvedParallel) -> None:
    """Raises ValueError if ranks on CUDA are to share layers and have no collectives for that.
    `flag` is what asks for it, with its value."""
    name = parallel.collectives
    if parallel.device == "cuda" and name is not None and name not in GPU_COLLECTIVES:
        raise ValueError(
            f"{flag}: ranks that share layers on CUDA need a GPU each and --collectives nccl; here "
            f"they have {name}"
        )
