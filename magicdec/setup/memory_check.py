"""The free memory of the host, its container or a GPU, and whether the memory plan of a run fits:
one line with the plan, or a refusal with what would fit. If one rank refuses, all do so alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch, first_refusal
from magicdec.setup.memory_plan import MemoryPlan, Models, plan_rank

ROOT = Path("/")


def free_device_memory(kind: str, local_rank: int) -> int | None:
    """Free bytes of this rank's GPU or of the host; None if unknown. Raises ValueError for a GPU
    without room for a process."""
    if kind == "cuda":
        import torch

        from magicdec.hardware.environment import device_of

        try:
            return int(torch.cuda.mem_get_info(device_of(kind, local_rank))[0])
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"--device cuda: {why}; free the GPU, or choose cpu") from error
    return free_host_memory()


def free_host_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be allocated without swapping, within the limits of the control groups, file
    cache included; None if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Free bytes under each memory limit from this process's control group (version 2 or 1) up to
    the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            mount = "sys/fs/cgroup"
            limit = "memory.max"
            usage = "memory.current"
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            limit = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        top = root / mount
        directory = top / place.strip("/")
        while directory.is_relative_to(top):
            num_bytes = _left(directory, limit, usage)
            if num_bytes is not None:
                yield num_bytes
            directory = directory.parent


def _left(directory: Path, limit_file: str, used_file: str) -> int | None:
    """The limit minus the memory in use without file cache."""
    try:
        limit = (directory / limit_file).read_text().strip()
        usage = int((directory / used_file).read_text())
        stat = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat)
    cache = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
    return int(limit) - usage + cache


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that is free for all `ranks` together: `free` bytes, None if unknown."""

    ranks: tuple[int, ...]
    place: str
    free: int | None

    def describe(self, plan: MemoryPlan, what: str = "") -> str:
        """The printed line about a plan of all `ranks`. `what` names its subject, as in ` for
        NAME`."""
        text = f"{plan.describe()} {self.place}{what}"
        if self.free is None:
            return f"{text}; how much is free is not known here"
        return f"{text}; {self.free / 1e9:.2f} GB free"

    def refusal(self, plan: MemoryPlan) -> str | None:
        """The needed and the free memory; None if the plan fits or the free memory is unknown."""
        if self.free is None or plan.total <= self.free:
            return None
        return f"{plan.describe()} {self.place}, {self.free / 1e9:.2f} GB are free"


def describe_place(config: ResolvedConfig, launch: Launch) -> str:
    if config.parallel.device != "cpu":
        return "on a rank's GPU"
    count = launch.local_world_size
    return "on this host" if count == 1 else f"on this host's {count} ranks"


def find_room(config: ResolvedConfig, launch: Launch, num_gpus: int) -> MemoryBudget:
    ranks = sharing_ranks(config.parallel.device, launch, num_gpus)
    place = describe_place(config, launch)
    free = free_device_memory(config.parallel.device, launch.local_rank)
    if config.parallel.device != "cpu" and len(ranks) > 1:
        place = f"on the GPU that {len(ranks)} ranks share"
    return MemoryBudget(ranks, place, free)


def sharing_ranks(kind: str, launch: Launch, num_gpus: int) -> tuple[int, ...]:
    """The ranks of this host that share this rank's memory: on a CPU all, on CUDA those with the
    same GPU."""
    ranks = tuple(launch.local_ranks)
    if kind == "cpu":
        return ranks
    return tuple(rank for rank in ranks if (rank - launch.rank) % max(1, num_gpus) == 0)


def check_together(launch: Launch, check: Callable[[], str], topic: str = "refusals") -> str:
    """The line of `check`. Raises ValueError on every rank if `check` does so on one. Each joint
    check has its own topic."""
    try:
        line = check()
        refusal = ""
    except ValueError as error:
        line = ""
        refusal = str(error)
    refusal = first_refusal(launch, refusal, topic)
    if refusal:
        raise ValueError(refusal)
    return line


def check_memory(config: ResolvedConfig, models: Models, launch: Launch, free: int | None) -> str:
    """The printed line about a run's memory. `free` bytes are free on this rank's GPU or on the
    host, None if unknown. Raises ValueError if the plan needs more."""
    plan = needed(config, models, launch)
    room = MemoryBudget(tuple(launch.local_ranks), describe_place(config, launch), free)
    asked = config.capacity
    if free is not None and (refusal := room.refusal(plan)):
        raise ValueError(
            f"--B {asked.rows} --prefix_len {asked.prompt_len} needs {refusal}; "
            f"{advice(config, models, launch, free)}"
        )
    return room.describe(plan)


def needed(
    config: ResolvedConfig, models: Models, launch: Launch, keeps_queries: bool = True
) -> MemoryPlan:
    """On a CPU, the plan of all ranks of this host; on CUDA, the largest plan of a rank, equal on
    every rank."""
    group = config.parallel.rank_group
    if config.parallel.device != "cpu":
        plans = [plan_rank(config, models, rank, keeps_queries) for rank in group]
        return max(plans, key=lambda p: p.total)
    return add_up([plan_rank(config, models, rank, keeps_queries) for rank in launch.local_ranks])


def planned(config: ResolvedConfig, models: Models) -> MemoryPlan:
    group = config.parallel.rank_group
    return add_up([plan_rank(config, models, rank) for rank in group])


def add_up(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    return MemoryPlan(*map(sum, zip(*map(astuple, plans), strict=True)))


def advice(config: ResolvedConfig, models: Models, launch: Launch, free: int) -> str:
    """The largest B at this prefix and the largest prefix at this B, or that there is none."""

    def fits(batch_size: int, prefix_len: int) -> bool:
        smaller = config.capacity.resized(batch_size, prefix_len)
        changed = replace(config, capacity=smaller)
        return needed(changed, models, launch).total <= free

    asked = config.capacity
    B = largest(lambda b: fits(b, asked.prompt_len), asked.rows)
    prefix = largest(lambda p: fits(asked.rows, p), asked.prompt_len)
    if B and prefix:
        return f"--B {B} at this prefix or --prefix_len {prefix} at this B would fit"
    if B:
        return f"--B {B} at this prefix would fit"
    if prefix:
        return f"--prefix_len {prefix} at this B would fit, at this prefix not even --B 1"
    alone = largest(lambda p: fits(1, p), asked.prompt_len)
    if alone:
        return f"--B 1 --prefix_len {alone} would fit"
    return "no --B and --prefix_len would fit: choose a smaller model, or more ranks elsewhere"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number below `limit` that fits, or 0, if all numbers below a fitting one fit."""
    return bisect_left(range(1, limit), True, key=lambda number: not fits(number))
