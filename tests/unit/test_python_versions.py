"""The least Python that the metadata promises is the one that README, mypy and ruff mean, and every
pin of constraints.txt can be installed there."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROMISED = SpecifierSet(PROJECT["project"]["requires-python"])
(LEAST,) = (bound.version for bound in PROMISED)


def pins(text: str) -> Iterator[tuple[str, str]]:
    """(name, version) of each pin."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            yield name, version


def refusals(constraints: str, least: str) -> tuple[list[str], int]:
    """The pins that `least` cannot install, as their own metadata says, and how many are known: the
    installed distributions of that version."""
    found = []
    known = 0
    for name, version in pins(constraints):
        try:
            about = metadata(name)
        except PackageNotFoundError:  # what only the site or a release needs
            continue
        if Version(about["Version"]).public == Version(version).public:
            known += 1
            needed = about.get("Requires-Python") or ""
            if not SpecifierSet(needed).contains(f"{least}.0"):
                found.append(f"{name} {version} needs Python {needed}")
    return found, known


def test_every_pin_can_be_installed_with_the_least_python() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found, known = refusals(constraints, LEAST)
    if not known:
        pytest.skip("other versions than those of constraints.txt are installed")
    assert found == []
    older, _ = refusals(constraints, "3.10")
    assert older or known < 50, "of all pins some need 3.11"


def test_all_mean_the_same_python() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"Python (\S+) or newer", readme) == [LEAST]
    assert PROJECT["tool"]["mypy"]["python_version"] == LEAST
    assert "target-version" not in PROJECT["tool"]["ruff"], "ruff reads requires-python"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"(Python {LEAST})" in constraints.splitlines()[0]
    assert f"{sys.version_info.major}.{sys.version_info.minor}.0" in PROMISED


def test_no_requirement_is_for_an_older_python() -> None:
    """Such as a backport of what the least Python has."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    markers = [requirement.marker for requirement in map(Requirement, lines)]
    newest = {"python_version": "3.99", "platform_system": "Linux"}
    here = {"python_version": LEAST, "platform_system": "Linux"}
    assert all(m.evaluate(here) or m.evaluate(newest) for m in markers if m)
