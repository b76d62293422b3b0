"""Units by hand, once each: what a flag, a file of the system or a measurement says, and what is
computed with or printed of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command
from synthetic_records import drawn_command
from test_plan import MACHINE
from test_record_document import TOPS, kinds

from magicdec.cli.probe import print_machine
from magicdec.cli.simulate import SimulationSection, make_machines
from magicdec.hardware import timing
from magicdec.hardware.costs import Deployment
from magicdec.hardware.other_load import _waits
from magicdec.predict.plan import describe_machine
from magicdec.records.describe import title_of
from magicdec.records.fields import described_fields
from magicdec.setup.memory_check import free_host_memory
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.systems.mdi_llm.details import describe_round

# What a number of the second unit is in the first.
LARGER = {("bytes", "GB"): 1e9, ("bytes", "MB"): 1e6, ("bytes", "GiB"): 2**30, ("ms", "us"): 1e-3}
DEMO_LAYERS = 6
SAME = {"ms", "s", "tokens", "tokens/s", "requests/s", "forwards"}


def printed_unit(label: str, suffix: str) -> str:
    """The unit behind the last comma of a label, such as `peak memory, all ranks, MB`."""
    if suffix.strip() in ("%", "x"):
        return suffix.strip()
    return label.rpartition(", ")[2].partition(" ")[0].partition("/")[0] if ", " in label else ""


def test_labels_name_the_unit_in_which_a_field_is_printed() -> None:
    found = set()
    for kind in {kind for top in TOPS for kind in kinds(top)}:
        for key, _, about in described_fields(kind):
            if not about.label:
                continue
            shown = printed_unit(about.label, about.suffix)
            factor = 0.01 if shown == "%" else LARGER.get((about.unit, shown), 1)
            assert about.scale == pytest.approx(1 / factor), (kind, key, about.label)
            is_known = shown in SAME or (about.unit, shown) in LARGER or about.unit != "bytes"
            assert is_known, (kind, key, "bytes are printed in GB or MB")
            assert not key.endswith("_ms") or shown in ("ms", ""), (kind, key, about.label)
            found.add(shown)
    assert {"GB", "ms", "%", "x"} <= found


def test_rates_and_latencies_of_flags(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """GB/s, TFLOP/s and us of `plan`, in a model of 6 layers: 300 us fixed are 50 a layer."""
    made = list[Any]()
    seconds = Deployment.seconds

    def note(deployment: Deployment, *shape: Any) -> float:
        made.append(deployment.hardware)
        return seconds(deployment, *shape)

    monkeypatch.setattr(Deployment, "seconds", note)
    words = "--bandwidth 200 --flops 1.5 --overhead_us 300 --acceptance 0.8 --tp 2"
    links = "--link 25 --link_latency_us 40"
    done = command("plan", *f"{words} {links}".split())
    assert done.code == 0, done.err
    hardware = made[0]
    assert hardware.read_bytes_per_s == 200e9 and hardware.flops_per_s == 1.5e12
    assert hardware.link.bytes_per_s == 25e9
    assert hardware.link.latency_s == pytest.approx(40e-6)
    assert hardware.layer_overhead_s * DEMO_LAYERS == pytest.approx(300e-6)
    assert "reads 200.0 GB/s (KV 200.0), computes 1.50 TFLOP/s" in done.out
    assert "300 us fixed per forward" in done.out


def test_a_link_in_gbit() -> None:
    """8 Gbit/s are 1e9 bytes a second; times of flags are in ms."""
    section = SimulationSection(link_gbit=8.0, link_ms=2.0, draft_ms=3.0, stage_ms=(20.0,))
    ((_, machine),) = make_machines(section)
    assert machine.bytes_per_s == 1e9
    assert (machine.link_s, machine.cancel_s, machine.draft_s) == (0.002, 0.002, 0.003)
    assert machine.stage_s == (0.02,) * 4


def test_what_a_probe_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """4e10 bytes/s, 1e11 FLOP/s, 2e-4 s a layer; a link of 1e-5 s and 1e9 bytes/s."""
    print_machine(MACHINE, tmp_path / "m.json")
    cells = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()
    ]
    shown = {cell[1]: cell[2] for cell in cells if len(cell) > 2}
    assert shown["read bandwidth, GB/s"] == "40.0"
    assert shown["matrix product, float32, TFLOP/s"] == "0.100"
    assert shown["attention over a long cache, bfloat16, GB/s"] == "20.0"
    assert shown["overhead of a layer, float32, us"] == "200.0"
    assert shown["all-reduce between ranks (gloo), latency, us"] == "10.0"
    assert shown["all-reduce between ranks (gloo), GB/s"] == "1.00"


def test_bytes_that_are_printed() -> None:
    plan = MemoryPlan(weights=1_250_000_000, kv=250_000_000, working=1_000_000_000)
    assert plan.describe() == "2.50 GB (weights 1.25, KV 0.25, working 1.00)"
    rates = {"read_bytes_per_s": 1.5e10, "kv_bytes_per_s": 2e9, "flops_per_s": 2.5e12}
    text = describe_machine({"machine": "m", "hardware": rates})
    assert text.endswith("m: a rank reads 15.0 GB/s (KV 2.0), computes 2.50 TFLOP/s")
    assert title_of(drawn_command()).endswith(", 1.0 GB/s read")  # of 1e9 bytes/s


def test_a_hop_in_us() -> None:
    ring: Any = SimpleNamespace(
        link_ms=0.25, decode_hop_bytes=2048, tokens_per_round=None, measured_round_ms=None
    )
    assert describe_round(ring) == ["link: 250 us for 2,048 bytes"]


def test_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc has KiB, and nanoseconds of waiting."""
    proc = tmp_path / "proc"
    task = proc / "7" / "task" / "9"
    task.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert free_host_memory(tmp_path) == 2 * 1024**2
    (task / "schedstat").write_text("123456789 2500000000 77\n")
    assert _waits(proc, [7]) == {9: 2.5}
    status = SimpleNamespace(read_text=lambda: "VmPeak:\t 9 kB\nVmHWM:\t    3072 kB\n")
    monkeypatch.setattr(timing, "Path", lambda path: status)
    assert timing.peak_memory_bytes(torch.device("cpu")) == 3 * 1024**2
