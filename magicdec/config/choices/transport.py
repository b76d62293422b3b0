"""How the messages of a pipeline travel between its stages. Imports no torch.

Owns when hidden states go from GPU to GPU, and when they are copied through the memory of the host.
Must not know how messages are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.config.choices.collectives import GPU_COLLECTIVES, choose_host_collectives
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedParallel

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
