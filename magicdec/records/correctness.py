"""Correctness: the comparison of a pass's tokens with those of the baseline or of a first mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.records.fields import RecordPart, recorded

UNCOMPARED = "if nothing was compared"
UNJUDGED = "if identical or not compared"
ALL_EQUAL = "if all bits are equal"
FEW_POSITIONS = f"{ALL_EQUAL}, or too few positions were measured"
# The fields whose limits are those with `most_` before their names.
LIMITED = ("error_ratio", "largest_error_ratio", "num_changed")


@dataclass(frozen=True)
class Divergence(RecordPart):
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
class Misjudged(RecordPart):
    """A token that the logits of its own step do not allow."""

    sequence: int = recorded("prompt, counted from 0")
    index: int = recorded("output token, counted from 0")
    expected: int | None = recorded(
        "the token id that follows from the logits",
        null="if none does: the step, or the request, should have ended before",
    )
    found: int | None = recorded("the token id that was emitted or decided on", null="if none was")


@dataclass(frozen=True)
class JudgedAgain(RecordPart):
    """Counts of steps that were judged again from their own logits."""

    num_steps: int = recorded("number of steps that were judged again, of both passes")
    num_steps_of_all: int = recorded("number of all steps of the rows that were watched")
    num_tokens: int = recorded("number of tokens that these steps should have emitted")
    num_wrong: int = recorded(
        "number of rows of these steps, and of ends of requests, that are not what the logits and "
        "the end tokens say; the pass is a `mismatch` unless this is 0"
    )
    first_wrong: Misjudged | None = recorded("the first of them", null="if there is none")

    @classmethod
    def sum_of(cls, parts: Sequence[JudgedAgain]) -> JudgedAgain:
        wrong = [part.first_wrong for part in parts if part.first_wrong is not None]
        return cls(
            sum(part.num_steps for part in parts),
            sum(part.num_steps_of_all for part in parts),
            sum(part.num_tokens for part in parts),
            sum(part.num_wrong for part in parts),
            wrong[0] if wrong else None,
        )


@dataclass(frozen=True)
class ForwardErrors(RecordPart):
    """Errors of the logits of both passes after the same text, over the last batch of a run or all
    requests of `magicdec serve`, whose first mode stands for the baseline."""

    num_positions: int = recorded("number of positions of which both passes kept logits")
    num_unequal: int = recorded("number of those whose logits differ in a bit")
    num_measured: int | None = recorded(
        "number of positions that were compared with the wider model", null=ALL_EQUAL
    )
    decode_error: float | None = recorded(
        "the error of a logit in the baseline, or in the first mode: root mean square over the "
        "vocabulary, and geometric mean over positions",
        "logits",
        null=ALL_EQUAL,
    )
    verify_error: float | None = recorded(
        "the same of the requested strategy, or of this mode", "logits", null=ALL_EQUAL
    )
    error_ratio: float | None = recorded(
        "geometric mean, over positions, of the second of these errors over the first",
        null=ALL_EQUAL,
    )
    most_error_ratio: float | None = recorded(
        "the largest `error_ratio` that is no alarm", null=FEW_POSITIONS
    )
    largest_error_ratio: float | None = recorded(
        "the largest ratio at one position", null=ALL_EQUAL
    )
    most_largest_error_ratio: float | None = recorded(
        "the largest `largest_error_ratio` that is no alarm", null=FEW_POSITIONS
    )
    num_changed: int | None = recorded(
        "number of positions at which the largest logits are those of different tokens",
        null=ALL_EQUAL,
    )
    expected_changed: float | None = recorded(
        "mean number of such positions that rounding makes", null=ALL_EQUAL
    )
    most_num_changed: int | None = recorded(
        "the largest `num_changed` that is no alarm", null=ALL_EQUAL
    )
    hidden_error: float | None = recorded(
        "what could hide: errors that are added to the logits of verifications, or of this mode, "
        "and have at least this root mean square would have given an alarm with a probability of "
        "0.99",
        "logits",
        null=FEW_POSITIONS,
    )

    @property
    def alarms(self) -> list[str]:
        limits = {name: getattr(self, f"most_{name}") for name in LIMITED}
        return [
            name
            for name, most in limits.items()
            if most is not None and not getattr(self, name) <= most
        ]


@dataclass(frozen=True)
class Correctness(RecordPart):
    """The result of the comparison. `reference` is None if nothing was compared."""

    reference: str | None = recorded(
        "the pass of the command that the outputs were compared with",
        null=UNCOMPARED,
    )
    identical: bool | None = recorded(
        "whether every token of every sequence is equal", null=UNCOMPARED
    )
    num_tokens: int | None = recorded(
        "number of tokens that the requested strategy emitted, over all sequences, including their "
        "first tokens",
        null="never where tokens are known",
    )
    first_divergence: Divergence | None = recorded(
        "where the first sequence whose margin exceeds the bound differs from the reference; if no "
        "margin exceeds the bound, that of the first sequence that differs",
        null=UNJUDGED,
    )
    num_excused: int | None = recorded(
        "number of differing sequences that are ties", null=f"{UNCOMPARED}, or not judged"
    )
    num_diverged: int | None = recorded(
        "number of differing sequences that are not ties; the pass is a `mismatch` unless it is 0",
        null=f"{UNCOMPARED}, or not judged",
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
    judged_again: JudgedAgain | None = recorded(
        "steps that were judged again from their own logits",
        null="if none was: in a run that compares nothing, in a sampled mode or one with stages",
    )
    forwards: ForwardErrors | None = recorded(
        "how far the logits of both passes are from the wider model's",
        null=f"{UNCOMPARED}; of the first mode of `magicdec serve`, of modes without "
        "`judged_again`, and where the first has none; in records of the gate and of earlier "
        "versions; if the last batch was interrupted",
    )

    @property
    def has_wrong_steps(self) -> bool:
        return self.judged_again is not None and self.judged_again.num_wrong > 0

    @property
    def has_alarms(self) -> bool:
        return self.forwards is not None and bool(self.forwards.alarms)
