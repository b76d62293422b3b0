"""`magicdec plan --stages`: its predictions, its errors and its output."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_plan import MACHINE, Run, run

from magicdec.cli.plan import PlanSection, main, make_stage_plan
from magicdec.cost_model.costs import kv_bytes_per_token, stored_bytes
from magicdec.cost_model.stage_plan import StagePlan
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.tensor_parallel import Shard

__all__ = ["run"]
RATES = "--bandwidth 100 --flops 1 --overhead_us 320 --model llama-2-7b"
LINK = "--link 1 --link_latency_us 1000"


def make(flags: str) -> StagePlan:
    return make_stage_plan(main.build_parser().read(flags.split())[PlanSection])


def test_the_stages_are_the_whole_model() -> None:
    plan = make(f"{RATES} {LINK} --stages 3 --layer_split 8,12,12 --B 4 --prefix_len 1000")
    cell, whole = plan.predict(4, 1000), replace(plan.stage, tp=1)
    assert [stage.num_layers for stage in cell.stages] == [8, 12, 12]
    stored = stored_bytes(whole.config, Shard(), 2, False)
    assert sum(stage.weight_bytes for stage in cell.stages) == stored
    kv = 4 * 1000 * kv_bytes_per_token(whole.config, Shard(), 2)
    assert sum(stage.lane_kv_bytes for stage in cell.stages) == kv
    total_ms = sum(stage.decode_ms for stage in cell.stages)
    assert total_ms == pytest.approx(1e3 * whole.seconds(4, 1, 1000))
    assert cell.stages[1] == cell.stages[2] and cell.stages[0].decode_ms < cell.stages[1].decode_ms
    assert cell.hop_bytes == MessageForm(4096, torch.bfloat16, 4).num_bytes(4)
    assert cell.link_ms == [pytest.approx(1 + cell.hop_bytes / 1e6)] * 3


def test_a_round_has_the_slowest_stage_or_the_sum_or_the_slowest_link() -> None:
    plan = make(f"{RATES} {LINK} --stages 3 --layer_split 8,12,12 --B 2 --prefix_len 1000")
    cell = plan.predict(2, 1000)
    times, links = [stage.decode_ms for stage in cell.stages], sum(cell.link_ms)
    assert [r.num_lanes for r in cell.rounds] == [1, 3, 6]
    assert [r.n_samples for r in cell.rounds] == [2, 6, 12]
    assert cell.rounds[0].round_ms == pytest.approx(sum(times) + links)
    assert cell.rounds[2].round_ms == pytest.approx(6 * max(times))
    assert cell.rounds[2].tokens_per_s == pytest.approx(1e3 * 12 / (6 * max(times)))
    slow = make(f"{RATES} --link 0.0001 --link_latency_us 0 --stages 3 --B 2").predict(2, 1000)
    assert slow.rounds[2].round_ms == pytest.approx(6 * slow.hop_bytes / 1e2)


def test_auto_has_no_slower_stage_than_any_other_split() -> None:
    flags = f"{RATES} {LINK} --stages 2 --model llama-3.1-8b --B 8 --prefix_len 100"

    def slowest(split: str) -> float:
        stages = make(f"{flags} --layer_split {split}").predict(8, 100).stages
        return max(stage.decode_ms for stage in stages)

    others = [slowest(f"{first},{32 - first}") for first in range(1, 32)]
    assert slowest("auto") == min(others) < slowest("0.5,0.5") < slowest("mdi_llm:2") * 1.5
    first = make(f"{flags} --layer_split auto").layers(8, 100)[0]
    assert first < 16, "the head takes the time of some layers"


def test_what_stands_next_to_the_ring(run: Run) -> None:
    """One process has all ranks of a host where these share its cores; the same ranks as one
    tensor-parallel group; and a model with fewer heads than ranks has no such group."""
    base = "--stages 2 --B 1 --prefix_len 100 --dtype float32"
    cpu = make(f"{base} --machine machine.json")
    assert cpu.shares_host
    alone = cpu.one_process().hardware
    assert alone.read_bytes_per_s == 2 * MACHINE.read_bytes_per_s
    assert alone.layer_overhead_s == MACHINE.layer_overhead_s["float32"]
    found = cpu.predict(1, 100).rounds[1]
    assert found.one_process_ms == 1e3 * cpu.one_process().seconds(2, 1, 100)
    together = replace(cpu.stage, tp=2)
    assert found.tensor_parallel_ms == 1e3 * together.seconds(2, 1, 100)
    gpu = make(f"{RATES} {LINK} --stages 2")
    assert not gpu.shares_host and gpu.one_process().hardware == gpu.stage.hardware
    many = make(f"--bandwidth 1 --flops 1 {LINK} --stages 6").predict(1, 100).rounds
    assert all(r.tensor_parallel_ms is None for r in many), "the demo has 4 heads"
    assert {r.fastest for r in many} <= {"ring", "one process"}


def test_which_hops_leave_a_host() -> None:
    far = "--node_link 0.1 --node_link_latency_us 5000"
    flags = f"{RATES} {LINK} {far}"
    two = make(f"{flags} --stages 4 --nodes 2").predict(1, 100).link_ms
    near, distant = pytest.approx(1.008, abs=0.01), pytest.approx(5.08, abs=0.01)
    assert two == [near, distant, near, distant]
    pairs = make(f"{flags} --stages 2 --tp 2 --nodes 2")
    assert pairs.stage.nodes == 1 and pairs.predict(1, 100).link_ms == [distant] * 2
    wide = make(f"{flags} --stages 2 --tp 4 --nodes 4")
    assert wide.stage.nodes == 2 and wide.predict(1, 100).link_ms == [distant] * 2


def test_one_stage_has_no_link() -> None:
    cell = make(f"{RATES} --stages 1").predict(1, 100)
    assert cell.link_ms == [] and [r.num_lanes for r in cell.rounds] == [1, 2]
    assert cell.rounds[0].tokens_per_s == pytest.approx(cell.rounds[0].one_process_tokens_per_s)


def test_the_tables_and_the_file(run: Run) -> None:
    words = "--machine machine.json --stages 2 --layer_split auto --B 1 --prefix_len 4096"
    code, out, err = run(f"{words} --out s.json")
    assert (code, err) == (0, "") and out.startswith("predicted, not measured")
    assert "--layer_split auto" in out and "all 2 ranks of a host" in out
    found = json.loads(Path("s.json").read_text())
    assert found["kind"] == "stage_plan" and found["status"] == "predicted"
    (cell,) = found["cells"]
    assert (cell["lane_size"], cell["prefix_len"]) == (1, 4096)
    assert sum(stage["num_layers"] for stage in cell["stages"]) == 6
    for stage in cell["stages"]:
        assert f"{stage['decode_ms']:.3f}" in out
    for each in cell["rounds"]:
        assert f"{each['round_ms']:.2f}" in out and f"{each['tokens_per_s']:,.1f}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 3 --layer_split 2,4", "--stages 3: --layer_split 2,4 has 2 stages"),
        (f"--stages 2 {LINK} --layer_split 3,4", "--layer_split 3,4 adds up to 7 layers; the"),
        (f"--stages 7 {LINK}", "7 stages cannot share 6 layers"),
        ("--stages 2", "several ranks need the cost of a link; give --link and"),
        (f"--stages 1 {LINK}", "--link does nothing here: a node has one rank"),
        (f"--stages 2 {LINK} --nodes 3", "--nodes 3: --stages 2 of --tp 1 ranks cannot be divided"),
        ("--stages 2 --acceptance 0.5", "--acceptance does nothing here: --stages 2 predicts no"),
        ("--acceptance 0.5 --layer_split auto", "--layer_split does nothing here: it is for"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run: Run, flags: str, message: str) -> None:
    code, out, err = run(f"--bandwidth 100 --flops 1 {flags}")
    assert (code, out) == (2, "") and message in err
    assert err.startswith("magicdec plan: ") and err.count("\n") == 1


@pytest.mark.parametrize("flags", ["--stages 2 --link 1 --link_latency_us 1", "--acceptance 0.8"])
def test_a_plan_imports_no_torch(flags: str) -> None:
    code = (
        "import sys; from magicdec.cli import plan; "
        f"sys.argv = ['plan', *'{flags} --bandwidth 1 --flops 1'.split()]\n"
        "try: plan.main()\nexcept SystemExit as stop: sys.exit(stop.code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
