"""Which cases `make test` runs: that they have every pair. Every architecture has a tiny model."""

from itertools import combinations, product

from tiers import covering
from tiny_families import CLASSES, MODELS

from magicdec.names import ARCHITECTURES


def test_the_kept_cases_have_every_pair_and_are_few() -> None:
    axes = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4)}
    cases = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    kept = [cases[index] for index in sorted(covering(cases, 2))]
    for one, other in combinations(axes, 2):
        assert {(c[one], c[other]) for c in kept} == set(product(axes[one], axes[other]))
    assert len(kept) < len(cases) / 4
    assert len(covering(cases, 1)) == 5


def test_every_architecture_has_a_tiny_family() -> None:
    names = {CLASSES.get(family, f"{family}ForCausalLM") for family, _ in MODELS.values()}
    assert names == set(ARCHITECTURES)
