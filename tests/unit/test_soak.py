"""scripts/soak_pipeline.py: what counts as a leak, and that its cases are commands which can be."""

import random

import pytest
from soak.choices import draw
from soak.leaks import BOUNDS, COUNTS, WARM_UP, Sample, find_leaks

from magicdec.cli.serve import COMMANDS
from magicdec.distributed.groups import Launch
from magicdec.systems.modes import SPECULATIVE

PASSES = WARM_UP + 24


def samples(changed: str = "", every: int = 1, by: int = 0) -> list[Sample]:
    """Those of a healthy rank: memory that goes up and down by 100 kB and is once taken for good.
    `changed` grows by so much in every so many passes."""
    chooser, found = random.Random(0), list[Sample]()
    for number in range(PASSES):
        memory = 300_000 + chooser.randint(-100, 100) + 3000 * (number > PASSES // 2)
        sample = {"anonymous_kb": memory, "objects": 1000 + chooser.randint(-2, 2)}
        sample |= dict.fromkeys(COUNTS, 7)
        if changed:
            sample[changed] += by * (number // every)
        found.append(sample)
    return found


def test_what_does_not_last_is_no_leak() -> None:
    assert find_leaks(samples()) == []
    growing = [s | {"threads": min(number, WARM_UP)} for number, s in enumerate(samples())]
    assert find_leaks(growing) == [], "threads of the warm-up"


@pytest.mark.parametrize("name", COUNTS)
def test_one_more_in_every_other_pass_is_a_leak(name: str) -> None:
    (leak,) = find_leaks(samples(name, every=2, by=1))
    assert leak.startswith(f"{name} grew from ")


@pytest.mark.parametrize("name", BOUNDS)
def test_growth_of_twice_the_bound_is_a_leak(name: str) -> None:
    (leak,) = find_leaks(samples(name, by=2 * int(BOUNDS[name])))
    assert leak.startswith(f"{name} grew by ")


def test_every_case_is_a_command_that_is_not_refused() -> None:
    """Before a model is looked at."""
    for seed in range(100):
        num_ranks, flags = draw(random.Random(seed), is_repeated=seed % 2 == 0)
        experiment = COMMANDS["pipeline"].parse(flags, Launch(1, num_ranks, 1, num_ranks))
        passes = experiment.options.of_system(SPECULATIVE)
        assert len(passes) == (1 if seed % 2 == 0 else 3)
