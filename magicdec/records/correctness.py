"""Correctness: how the tokens that a run emitted compare with the reference's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import recorded

UNCOMPARED = "if nothing was compared"


@dataclass(frozen=True)
class Divergence:
    """Where one sequence differs from the reference, and how far it is from a tie."""

    sequence: int = recorded("prompt, counted from 0")
    index: int = recorded("output token, counted from 0, at which the two outputs first differ")
    expected: int | None = recorded(
        "the reference's token id there", null="if the reference had ended"
    )
    found: int | None = recorded(
        "the asked strategy's token id there", null="if its output had ended"
    )
    margin: float | None = recorded(
        "the sequence's margin (see *How a tie is settled*)",
        "logits",
        null="if an output does not end where it must",
    )


@dataclass(frozen=True)
class Correctness:
    """`reference` is None when nothing was compared."""

    reference: str | None = recorded(
        "what the outputs were compared with: `autoregressive`, in the same run", null=UNCOMPARED
    )
    identical: bool | None = recorded("every token of every sequence is equal", null=UNCOMPARED)
    num_tokens: int | None = recorded(
        "tokens that the asked strategy emitted, over all sequences, first tokens included",
        null="never in a run's record",
    )
    first_divergence: Divergence | None = recorded(
        "where the first diverged sequence differs from the reference; if none diverged, the first "
        "one that was settled as a tie",
        null="if identical or not compared",
    )
    num_excused: int | None = recorded(
        "differing sequences that were settled as ties", null=UNCOMPARED
    )
    num_diverged: int | None = recorded(
        "differing sequences that are not ties; the run is `diverged` unless this is 0",
        null=UNCOMPARED,
    )
    margin_bound: float | None = recorded(
        "largest margin that still counts as a tie", "logits", null=UNCOMPARED
    )

    @property
    def passed(self) -> bool:
        """Nothing to compare with, identical, or every difference settled as a tie."""
        return self.reference is None or bool(self.identical) or self.num_diverged == 0
