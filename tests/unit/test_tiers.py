"""Which cases `make test` runs: that they have every pair; and the order of the files. Every
architecture has a tiny model."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

from conftest import ROOT
from tiers import LONG, SEVERAL, covering, ordered, spread
from tiny_families import CLASSES, HYBRIDS, MODELS

from magicdec.names import ARCHITECTURES


def test_the_kept_cases_have_every_pair_and_are_few() -> None:
    axes = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4)}
    cases = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    kept = [cases[index] for index in sorted(covering(cases, 2))]
    for one, other in combinations(axes, 2):
        assert {(c[one], c[other]) for c in kept} == set(product(axes[one], axes[other]))
    assert len(kept) < len(cases) / 4
    assert len(covering(cases, 1)) == 5
    assert spread(9, 3) == {0, 4, 8} and spread(9, 1) == {0} and spread(2, 3) == {0, 1}


def test_files_that_start_processes_are_spread_and_none_is_late() -> None:
    """Each item of a file keeps its place in the file."""
    paths = [Path(*words) for words in (("distributed", "a"), ("distributed", "b"))]
    paths += [Path("oracle", str(number)) for number in range(6)]
    paths += [Path("unit", name) for name in ("k", SEVERAL, LONG, "x")]
    items = [SimpleNamespace(path=path, place=place) for path in paths for place in range(2)]
    found = ordered(items)  # type: ignore[arg-type]
    names = [item.path.name for item in found]
    assert names[::2] == names[1::2] and [item.place for item in found] == [0, 1] * len(paths)
    assert names[::2] == ["a", LONG, "0", "b", "1", "2", SEVERAL, "3", "4", "5", "k", "x"]
    assert all((ROOT / "tests" / "unit" / name).is_file() for name in (SEVERAL, LONG))


def test_every_architecture_has_a_tiny_family() -> None:
    names = {CLASSES.get(family, f"{family}ForCausalLM") for family, _ in MODELS.values()}
    assert names == set(ARCHITECTURES) - HYBRIDS
