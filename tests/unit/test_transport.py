"""How the messages of a pipeline travel, on made-up machines with GPUs; what a channel does while
the device of a lost peer is waited for; which ranks share a GPU; and which collectives ranks
choose."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from magicdec.config.choices.collectives import (
    GROUP_BYTES,
    HOST_COPIES,
    IN_MESSAGES,
    NCCL,
    STAGE_BYTES,
    check_stage_group,
    choose_collectives,
    choose_transport,
)
from magicdec.config.machine import Machine
from magicdec.config.resolve import Placement, resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import AttentionSection, ParallelSection
from magicdec.distributed.channels import carriers
from magicdec.distributed.channels.carriers import wait_for_device
from magicdec.distributed.channels.connect import CAPACITY
from magicdec.distributed.groups import Launch
from magicdec.distributed.shared_memory import SLOT_BYTES
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.hardware.environment import free_bytes, shared_memory_obstacle
from magicdec.setup.memory_check import sharing_ranks

TWO_GPUS = Machine(
    num_cpus=8,
    world_size=2,
    local_world_size=2,
    has_cuda=True,
    num_gpus=2,
    has_compiler=True,
    shared_memory_obstacle=None,
)
ONE_GPU = replace(TWO_GPUS, num_gpus=1)
TWO_HOSTS = replace(TWO_GPUS, local_world_size=1)


def staged(
    machine: Machine, collectives: str = "auto", device: str = "cuda", attention: str = "auto"
) -> ResolvedConfig:
    """The config of stages of a pipeline."""
    parallel = ParallelSection(device=device, collectives=collectives)
    asked = RunConfig(parallel=parallel, attention=AttentionSection(attention))
    return resolve(asked, machine, placement=Placement(is_staged=True))


@pytest.mark.parametrize(
    ("machine", "collectives", "headers", "payloads", "reason"),
    [
        (TWO_GPUS, "auto", "shared_memory", NCCL, "each rank has a GPU of its own"),
        (TWO_GPUS, "nccl", "shared_memory", NCCL, "each rank has a GPU of its own"),
        (TWO_HOSTS, "auto", "gloo", NCCL, "each rank has a GPU of its own"),
        (ONE_GPU, "auto", "shared_memory", HOST_COPIES, "auto: 2 ranks share 1 GPUs"),
        (TWO_GPUS, "gloo", "gloo", HOST_COPIES, "--collectives gloo"),
        (ONE_GPU, "shared_memory", "shared_memory", HOST_COPIES, "--collectives shared_memory"),
    ],
)
def test_hidden_states_go_by_nccl_where_each_rank_has_a_gpu(
    machine: Machine, collectives: str, headers: str, payloads: str, reason: str
) -> None:
    transport = choose_transport(staged(machine, collectives).parallel, machine)
    assert transport is not None
    assert transport.to_dict() == {"headers": headers, "payloads": payloads, "reason": reason}
    assert reason in transport.describe() and ("NCCL" in transport.describe()) == (payloads == NCCL)


@pytest.mark.parametrize("asked", ["auto", "gloo", "shared_memory"])
def test_a_rank_that_computes_alone_may_share_its_gpu_with_stages(asked: str) -> None:
    """`serve --nproc 2 --modes sequential ring` on one GPU was refused for `sequential`'s sake."""
    run_config = RunConfig(parallel=ParallelSection(device="cuda", collectives=asked))
    with pytest.raises(ValueError, match=f"--collectives {asked}"):
        resolve(run_config, ONE_GPU)
    alone = resolve(run_config, ONE_GPU, placement=Placement(is_alone=True))
    assert alone.parallel.device == "cuda" and alone.parallel.collectives != NCCL


def test_an_obstacle_on_the_host_is_named_and_on_a_cpu_nothing_changes() -> None:
    parallel = staged(TWO_GPUS).parallel
    found = choose_transport(parallel, TWO_GPUS, "an emulated link")
    assert found is not None and found.payloads == HOST_COPIES and found.why == "an emulated link"
    found = choose_transport(staged(TWO_GPUS, device="cpu").parallel, TWO_GPUS)
    assert found is not None and (found.headers, found.payloads) == ("shared_memory", IN_MESSAGES)
    assert found.describe() == "through shared memory"
    alone = replace(TWO_GPUS, world_size=1, local_world_size=1)
    assert choose_transport(staged(alone).parallel, alone) is None


