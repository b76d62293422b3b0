"""The first step times of `--gamma auto` from a machine file (`--machine`).

Owns the checks of the file against the machine and the run. `cost_model` predicts.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from magicdec.config.resolved import ResolvedConfig
from magicdec.config.threads import describe_threads
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.speculation import StepEstimate
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import MachineFile, load_machine
from magicdec.hardware.environment import describe_environment
from magicdec.model.config import ModelConfig
from magicdec.names import FULL_KV_POLICY


def estimate_steps(
    config: ResolvedConfig, target: ModelConfig, draft: ModelConfig | None, launch: Launch
) -> StepEstimate | None:
    """The estimate from the file that `--machine` names; None without that flag. Raises ValueError,
    naming the flag, for a file that cannot be used here."""
    if config.decoding.machine is None:
        return None
    path, dtype = Path(config.decoding.machine), config.model.dtype
    machine = load_machine(path)
    check_machine(path, machine, config, launch)
    hardware, local = machine.hardware(dtype), launch.local_world_size

    def deployment(model: ModelConfig, ranks: int, weights: str) -> Deployment:
        nodes = -(-ranks // local)
        return Deployment(model, hardware, DTYPE_BYTES[dtype], ranks, nodes, weights == "int8")

    of_target = deployment(target, launch.world_size, config.model.target_dtype)
    drafting = of_target if config.decoding.drafter == "self" else None
    if draft is not None and config.draft is not None:
        section = config.draft
        drafting = deployment(draft, len(section.rank_group), section.draft_dtype)
    budget = None if config.kv.policy == FULL_KV_POLICY else config.kv.budget
    return StepEstimate(of_target, drafting, budget, config.decoding.most_draft_tokens)


def check_machine(path: Path, machine: MachineFile, config: ResolvedConfig, launch: Launch) -> None:
    """Raise ValueError if the file was measured on another machine or with other ranks. All ranks
    of a file have the same number of threads."""
    threads = config.parallel.threads
    if not isinstance(threads, int):
        raise ValueError(
            f"--machine {path} is for ranks of one number of threads, not for --threads "
            f"{describe_threads(threads)}; give --threads one number, or leave --machine out"
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    here = describe_environment(launch, config.parallel.device, now)
    wanted = {"cpu": here.cpu, "gpu": here.gpu, "world_size": here.world_size}
    wanted["threads"] = threads
    for key, value in wanted.items():
        measured = machine.description.get(key)
        if measured != value:
            raise ValueError(
                f"--machine {path} was measured with {key} {measured}, this run has {value}; "
                "`magicdec probe` writes a file for it"
            )
