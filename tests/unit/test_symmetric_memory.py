"""Which collectives ranks choose and why, and the choice of the all-reduce algorithm with symmetric
memory, with fakes for the kernels and the group. The kernels themselves are not tested, because
that needs several GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from magicdec.config.choices.choice import Choice
from magicdec.config.choices.collectives import choose_collectives
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.distributed import symmetric_memory as module
from magicdec.distributed.symmetric_memory import (
    BUFFER_BYTES,
    ONE_SHOT_BYTES,
    Kernels,
    SymmetricMemoryExchange,
    choose_algorithm,
    missing_parts,
)

HERE = Machine(2, 2, 2, has_compiler=True, has_shared_memory=True)
TWO_GPUS = Machine(2, 2, 2, has_cuda=True, num_gpus=2, missing_symmetric_memory=None)


class Stub(Kernels):
    """Fake kernels, whose buffers are NaN until they are written."""

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
        return torch.full((count,), torch.nan, dtype=dtype)


def make_exchange(monkeypatch: pytest.MonkeyPatch) -> tuple[SymmetricMemoryExchange, list[str]]:
    """One of two ranks with equal values, whose sums are twice the buffer, and a list of calls."""
    called: list[str] = []

    def one_shot(shared: Tensor, operation: str, group: str) -> Tensor:
        assert (operation, group) == ("sum", "7")
        called.append("one_shot")
        return shared * 2

    def two_shot(shared: Tensor, operation: str, group: str) -> Tensor:
        assert (operation, group) == ("sum", "7")
        called.append("two_shot")
        return shared.mul_(2)

    def nccl(x: Tensor, group: Any) -> None:
        called.append("nccl")
        x.mul_(2)

    monkeypatch.setattr(module.dist, "all_reduce", nccl)
    handle: Any = SimpleNamespace(group_name="7", size=lambda: 2)
    kernels = Stub(SimpleNamespace(one_shot_all_reduce=one_shot, two_shot_all_reduce_=two_shot))
    return SymmetricMemoryExchange(handle, torch.device("cpu"), kernels), called


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        ((4, 1, 64), torch.bfloat16, "one_shot"),
        ((ONE_SHOT_BYTES // 4,), torch.float32, "one_shot"),
        ((ONE_SHOT_BYTES // 4 + 8,), torch.float32, "two_shot"),
        ((ONE_SHOT_BYTES // 4 + 4,), torch.float32, "nccl"),  # 16 bytes for one of two ranks
        ((BUFFER_BYTES // 2,), torch.bfloat16, "two_shot"),
        ((BUFFER_BYTES // 2 + 16,), torch.bfloat16, "nccl"),
        ((7,), torch.bfloat16, "nccl"),
        ((8,), torch.int64, "nccl"),
    ],
    ids=str,
)
def test_a_sum_goes_by_its_size_and_is_in_place(
    shape: tuple[int, ...], dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, called = make_exchange(monkeypatch)
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    expected = x * 2
    assert choose_algorithm(x, 2) == way
    assert exchange.all_reduce(x) is x
    assert called == [way]
    assert torch.equal(x, expected)


def test_nothing_is_offered_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing_parts(2) == "no CUDA"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(module, "OPERATIONS", ("no_such_sum",))
    assert "lacks no_such_sum" in str(missing_parts(2))
    monkeypatch.setattr(module, "OPERATIONS", ())
    assert missing_parts(2) is None
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 0))
    assert missing_parts(2) == "GPU 1 cannot access the memory of GPU 0"


ASKED = replace(TWO_GPUS, wants_symmetric_memory=True)
BARE = replace(ASKED, missing_symmetric_memory="GPU 0 cannot access the memory of GPU 1")


@pytest.mark.parametrize(
    ("asked", "device", "machine", "name", "reason"),
    [
        ("auto", "cpu", HERE, "shared_memory", "auto: one host"),
        ("auto", "cpu", replace(HERE, world_size=4), "gloo", "auto: several hosts"),
        ("auto", "cpu", replace(HERE, has_compiler=False), "gloo", "auto: no C++ compiler"),
        ("gloo", "cpu", HERE, "gloo", "asked for"),
        ("auto", "cuda", replace(HERE, num_gpus=2), "nccl", "auto: CUDA"),
        ("auto", "cuda", TWO_GPUS, "nccl", "auto: CUDA"),
        ("auto", "cuda", ASKED, "symmetric_memory", "auto: ENABLE_INTRA_NODE_COMM=1"),
        ("nccl", "cuda", ASKED, "nccl", "asked for"),
        ("auto", "cuda", BARE, "nccl",
         "auto: ENABLE_INTRA_NODE_COMM=1, but GPU 0 cannot access the memory of GPU 1"),
        ("symmetric_memory", "cuda", TWO_GPUS, "symmetric_memory", "asked for"),
        ("auto", "cpu", ASKED, "gloo", "auto: no C++ compiler"),  # the variable is for GPUs
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(
    asked: str, device: str, machine: Machine, name: str, reason: str
) -> None:
    choice = choose_collectives(asked, device, machine)
    assert choice is not None and (choice.name, choice.why) == (name, reason)


def test_the_choice_is_in_the_config_of_several_ranks() -> None:
    parallel = resolve(RunConfig(), HERE).parallel
    assert parallel.collectives_choice == Choice("shared_memory", "auto: one host")
    assert parallel.collectives == "shared_memory"
    assert choose_collectives("auto", "cpu", Machine(2)) is None


@pytest.mark.parametrize(
    ("asked", "device", "machine", "message"),
    [
        ("nccl", "cpu", HERE, "--collectives nccl cannot serve --device cpu"),
        ("gloo", "cuda", HERE, "--collectives gloo cannot serve --device cuda; choose from nccl"),
        ("shared_memory", "cpu", Machine(2, 2, 1), "--collectives shared_memory: several hosts"),
        ("shared_memory", "cpu", Machine(2, 2, 2), "no C\\+\\+ compiler here"),
        ("auto", "cuda", replace(TWO_GPUS, num_gpus=1), "of the 2 ranks of a host, and this one "
         "has 1; start at most 1, or choose --device cpu --collectives gloo$"),
        ("nccl", "cuda", replace(TWO_GPUS, num_gpus=1), "^--collectives nccl --device cuda: NCCL"),
        ("symmetric_memory", "cuda", replace(TWO_GPUS, num_gpus=1), "--collectives gloo$"),
        ("symmetric_memory", "cuda", replace(TWO_GPUS, missing_symmetric_memory="torch 2.4 lacks"),
         "^--collectives symmetric_memory: torch 2.4 lacks; choose from auto, nccl$"),
        ("symmetric_memory", "cuda", replace(TWO_GPUS, world_size=4), "several hosts"),
        ("symmetric_memory", "cpu", TWO_GPUS, "cannot serve --device cpu"),
        ("shared_memory", "cuda", TWO_GPUS, "choose from nccl, symmetric_memory$"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    asked: str, device: str, machine: Machine, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        choose_collectives(asked, device, machine)
    assert "\n" not in str(refused.value)