@pytest.mark.parametrize(
    ("machine", "collectives", "message"),
    [
        (ONE_GPU, "nccl", "start at most 1, or choose --collectives gloo$"),
        (replace(ONE_GPU, has_compiler=False), "shared_memory", "no C.. compiler; choose"),
    ],
)
def test_collectives_that_stages_cannot_have_are_refused(
    machine: Machine, collectives: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^--collectives {collectives}.*{message}"):
        staged(machine, collectives)


def test_ranks_that_share_a_gpu_cannot_share_layers() -> None:
    check_stage_group("--layer_split 1,1", staged(TWO_GPUS).parallel)
    check_stage_group("--layer_split 1,1", staged(ONE_GPU, device="cpu").parallel)
    with pytest.raises(ValueError, match=r"^--layer_split 1,1: .* a GPU each .* shared_memory$"):
        check_stage_group("--layer_split 1,1", staged(ONE_GPU).parallel)


def test_stages_on_cuda_take_the_backend_of_every_run_and_capture_no_steps() -> None:
    assert staged(TWO_GPUS).attention.backend == "triton"
    graphs = staged(TWO_GPUS, attention="sdpa").decoding.cuda_graphs
    assert (graphs, graphs.why) == (
        "off",
        "auto: off, the steps of a pipeline are not captured",
    )
    captured = resolve(
        RunConfig(parallel=ParallelSection(device="cuda"), attention=AttentionSection("sdpa")),
        TWO_GPUS,
    )
    graphs = captured.decoding.cuda_graphs
    assert (graphs, graphs.why) == ("on", "auto: on")


@pytest.mark.parametrize(
    ("kind", "rank", "num_gpus", "ranks"),
    [
        ("cpu", 6, 0, (4, 5, 6, 7)),
        ("cuda", 6, 4, (6,)),
        ("cuda", 6, 2, (4, 6)),
        ("cuda", 5, 1, (4, 5, 6, 7)),
        ("cuda", 6, 3, (6,)),
        ("cuda", 4, 3, (4, 7)),
    ],
)
def test_ranks_share_the_gpus_of_their_host_in_turn(
    kind: str, rank: int, num_gpus: int, ranks: tuple[int, ...]
) -> None:
    assert sharing_ranks(kind, Launch(rank, 8, rank - 4, 4), num_gpus) == ranks


class DeviceWork:
    """As NCCL's: it is completed some time after it was started, or fails."""

    def __init__(self, seconds: float, error: str | None = None) -> None:
        self.due = time.monotonic() + seconds
        self.error = error
        self.is_waited_for = False

    def is_completed(self) -> bool:
        return time.monotonic() >= self.due

    def wait(self) -> None:
        self.is_waited_for = True
        if self.error:
            raise RuntimeError(self.error)


def test_the_host_waits_until_the_device_is_done() -> None:
    work = DeviceWork(0.2)
    wait_for_device(work, 1, Processes())
    assert time.monotonic() >= work.due and work.is_waited_for


def test_a_peer_that_ends_while_the_device_waits_is_named() -> None:
    """Although the work never completes."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(PeerLost, match=r"^rank 0 has ended$"):
        wait_for_device(DeviceWork(1e9), 0, Processes((process.pid,)))
    process.communicate()


def test_a_failed_or_endless_exchange_names_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match="the connection with rank 3 is lost: NCCL error"):
        wait_for_device(DeviceWork(0, "NCCL error"), 3, Processes())
    monkeypatch.setattr(carriers, "PATIENCE_S", 0.1)
    with pytest.raises(PeerLost, match=r"rank 3 has not been heard of for 0.1 s"):
        wait_for_device(DeviceWork(1e9), 3, Processes())


HERE = Machine(2, 2, 2, has_compiler=True, shared_memory_obstacle=None)
ROOM = 2 * GROUP_BYTES
LITTLE = "1.0 MB left in /dev/shm, 4.2 MB may be needed"
A_GPU_EACH = Machine(2, 2, 2, has_cuda=True, num_gpus=2)


@pytest.mark.parametrize(
    ("asked", "device", "machine", "name", "reason"),
    [
        ("auto", "cpu", HERE, "shared_memory", "auto: one host"),
        ("auto", "cpu", replace(HERE, world_size=4), "gloo", "auto: several hosts"),
        ("auto", "cpu", replace(HERE, has_compiler=False), "gloo", "auto: no C++ compiler"),
        ("auto", "cpu", replace(HERE, shared_memory_obstacle="ro"), "gloo", "auto: ro"),
        ("auto", "cpu", replace(HERE, shared_memory_bytes=ROOM), "shared_memory", "auto: one host"),
        ("auto", "cpu", replace(HERE, shared_memory_bytes=1 << 20), "gloo", f"auto: {LITTLE}"),
        ("gloo", "cpu", HERE, "gloo", "asked for"),
        ("auto", "cuda", replace(HERE, num_gpus=2), "nccl", "auto: CUDA"),
        ("auto", "cuda", A_GPU_EACH, "nccl", "auto: CUDA"),
        ("nccl", "cuda", A_GPU_EACH, "nccl", "asked for"),
    ],
)
def test_what_is_chosen_and_why(
    asked: str, device: str, machine: Machine, name: str, reason: str
) -> None:
    choice = choose_collectives(asked, device, machine)
    assert choice is not None and (choice, choice.why) == (name, reason)


def test_stages_need_more_shared_memory() -> None:
    """As much as two groups and the edges of a rank take: in the smallest pipeline, of two ranks,
    five edges and the board of cancelled runs."""
    memory = replace(HERE, shared_memory_bytes=20 << 20)
    assert choose_collectives("auto", "cpu", memory) == "shared_memory"
    assert choose_collectives("auto", "cpu", memory, is_staged=True) == "gloo"
    groups = 2 * (64 + 2 * SLOT_BYTES)
    assert groups <= GROUP_BYTES and groups + 2.5 * CAPACITY + (1 << 20) <= STAGE_BYTES


def test_a_folder_without_room_or_rights_is_noticed(tmp_path: Path) -> None:
    assert shared_memory_obstacle(tmp_path) is None and list(tmp_path.iterdir()) == []
    assert shared_memory_obstacle(tmp_path / "none") == f"no {tmp_path / 'none'}"
    assert shared_memory_obstacle(Path("/proc")) == "/proc: No such file or directory"
    assert (free_bytes(tmp_path) or 0) > 0
    assert free_bytes(tmp_path / "none") is free_bytes(Path("/proc")) is None


def test_the_choice_is_in_the_config_of_several_ranks() -> None:
    choice = resolve(RunConfig(), HERE).parallel.collectives
    assert choice is not None and (choice, choice.why) == ("shared_memory", "auto: one host")
    assert choose_collectives("auto", "cpu", Machine(2)) is None


@pytest.mark.parametrize(
    ("asked", "device", "machine", "message"),
    [
        ("nccl", "cpu", HERE, "--collectives nccl: it cannot serve --device cpu"),
        ("gloo", "cuda", HERE, "--collectives gloo: it cannot serve --device cuda; choose"),
        ("shared_memory", "cpu", Machine(2, 2, 1), "--collectives shared_memory: several hosts"),
        ("shared_memory", "cpu", Machine(2, 2, 2), "no C\\+\\+ compiler; choose from auto, gloo"),
        ("shared_memory", "cpu", replace(HERE, shared_memory_bytes=1 << 20), f": {LITTLE}; choose"),
        (
            "auto",
            "cuda",
            replace(A_GPU_EACH, num_gpus=1),
            "of the 2 ranks of a host, and this one "
            "has 1; start at most 1, or choose --device cpu --collectives gloo$",
        ),
        ("nccl", "cuda", replace(A_GPU_EACH, num_gpus=1), "^--collectives nccl --device cuda: NC"),
        ("shared_memory", "cuda", A_GPU_EACH, "choose from auto, nccl$"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    asked: str, device: str, machine: Machine, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        choose_collectives(asked, device, machine)
    assert "\n" not in str(refused.value)
