"""Acceptance as the cost model uses it, and the number of tokens that a step yields. Imports no
torch. Source: Leviathan et al. 2023, section 3.1 and equation 1.

A record's *acceptance rate* is accepted / drafted tokens. The *conditional rate* is the probability
that a draft token is accepted if all before it in the step were; it is larger, because drafts after
a rejected one are drafted too, but never accepted.
"""

from __future__ import annotations

Acceptance = float | tuple[float, ...]
"""Either one conditional rate, or the shares of verifications that accept at least 1, 2, ... draft
tokens (a record's `acceptance_per_position`)."""

PRECISION = 1e-9  # of a converted rate


def conditional_rate(acceptance_rate: float, gamma: int) -> float:
    """The conditional rate, the same at every position, with which steps of `gamma` draft tokens
    have this acceptance rate: the mean of its first `gamma` powers."""
    low, high = 0.0, 1.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        mean = (expected_tokens(middle, gamma) - 1) / gamma
        low, high = (middle, high) if mean < acceptance_rate else (low, middle)
    return low if acceptance_rate < 1 else 1.0


def survival(acceptance: Acceptance, position: int) -> float:
    """Probability that at least `position` (1, 2, ...) draft tokens of a step are accepted."""
    if isinstance(acceptance, tuple):
        assert 1 <= position <= len(acceptance), "gamma is at most the curve's length"
        return acceptance[position - 1]
    return acceptance**position


def expected_tokens(acceptance: Acceptance, gamma: int) -> float:
    """Expected tokens per row and verification, including the bonus token: 1 to gamma + 1."""
    return 1.0 + sum(survival(acceptance, k) for k in range(1, gamma + 1))
