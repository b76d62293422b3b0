"""`--threads`, one number for all ranks or one for each: what is refused, what each rank computes
with, and what records and their readers say."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from conftest import make_requests
from test_config import parsed
from threaded_pipeline import FakeStage

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Launch
from magicdec.distributed.layout import PipelineLayout
from magicdec.hardware.threads import ThreadCount
from magicdec.kernels.build import share_openmp
from magicdec.runner.request import ignore_step
from magicdec.systems.pipeinfer.head import PipelineRank, connect_ranks
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler


def host(cores: int, ranks: range, world_size: int) -> Machine:
    return Machine(cores, world_size, len(ranks), ranks[0])


@pytest.mark.parametrize(
    ("text", "machine", "found"),
    [
        ("4", host(4, range(1), 1), 4),
        ("1", host(2, range(3), 3), 1),
        ("2", host(4, range(2, 4), 4), 2),
    ],
)
def test_the_threads_of_a_host_fit_its_cores(text: str, machine: Machine, found: int) -> None:
    """The ranks of other hosts do not count."""
    assert resolve(parsed("--threads", text), machine).parallel.threads == found


@pytest.mark.parametrize(
    ("text", "machine", "message"),
    [
        ("5", host(4, range(1), 1), "--threads 5: the 1 ranks .* 5 threads on 4 cores; .* 4 each$"),
        ("3", host(4, range(2), 2), "the 2 ranks .* 6 threads on 4 cores; give at most 2 each$"),
        ("2", host(3, range(2, 4), 4), "the 2 ranks of this host would have 4 threads on 3"),
    ],
)
def test_more_threads_than_cores_are_refused(text: str, machine: Machine, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parsed("--threads", text), machine)


def test_a_stage_on_the_head_computes_with_those_of_its_rank() -> None:
    """Also in native code: OpenMP has a number for each thread of Python, which begins as that of
    the environment."""
    share_openmp()
    openmp = ctypes.CDLL(None)
    before = torch.get_num_threads()
    seen = list[int]()
    stage = FakeStage(2, True, computed=lambda run: seen.append(openmp.omp_get_max_threads()))
    place = Launch(0, 1, 0, 1)
    form = MessageForm(1, torch.float32, 0)
    connector = Connector(place, None, form, torch.device("cpu"))
    wires = connect_ranks(connector, PipelineLayout((range(2),), 0), has_drafter=False)
    member = PipelineRank(0, wires, stage, None)
    requests = make_requests([(9,)], 3)
    torch.set_num_threads(3)
    count = ThreadCount()
    scheduler = PipelinedScheduler(Options(mode="pipeline"))
    member.serve(scheduler, requests, ignore_step, count)
    member.close()
    torch.set_num_threads(before)
    assert seen == [3, 3, 3] and requests[0].output_ids == [1, 2, 3]
    assert count.measured == [3, 3, 3, 3], "at the begin and at the end, OpenMP's and PyTorch's"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_for_each_other_sleep_soon(
    environment: dict[str, str], expected: str
) -> None:
    """OpenMP reads it when torch is loaded. What the user says about waiting is left alone."""
    others = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import magicdec, os, sys; assert 'torch' not in sys.modules; "
    code += "print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, env=others | environment, text=True)
    assert output.strip() == expected
