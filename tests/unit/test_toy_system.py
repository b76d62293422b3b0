"""A new system is a folder and a line of `names.SYSTEMS`: a toy with one flag, which serves one
request after the other and rests in between, and says so in its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECLARATION = """
from dataclasses import dataclass

from magicdec.config.setting import setting
from magicdec.systems.declaration import Drafts, Mode, Ranks, SystemDeclaration
from magicdec.systems.flover.declaration import FloverSettings


@dataclass(frozen=True)
class ToySettings(FloverSettings):
    rest_ms: float = setting(1.0, "Ms to rest after all requests.", least=0)


TOY = SystemDeclaration(
    name="toy",
    system="toy_system:Toy",
    details="toy_details:ToyDetails",
    settings=ToySettings,
    modes={"resting": Mode(Ranks.FIRST, Drafts.NEVER, "with a rest at the end")},
)
"""
DETAILS = """
from dataclasses import dataclass
from typing import ClassVar, Literal

from magicdec.output.tables import Table
from magicdec.records.fields import recorded
from magicdec.systems.details import Details


@dataclass(frozen=True, kw_only=True)
class ToyDetails(Details):
    heading: ClassVar[str] = "Rests"

    kind: Literal["toy"] = recorded("`toy`", default="toy")
    rests: int = recorded("rests", label="rests of a toy")

    def tables(self, name: str) -> list[Table]:
        return [Table(["rest"], [[7]], title=f"{name}: a table of its own")]
"""
SYSTEM = """
import time
from dataclasses import replace

from toy_details import ToyDetails

from magicdec.systems.flover.system import Flover
from magicdec.systems.modes import Pass


class Toy(Flover):
    def step_shape(self, serving_pass):
        return super().step_shape(Pass.named("sequential"))

    def serve(self, serving_pass, requests, observer):
        details = super().serve(Pass.named("sequential"), requests, observer)
        time.sleep(self.settings.rest_ms / 1e3)
        return replace(details, recorded=ToyDetails(rests=1))
"""
RUN = """
import sys

from magicdec import names

names.SYSTEMS["toy"] = "toy_declaration:TOY"
if __name__ == "__main__":
    from magicdec.cli.commands import console

    sys.argv[0] = "magicdec"
    console()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"declaration": DECLARATION, "details": DETAILS, "system": SYSTEM, "run": RUN}
    for name, text in files.items():
        (tmp_path / f"toy_{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "toy_run.py", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_system_is_its_declaration_and_a_line(
    folder: Path, tiny_checkpoint: Path, text_file: Path
) -> None:
    words = ["serve", "--model", str(tiny_checkpoint), "--dataset", str(text_file)]
    words += ["--prefix_len", "9", "--gen_len", "3", "--num_requests", "2", "--device", "cpu"]
    words += ["--threads", "1", "--dtype", "float32", "--out", "out.jsonl", "--verbose"]
    flags = ("--modes", "sequential", "resting", "--rest_ms", "2")
    done = run(folder, *words, *flags)
    assert done.returncode == 0, done.stderr
    first, resting = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert [request["output_hash"] for request in resting["requests"]] == [
        request["output_hash"] for request in first["requests"]
    ]
    assert resting["status"] == "verified" and first["details"] is None
    assert resting["details"] == {"kind": "toy", "rests": 1}
    assert resting["config"]["workload"]["rest_ms"] == 2.0
    assert "rest_ms" not in first["config"]["workload"]
    again = run(folder, "table", "out.jsonl")
    for shown in (done.stdout, again.stdout):
        assert "rests of a toy" in shown and "resting: a table of its own" in shown
    refused = run(folder, *words, "--modes", "sequential", "--rest_ms", "2")
    message = "--rest_ms does nothing here: no mode of --modes sequential uses it; leave it out"
    assert refused.returncode == 2 and message in refused.stderr


def test_what_it_declares_is_in_the_help(folder: Path) -> None:
    shown = run(folder, "serve", "--help_all").stdout
    assert "--rest_ms" in shown and "resting (with a rest at the end)" in " ".join(shown.split())
