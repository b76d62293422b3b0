"""`magicdec probe` and its machine file: measurements of one rank, the file, and its errors."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.cli import probe as command
from magicdec.cli.plan import MAX_GAMMA
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection
from magicdec.distributed.groups import Launch
from magicdec.hardware.ceiling_file import Hardware, Link, MachineFile, load_machine
from magicdec.names import DTYPES
from magicdec.predict import probe

MACHINE = MachineFile(
    {"cpu": "a", "gpu": None, "world_size": 2, "threads": 1, "collectives": "gloo"},
    4e10,
    {"float32": 1e11, "bfloat16": 8e11},
    {"float32": 2e-4, "bfloat16": 0.0},
    {"float32": 3e10, "bfloat16": 2e10},
    None,
    Link(1e-5, 1e9),
    {"float32": 5e10, "bfloat16": 1e11},
    {"float32": 1e-6, "bfloat16": 0.0},
)


def broken(**fields: Any) -> str:
    return json.dumps({"schema_version": 2, **asdict(MACHINE), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON"),
        ("[1]", "not a machine file"),
        (broken(schema_version=1), "schema_version: Input should be 2"),
        (broken(read_bytes_per_s=0), "read_bytes_per_s: Input should be greater than 0"),
        (broken(link={"latency_s": 1.0}), "link.bytes_per_s: Field required"),
        (broken(link={"latency_s": -1.0, "bytes_per_s": 1.0}), "link.latency_s: Input should be"),
        (broken(kv_bytes_per_s={"float32": 1.0}), "--dtype bfloat16 is not in the machine file"),
        (broken(flops_per_s={"float32": 1.0}), "--dtype bfloat16 is not in the machine file"),
    ],
)
def test_malformed_machine_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        load_machine(path).hardware("bfloat16")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "new" / "machine.json")
    assert load_machine(tmp_path / "new" / "machine.json") == MACHINE
    assert MACHINE.hardware("float32") == (
        Hardware(4e10, 1e11, 2e-4, 3e10, None, Link(1e-5, 1e9), 5e10, 1e-6)
    )


def test_a_probe_measures_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With one rank and few short rounds, rates are positive and there is no link."""
    for name, value in (("STRETCHES", 1), ("ROUNDS", 2), ("CONTEXT", 64)):
        monkeypatch.setattr(probe, name, value)
    threads = torch.get_num_threads()
    launch = Launch(0, 1, 0, 1)
    machine = Machine(threads)
    parallel = ParallelSection(device="cpu", threads=threads)
    config = resolve(RunConfig(parallel=parallel), machine)
    found = probe.measure(config, machine, launch)
    assert found.link is None and found.node_link is None and found.read_bytes_per_s > 0
    for rates in (found.flops_per_s, found.kv_bytes_per_s, found.attention_flops_per_s):
        assert tuple(rates) == DTYPES and all(rate > 0 for rate in rates.values())
    assert all(rate <= found.read_bytes_per_s for rate in found.kv_bytes_per_s.values())
    for costs in (found.layer_overhead_s, found.token_overhead_s):
        assert tuple(costs) == DTYPES and all(seconds >= 0 for seconds in costs.values())
    found.save(tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == found
    command.print_machine(found, tmp_path / "machine.json")
    out = capsys.readouterr().out
    assert "read bandwidth, GB/s" in out and "all-reduce" not in out
    assert len(found.spreads) == 9 and all(spread >= 0 for spread in found.spreads.values())
    assert out.count(" %") == 9


def test_verifications_are_as_long_as_the_longest_of_a_plan() -> None:
    """Of shorter ones a probe measures how fast the memory is, not how fast attention computes."""
    assert probe.MANY == MAX_GAMMA + 1


def test_a_spread_leaves_out_what_warms_up() -> None:
    spreads = probe.Spreads()
    spreads.note("a", [9.0, 2.0, 3.0])
    spreads.note("b", [5.0])
    assert spreads == {"a": 0.5, "b": 0.0}


def test_a_busy_host_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the file says so."""
    monkeypatch.chdir(tmp_path)
    for taken, message in (
        (0.05, ""),
        (0.4, "warning: another load took 40% of the cores meanwhile"),
    ):
        found = replace(MACHINE, description=MACHINE.description | {"cores_taken": taken})
        monkeypatch.setattr(probe, "measure", lambda *arguments, found=found: found)
        command.run([], Launch())
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == bool(message)
        assert load_machine(Path("machine.json")).description["cores_taken"] == taken
