"""Collectives and channels between ranks: shared memory against gloo, every message arrives as it
was sent, a rank that dies is named, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Launch

from magicdec.config.choices.choice import Choice
from magicdec.config.choices.collectives import choose_collectives
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Group
from magicdec.sampling.model_tokens import gather_vocab

HERE = Machine(2, 2, 2, has_compiler=True, has_shared_memory=True)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where the ranks have their shared files: other runs on this host have theirs in /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shared_memory_equals_gloo(num_ranks: int, launch: Launch, shared: Path) -> None:
    done = launch("distributed/exchange.py", shared, num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr
    assert list(shared.iterdir()) == []


def test_a_dead_rank_is_noticed_and_leaves_nothing(launch: Launch, shared: Path) -> None:
    done = launch("distributed/exchange.py", shared, "die", num_ranks=2)
    assert done.returncode != 0 and "OK" not in done.stdout and "NOTICED" in done.stderr
    assert list(shared.iterdir()) == []


def test_one_rank_has_the_whole_vocabulary() -> None:
    logits = torch.randn(2, 3, 97)
    assert gather_vocab(logits, [(0, 97)], Group((0,), 0)) is logits


@pytest.mark.parametrize(("collectives", "num_ranks"), [("gloo", 2), ("shared_memory", 3)])
def test_messages_arrive_as_they_were_sent(
    collectives: str, num_ranks: int, launch: Launch, shared: Path
) -> None:
    args = collectives, "check", shared
    done = launch("distributed/messages.py", *args, num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("collectives", ["gloo", "shared_memory"])
def test_all_ranks_name_the_one_that_was_killed(
    collectives: str, launch: Launch, shared: Path
) -> None:
    """Rank 1 has no connection with rank 2 on which it waits."""
    args = collectives, "kill", shared
    done = launch("distributed/messages.py", *args, num_ranks=3, timeout=30)
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOST: ")]
    assert done.returncode != 0 and len(lines) == 2, done.stderr
    assert all("2" in line and "ended" in line for line in lines), lines
    assert list(shared.iterdir()) == []


def chosen(asked: str, device: str, machine: Machine) -> tuple[str, str]:
    """(name, reason) of the collectives."""
    choice = choose_collectives(asked, device, machine)
    assert choice is not None
    return choice.name, choice.why


def test_auto_takes_shared_memory_on_one_host_and_says_why() -> None:
    parallel = resolve(RunConfig(), HERE).parallel
    assert parallel.collectives_choice == Choice("shared_memory", "auto: one host")
    assert parallel.collectives == "shared_memory"
    assert choose_collectives("auto", "cpu", Machine(2)) is None
    several = Machine(2, 4, 2, has_compiler=True, has_shared_memory=True)
    assert chosen("auto", "cpu", several) == ("gloo", "auto: several hosts")
    bare = Machine(2, 2, 2, has_shared_memory=True)
    assert chosen("auto", "cpu", bare) == ("gloo", "auto: no C++ compiler")
    on_gpus = replace(HERE, num_gpus=2)
    assert chosen("auto", "cuda", on_gpus) == ("nccl", "auto: CUDA")
    assert chosen("gloo", "cpu", HERE) == ("gloo", "asked for")


@pytest.mark.parametrize(
    ("asked", "device", "machine", "message"),
    [
        ("nccl", "cpu", HERE, "--collectives nccl cannot serve --device cpu"),
        ("gloo", "cuda", HERE, "--collectives gloo cannot serve --device cuda; choose from nccl"),
        ("shared_memory", "cpu", Machine(2, 2, 1), "--collectives shared_memory: several hosts"),
        ("shared_memory", "cpu", Machine(2, 2, 2), "no C\\+\\+ compiler here"),
    ],
)
def test_what_cannot_be_is_refused(asked: str, device: str, machine: Machine, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_collectives(asked, device, machine)
