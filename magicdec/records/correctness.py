"""Correctness: how the emitted tokens of a run compare with those of the baseline. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import Part, recorded

UNCOMPARED = "if nothing was compared"
UNJUDGED = "if identical or not compared"


@dataclass(frozen=True)
class Divergence(Part):
    """The first position at which a sequence differs from the reference, and its margin."""

    sequence: int = recorded("prompt, counted from 0")
    index: int = recorded("output token, counted from 0, at which the two outputs first differ")
    expected: int | None = recorded(
        "the reference's token id at that position", null="if the reference had already ended"
    )
    found: int | None = recorded(
        "the requested strategy's token id at that position", null="if its output had already ended"
    )
    margin: float | None = recorded(
        "the sequence's margin (see *How a tie is settled*)",
        "logits",
        null="if an output does not end where its end token or length limit says",
    )


@dataclass(frozen=True)
class Correctness(Part):
    """The result of the comparison. `reference` is None if nothing was compared."""

    reference: str | None = recorded(
        "what the outputs were compared with: `autoregressive`, in the same run", null=UNCOMPARED
    )
    identical: bool | None = recorded(
        "whether every token of every sequence is equal", null=UNCOMPARED
    )
    num_tokens: int | None = recorded(
        "number of tokens that the requested strategy emitted, over all sequences, including their "
        "first tokens",
        null="never in a run's record",
    )
    first_divergence: Divergence | None = recorded(
        "where the first sequence whose margin exceeds the bound differs from the reference; if no "
        "margin exceeds the bound, that of the first sequence that differs",
        null=UNJUDGED,
    )
    num_excused: int | None = recorded(
        "number of differing sequences that are ties", null=UNCOMPARED
    )
    num_diverged: int | None = recorded(
        "number of differing sequences that are not ties; the run is `diverged` unless this is 0",
        null=UNCOMPARED,
    )
    margin_bound: float | None = recorded(
        "largest margin that still counts as a tie: the largest rounding error of the run",
        "logits",
        null=UNJUDGED,
    )
    expected_differing: float | None = recorded(
        "mean number of sequences that the rounding of the run makes differ", null=UNJUDGED
    )
    most_differing: int | None = recorded(
        "number of differing sequences that rounding exceeds with a probability of at most 0.001; "
        "if more differ, none is a tie",
        null=UNJUDGED,
    )
    num_short: int | None = recorded(
        "number of tokens that are not the wider model's choice, in the requested strategy's "
        "outputs that were replayed",
        null=UNJUDGED,
    )
    num_short_reference: int | None = recorded(
        "the same for the reference's outputs to the same prompts", null=UNJUDGED
    )

    @property
    def passed(self) -> bool:
        """Whether nothing was compared, all tokens are identical, or every difference is a tie."""
        return self.reference is None or bool(self.identical) or self.num_diverged == 0

    @property
    def status(self) -> str:
        """The status of a run with this result."""
        if not self.passed:
            return "diverged"
        return "ok_with_ties" if self.num_excused else "ok"
