"""scripts/acceptance_table.py: a printed difference is that of the printed rates."""

import random
import statistics

import pytest


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> object:
    import acceptance_table

    return acceptance_table


def test_the_difference_is_that_of_the_pooled_rates(table) -> None:  # type: ignore[no-untyped-def]
    """Sequences of different lengths: the mean of their rates would be another number."""
    ours, others = [(9, 10), (10, 100)], [(1, 10), (20, 100)]
    found, _ = table.paired_difference(ours, others)
    assert found == pytest.approx(19 / 110 - 21 / 110)
    macro = statistics.fmean([0.9 - 0.1, 0.1 - 0.2])
    assert abs(found - macro) > 0.3


def test_the_error_is_that_of_repeated_samples(table) -> None:  # type: ignore[no-untyped-def]
    """Over many samples of 30 pairs, the jackknife's error is the spread of the difference."""
    drawn = random.Random(0)
    differences, errors = [], []
    for _ in range(300):
        ours, others = [], []
        for _ in range(30):
            drafted, ease = drawn.randrange(20, 120), drawn.uniform(0.3, 0.7)
            ours.append((sum(drawn.random() < ease + 0.1 for _ in range(drafted)), drafted))
            others.append((sum(drawn.random() < ease for _ in range(drafted)), drafted))
        found, error = table.paired_difference(ours, others)
        differences.append(found)
        errors.append(error)
    assert statistics.fmean(differences) == pytest.approx(0.1, abs=0.005)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(differences), rel=0.15)


def test_one_sequence_has_no_error(table) -> None:  # type: ignore[no-untyped-def]
    assert table.paired_difference([(3, 4)], [(1, 4)]) == (0.5, 0.0)
