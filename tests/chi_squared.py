"""The p-value of counts under a distribution, for tests of sampled tokens."""

import torch
from scipy.stats import chisquare
from torch import Tensor

# P-values: a right rule falls below the first once in 1000.
ACCEPTED = 1e-3
REFUSED = 1e-9
LEAST = 8.0  # expected count of a cell; rarer ones are merged


def p_value(observed: Tensor, probs: Tensor) -> float:
    """Of Pearson's chi-squared test; 0 if something of probability 0 was observed."""
    if observed[probs == 0].sum() > 0:
        return 0.0
    expected = probs * observed.sum()
    is_rare = expected < LEAST
    cells = [
        torch.cat([values[~is_rare].double(), values[is_rare].sum().double().view(1)])
        for values in (observed, expected)
    ]
    observed, expected = (values[cells[1] >= LEAST] for values in cells)
    return float(chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
