"""Which collectives ranks choose, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicdec.config.choices.collectives import choose_collectives
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig

HERE = Machine(2, 2, 2, has_compiler=True, has_shared_memory=True)
TWO_GPUS = Machine(2, 2, 2, has_cuda=True, num_gpus=2)


@pytest.mark.parametrize(
    ("asked", "device", "machine", "name", "reason"),
    [
        ("auto", "cpu", HERE, "shared_memory", "auto: one host"),
        ("auto", "cpu", replace(HERE, world_size=4), "gloo", "auto: several hosts"),
        ("auto", "cpu", replace(HERE, has_compiler=False), "gloo", "auto: no C++ compiler"),
        ("gloo", "cpu", HERE, "gloo", "asked for"),
        ("auto", "cuda", replace(HERE, num_gpus=2), "nccl", "auto: CUDA"),
        ("auto", "cuda", TWO_GPUS, "nccl", "auto: CUDA"),
        ("nccl", "cuda", TWO_GPUS, "nccl", "asked for"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(
    asked: str, device: str, machine: Machine, name: str, reason: str
) -> None:
    choice = choose_collectives(asked, device, machine)
    assert choice is not None and (choice, choice.why) == (name, reason)


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
        ("shared_memory", "cpu", Machine(2, 2, 2), "no C\\+\\+ compiler here"),
        ("auto", "cuda", replace(TWO_GPUS, num_gpus=1), "of the 2 ranks of a host, and this one "
         "has 1; start at most 1, or choose --device cpu --collectives gloo$"),
        ("nccl", "cuda", replace(TWO_GPUS, num_gpus=1), "^--collectives nccl --device cuda: NCCL"),
        ("shared_memory", "cuda", TWO_GPUS, "choose from auto, nccl$"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    asked: str, device: str, machine: Machine, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        choose_collectives(asked, device, machine)
    assert "\n" not in str(refused.value)
