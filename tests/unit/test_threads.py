"""`--threads`, one number for all ranks or one for each: what is refused, what each rank computes
with, and what records and their readers say."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import make_requests
from synthetic_records import parse_record
from test_compare import make
from test_config import parsed
from test_session import PARALLEL
from threaded_pipeline import FakeStage

from magicdec.cli.front.config_of import flags_of
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.threads import Threads, agreed_threads
from magicdec.config.toml_file import to_toml
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Launch
from magicdec.distributed.layout import Layout
from magicdec.hardware.threads import ThreadCount
from magicdec.kernels.build import share_openmp
from magicdec.pipeline.head import PipelineRank, connect_ranks
from magicdec.pipelined_speculation.options import Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.records.table import print_record
from magicdec.report.settings import settings
from magicdec.serving import prepare as serving
from magicdec.setup import prepare as setup
from magicdec.setup.session import RankSession


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2,x", "--threads 2,x is not known; choose a whole number, or one for each rank, such"),
        ("2,", "--threads 2, is not known"),
        ("0", "--threads 0: give one number for all 3 ranks, or 3 numbers, each at least 1"),
        ("2,0,1", "--threads 2,0,1: give"),
        ("2,1", "--threads 2,1: give"),
    ],
)
def test_a_wrong_number_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parsed("--threads", text).check(world_size=3)
    assert "\n" not in str(refused.value)


def host(cores: int, ranks: range, world_size: int) -> Machine:
    return Machine(cores, world_size, len(ranks), ranks[0])


@pytest.mark.parametrize(
    ("text", "machine", "found"),
    [
        ("4", host(4, range(1), 1), 4),
        ("1", host(2, range(3), 3), 1),
        ("2,1,1", host(4, range(3), 3), (2, 1, 1)),
        ("1,1,1", host(2, range(3), 3), 1),
        ("2,2", host(4, range(2), 2), 2),
        ("2,1,8,8", host(3, range(2), 4), (2, 1, 8, 8)),
    ],
)
def test_the_threads_of_a_host_fit_its_cores(text: str, machine: Machine, found: Threads) -> None:
    """Equal numbers become one, and those of other hosts do not count."""
    assert resolve(parsed("--threads", text), machine).parallel.threads == found


@pytest.mark.parametrize(
    ("text", "machine", "message"),
    [
        ("5", host(4, range(1), 1), "--threads 5: the 1 ranks .* 5 threads on 4 cores; .* 4 each$"),
        ("3", host(4, range(2), 2), "the 2 ranks .* 6 threads on 4 cores; give at most 2 each$"),
        ("2,2,1", host(4, range(3), 3), "2,2,1: .* 5 threads on 4 cores; give at most 4 in all"),
        ("2,1,8,8", host(3, range(2, 4), 4), "the 2 ranks of this host would have 16 threads"),
    ],
)  # fmt: skip
def test_more_threads_than_cores_are_refused(text: str, machine: Machine, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parsed("--threads", text), machine)


def test_each_rank_computes_with_its_own() -> None:
    before, parallel = torch.get_num_threads(), replace(PARALLEL, threads=(3, 1, 2))
    for rank, threads in enumerate((3, 1, 2)):
        RankSession(Launch(rank, 3, rank, 3), parallel).begin()
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_a_stage_on_the_head_computes_with_those_of_its_rank() -> None:
    """Also in native code: OpenMP has a number for each thread of Python, which begins as that of
    the environment."""
    share_openmp()
    openmp, before, seen = ctypes.CDLL(None), torch.get_num_threads(), list[int]()
    stage = FakeStage(2, True, computed=lambda run: seen.append(openmp.omp_get_max_threads()))
    place, form = Launch(0, 1, 0, 1), MessageForm(1, torch.float32, 0)
    connector = Connector(place, None, form, torch.device("cpu"))
    wires = connect_ranks(connector, Layout((range(2),), 0), has_drafter=False)
    member, requests = PipelineRank(0, wires, stage, None), make_requests([(9,)], 3)
    torch.set_num_threads(3)
    count, scheduler = ThreadCount(), PipelinedScheduler(Options(mode="iterative"))
    member.serve(scheduler, requests, lambda num_tokens: None, count)
    member.close()
    torch.set_num_threads(before)
    assert seen == [3, 3, 3] and requests[0].output_ids == [1, 2, 3]
    assert count.measured == [3, 3, 3, 3], "at the begin and at the end, OpenMP's and PyTorch's"


def test_one_process_has_the_threads_of_its_host() -> None:
    """While the other ranks wait. Ranks 2 and 3 are on another host."""
    first, second = Launch(0, 4, 0, 2), Launch(3, 4, 1, 2)
    assert (list(first.local_ranks), list(second.local_ranks)) == ([0, 1], [2, 3])
    for threads, of_hosts in (((4, 1, 2, 3), (5, 5)), (2, (4, 4))):
        parallel = replace(PARALLEL, threads=threads)
        found = tuple(parallel.threads_on(launch.local_ranks) for launch in (first, second))
        assert found == of_hosts


def test_ranks_agree_on_numbers_for_each_rank() -> None:
    """Hosts may have different single numbers, because each may have other cores."""
    assert agreed_threads(None) == agreed_threads(2) == agreed_threads(3)
    assert len({agreed_threads(each) for each in (2, (2, 1), (1, 2))}) == 3


@pytest.mark.parametrize(
    "prepare", [setup.prepare, partial(serving.prepare, options=None)], ids=["run", "inflight"]
)
def test_hosts_with_other_lists_are_refused(
    prepare: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is looked for."""

    def exchange(launch: Launch, text: str, topic: str) -> list[str]:
        return [json.dumps({"--threads": "2,1"}), text]

    monkeypatch.setattr("magicdec.distributed.groups.exchange_texts", exchange)
    message = "--threads: rank 0 has 2,1, rank 1 has 1,2"
    with pytest.raises(ValueError, match=message):
        prepare(parsed("--threads", "1,2", "--model", "nowhere"), launch=Launch(1, 2, 0, 1))


def recorded(threads: Any) -> Any:
    """A record of a run whose leading rank had two threads."""
    raw = json.loads(json.dumps(make()))
    raw["environment"]["threads"] = 2
    raw["config"]["parallel"]["threads"] = threads
    return parse_record(raw)


@pytest.mark.parametrize(("threads", "shown"), [(2, 2), ([2, 1], "2,1")])
def test_readers_of_records_name_the_threads_of_all_ranks(
    threads: Any, shown: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(threads)
    assert settings(record)["threads"] == shown
    print_record(record)
    assert f"x threads {shown}," in " ".join(capsys.readouterr().out.split())
    assert f"threads = {json.dumps(shown)}" in to_toml(flags_of(record)).splitlines()


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
