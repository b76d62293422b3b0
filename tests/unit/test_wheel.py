"""The wheel that is built from the source distribution works in another environment and another
folder than the repository. The other environment borrows this one's dependencies, so that nothing
is downloaded."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

Command = Callable[..., str]
README = (ROOT / "README.md").read_text()
pytestmark = pytest.mark.wide


def output_of(words: list[str | Path], folder: Path) -> str:
    """What a command prints that ends with 0, without the repository on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    output_of(build, folder)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    output_of([*pip, wheel], folder)
    site_packages = next((folder / "venv").glob("lib/python*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed))
    return folder / "venv"


@pytest.fixture
def magicdec(environment: Path, tmp_path: Path) -> Command:
    """What a command of the wheel prints in an empty folder."""
    return lambda *words: output_of([environment / "bin" / "magicdec", *words], tmp_path)


def test_a_run_is_reported(magicdec: Command, tmp_path: Path) -> None:
    sizes = ("--prefix_len", "128", "--gen_len", "8", "--B", "1", "--num_batches", "1")
    assert "verified: the other pass has the 8 tokens of static" in magicdec("run", *sizes)
    magicdec("report", "results/runs.jsonl", "--out", "report")
    assert "<svg" in (tmp_path / "report" / "index.html").read_text()


def test_the_gate_has_its_baselines(environment: Path, magicdec: Command) -> None:
    """One of each file, the last, since all cases of `--quick` take minutes. Which file is read
    follows from the CPU."""
    paths = [*environment.glob("lib/*/site-packages/magicdec/bench/gate/baselines/*.jsonl")]
    assert len(paths) > 1
    for path in paths:
        path.write_text(path.read_text().splitlines()[-1] + "\n")
    assert "1 of 1 cases" in magicdec("gate", "--quick")


def test_published_tables_are_there(magicdec: Command, tmp_path: Path) -> None:
    """The file that is written is in this folder, not in the package."""
    assert magicdec("reproduce").count("\npublished size: ") == 6
    shown = magicdec("reproduce", "magicdec_speedups_a100", "--predict")
    assert "predicted" in shown
    assert [p.name for p in tmp_path.rglob("*.csv")] == ["magicdec_speedups_a100.csv"]


def test_the_python_example_of_the_readme_works(environment: Path, tmp_path: Path) -> None:
    found = re.search(r"^    from magicdec import LLM\n(.*\n)+?\n(?=\S)", README, re.MULTILINE)
    assert found is not None
    example = re.sub("^    ", "", found[0], flags=re.MULTILINE)
    shown = output_of([environment / "bin" / "python", "-c", example], tmp_path)
    # The pieces, in several lines of text, and then all that is known of the request.
    text, _, result = shown.partition("RequestOutput(")
    assert len(text.split()) >= 15 and "draft_acceptance_rate=0." in result
