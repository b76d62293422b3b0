"""Probing over several ranks: the exchange between them is measured too."""

from __future__ import annotations

from pathlib import Path

from conftest import Launch

from magicdec.hardware.ceiling_file import load_machine


def test_two_ranks_measure_their_link(launch: Launch, tmp_path: Path) -> None:
    flags = ("--out", "machine.json", "--threads", 1)
    done = launch("distributed/short_probe.py", *flags, num_ranks=2)
    assert done.returncode == 0, done.stderr
    machine = load_machine(tmp_path / "machine.json")
    assert machine.description["world_size"] == 2 and machine.node_link is None
    assert machine.link is not None and machine.link.latency_s > 0
    assert done.stdout.count("written to machine.json") == 1, "by one rank"
    assert "all-reduce between ranks" in done.stdout
