"""PassSamples: the raw times and counts that a run fills in for one pass. Imports no torch.

Must not know how anything is measured, nor how a record describes it (`recorded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from magicdec.request import Request, StepOutput


def to_ms(seconds: float) -> float:
    """Milliseconds, rounded to the resolution of the clock, which is 1 ns."""
    return round(1e3 * seconds, 6)


@dataclass(kw_only=True)
class PassSamples:
    """The raw times and counts of one pass. `SamplesRecord` describes the fields."""

    begin_ms: list[float] = field(default_factory=list)
    calibration_ms: list[float] | None = None
    warmup_calibration_ms: float | None = None
    draft_prefill_ms: list[float] | None = None
    step_ms: list[list[float]] = field(default_factory=list)
    num_drafted: list[list[int]] = field(default_factory=list)
    num_accepted: list[list[list[int]]] = field(default_factory=list)
    num_emitted: list[list[list[int]]] = field(default_factory=list)
    sequence_tokens: list[list[int]] = field(default_factory=list)
    sequence_ms: list[list[float]] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    bytes_read: list[list[int]] = field(default_factory=list)
    draft_kv_tokens: list[int] = field(default_factory=list)
    draft_rows: list[int] = field(default_factory=list)
    peak_memory_bytes: list[list[int]] = field(default_factory=list)
    threads: list[list[int]] = field(default_factory=list)
    answer_scores: list[float] | None = None
    output_hashes: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> list[int]:
        """Emitted tokens after the first ones, summed over the sequences, by batch."""
        return [sum(tokens) for tokens in self.sequence_tokens]

    def begin_batch(self) -> None:
        self.step_ms.append([])
        self.num_drafted.append([])
        self.num_accepted.append([])
        self.num_emitted.append([])

    def observe_begin(
        self, seconds: float, calibration_s: float | None, is_draft_prefill: bool
    ) -> None:
        """A strategy prepared for a batch in `seconds`, of which calibration took
        `calibration_s`."""
        self.begin_ms.append(to_ms(seconds - (calibration_s or 0.0)))
        if calibration_s is not None:
            self.calibration_ms = [*(self.calibration_ms or ()), to_ms(calibration_s)]
        if is_draft_prefill:
            self.draft_prefill_ms = list(self.begin_ms)

    def observe_phases(self, seconds: Mapping[str, Sequence[float]]) -> None:
        """The times of the phases of all steps, by the name of the phase."""
        self.draft_ms, self.verify_ms, self.decode_ms = (
            [to_ms(s) for s in seconds.get(name, ())] for name in ("draft", "verify", "decode")
        )

    def observe(self, output: StepOutput, seconds: float) -> None:
        """A step took that long; `output` has the tokens that were appended to the requests."""
        self.step_ms[-1].append(to_ms(seconds))
        self.num_drafted[-1].append(output.num_drafted)
        self.num_accepted[-1].append(output.num_accepted or [])
        self.num_emitted[-1].append([len(tokens) for tokens in output.token_ids])

    def end_batch(self, requests: Sequence[Request], started_s: float) -> None:
        """All `requests` of the batch have ended; their decoding started at `started_s`."""
        ends = [r.finished_s for r in requests if r.finished_s is not None]
        assert len(ends) == len(requests), "every request has ended"
        self.sequence_tokens.append([len(r.output_ids) - 1 for r in requests])
        self.sequence_ms.append([to_ms(max(0.0, end - started_s)) for end in ends])
