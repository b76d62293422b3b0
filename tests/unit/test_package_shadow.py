"""A folder named `magicdec` in the current directory, such as a clone of this project, takes the
place of the package neither in what a command starts nor in a program that imports an editable
install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import ROOT

from magicdec.distributed import ranks

SMALL = ("--B", "1", "--prefix_len", "64", "--gen_len", "4", "--num_batches", "1", "--threads", "1")
OTHER = 'raise ImportError("this is another package")'


def output_of(words: list[str], folder: Path, **variables: str) -> str:
    """What a command prints, without the repository on its path but for `variables`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=kept | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder in which another package is called `magicdec`."""
    (tmp_path / "magicdec").mkdir()
    (tmp_path / "magicdec" / "__init__.py").write_text(OTHER)
    return tmp_path


@pytest.mark.wide
def test_ranks_have_the_package_of_their_launcher(beside: Path) -> None:
    """However that one found it: here by PYTHONPATH, which comes after the current directory."""
    words = [sys.executable, "-P", "-m", "magicdec", "run", *SMALL, "--nproc", "2"]
    shown = output_of(words, beside, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert "verified: the other pass has the 4 tokens of static" in shown


@pytest.mark.parametrize("is_on_path", [True, False])
def test_a_command_has_the_package_of_its_parent(
    is_on_path: bool, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a child finds it by itself, nothing is put before the standard library."""
    monkeypatch.setattr(sys, "path", ["", str(ROOT)] if is_on_path else ["", "/nowhere"])
    command = ranks.package_command()
    assert (command[0] == sys.executable) == is_on_path
    variables = {"PYTHONPATH": str(ROOT)} if is_on_path else {}
    assert output_of([*command, "--version"], beside, **variables).startswith("magicdec ")


def test_an_editable_install_is_a_folder_on_the_path(tmp_path: Path) -> None:
    """It comes after the current directory. A folder without `__init__.py` there gives way to a
    package in a later folder of the path, but not to the import hook that an editable install of
    another layout would be."""
    clone = tmp_path / "magicdec"
    site = tmp_path / "site"
    (clone / "magicdec").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "magicdec/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    build = "from setuptools.build_meta import build_editable as build; build('..')"
    output_of([sys.executable, "-c", build], clone, SETUPTOOLS_SCM_PRETEND_VERSION="1")
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(site)
    program = f"import site; site.addsitedir({str(site)!r}); from magicdec import __all__ as all\n"
    shown = output_of([sys.executable, "-S", "-c", f"{program}print(all)"], tmp_path)
    assert shown == "['LLM']\n"
