"""The raw times and counts of a run, from which `metrics.py` computes every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain
from typing import Any

from magicdec.records.fields import RecordPart, recorded
from magicdec.records.pass_record import hash_output  # noqa: F401
from magicdec.runner.request import Request, StepOutput

UNDRAFTED = "for `autoregressive`; with random weights"
UNLOGGED = "except in the runs of the gate; for `autoregressive`; where steps are captured"
UNCALIBRATED = "without `--gamma auto`; for `autoregressive`"


def to_ms(seconds: float) -> float:
    """Milliseconds, rounded to 1 ns, the resolution of the clock."""
    return round(1e3 * seconds, 6)


def _ms(meaning: str, null: str | None = None) -> Any:
    return recorded(meaning, "ms", null=null)


@dataclass(kw_only=True)
class SamplesRecord(RecordPart):
    """The raw times and counts of one pass, by batch."""

    begin_ms: list[float] = _ms(
        "time between prefill and the first decode step, by batch, without `calibration_ms`"
    )
    calibration_ms: list[float] | None = _ms(
        "time that `--gamma auto` spent on measuring steps between prefill and the first decode "
        "step, by batch",
        UNCALIBRATED,
    )
    warmup_calibration_ms: float | None = _ms(
        "time that `--gamma auto` spent on measuring steps in the warm-up", UNCALIBRATED
    )
    draft_prefill_ms: list[float] | None = _ms(
        "`begin_ms` of a standalone draft, which is its own prefill",
        "without a standalone draft; for `autoregressive`",
    )
    step_ms: list[list[float]] = _ms("time of each decode step, by batch and step")
    num_forwards: list[list[int]] | None = recorded(
        "forwards of the target and of a draft in each step, as the first rank has counted them, "
        "by batch and step",
        "forwards",
        null="in records of earlier versions",
    )
    num_tokens: list[int] = recorded(
        "emitted tokens after the first ones, summed over rows, by batch", "tokens"
    )
    padded_gamma: list[list[int]] | None = recorded(
        "draft tokens of the row with the most, by batch and step; 0 in a step without drafts",
        "tokens",
        null=UNDRAFTED,
    )
    num_drafted: list[list[list[int]]] | None = recorded(
        "draft tokens of each row, without padding, by batch, step and row, as in `num_accepted`",
        "tokens",
        null=UNDRAFTED,
    )
    num_accepted: list[list[list[int]]] | None = recorded(
        "accepted draft tokens by batch, step and row, including those past the row's end; rows "
        "that have ended are left out, and a step without drafts has no rows",
        "tokens",
        null=UNDRAFTED,
    )
    num_emitted: list[list[list[int]]] | None = recorded(
        "tokens that the step appended to the row's output, by batch, step and row, up to the "
        "row's end; rows that have ended are left out",
        "tokens",
        null="with random weights, where drafted",
    )
    draft_hashes: list[list[list[str]]] | None = recorded(
        "by batch, step and row, as in `num_accepted`: the hash of the tokens that were drafted, "
        "and that of the positions that the draft forwards read, in each layer and KV head; four "
        "hexadecimal digits of each",
        null=UNLOGGED,
    )
    draft_keys: list[list[list[int]]] | None = recorded(
        "keys that one KV head read in the draft forwards, by batch, step and row",
        "tokens",
        null=UNLOGGED,
    )
    sequence_tokens: list[list[int]] = recorded(
        "emitted tokens after the first one, by batch and sequence", "tokens"
    )
    sequence_ms: list[list[float]] = _ms(
        "time from the start of the batch's decode steps until the sequence ended, by batch and "
        "sequence; 0 if it had ended with its first token"
    )
    draft_ms: list[float] = _ms(
        "time of drafting, of each step that drafts, over all batches; empty if not timed"
    )
    verify_ms: list[float] = _ms("time of verifying, of each step that drafts; empty if not timed")
    decode_ms: list[float] = _ms(
        "time of the forward and of sampling, of each step without drafts; empty if not timed"
    )
    bytes_read: list[list[int]] = recorded(
        "bytes to read in the decode steps, by batch and rank", "bytes"
    )
    draft_kv_tokens: list[int] = recorded(
        "tokens whose K and V the draft forwards read, by batch, summed over rows and forwards",
        "tokens",
    )
    draft_rows: list[int] = recorded(
        "rows of the draft forwards, by batch, summed over forwards", "rows"
    )
    peak_memory_bytes: list[list[int]] = recorded(
        "largest memory use, by batch and rank; 0 if unknown", "bytes"
    )
    threads: list[list[int]] = recorded(
        "CPU threads as measured in the pass, by batch and, in their order, rank; the same in all "
        "passes and batches"
    )
    answer_scores: list[float] | None = recorded(
        "answer score of each prompt",
        "0 to 1",
        null="if the workload has no known answers; with random weights",
    )
    output_hashes: list[str] = recorded(
        "hash of the emitted token ids of each prompt, the first 16 hexadecimal digits of SHA-256; "
        "equal hashes stand for equal outputs"
    )

    def restored(self) -> PassSamples:
        """The collected samples, with steps without drafts or 0 forwards in place of missing
        counts."""
        values = vars(self) | {"num_tokens": [sum(tokens) for tokens in self.sequence_tokens]}
        absent = {"padded_gamma": 0, "num_accepted": [], "num_emitted": [], "num_drafted": []}
        absent |= {"num_forwards": 0}
        for name, value in absent.items():
            if values[name] is None:
                values[name] = [[value] * len(steps) for steps in self.step_ms]
        return PassSamples(**values)


@dataclass(kw_only=True)
class PassSamples(SamplesRecord):
    """The samples as a pass collects them: no counts are withheld."""

    num_forwards: list[list[int]] = field(default_factory=list)
    padded_gamma: list[list[int]] = field(default_factory=list)
    num_drafted: list[list[list[int]]] = field(default_factory=list)
    num_accepted: list[list[list[int]]] = field(default_factory=list)
    num_emitted: list[list[list[int]]] = field(default_factory=list)

    @classmethod
    def empty(cls) -> PassSamples:
        """The samples before a pass: null wherever a record may have null."""
        lists: dict[str, Any] = {f.name: [] for f in fields(cls) if f.default is MISSING}
        return cls(**lists)

    @classmethod
    def merged(cls, batches: Sequence[PassSamples]) -> PassSamples:
        merged = cls.empty()
        for item in fields(cls):
            values = [getattr(batch, item.name) for batch in batches]
            known = [value for value in values if value is not None]
            if known:
                setattr(merged, item.name, list(chain.from_iterable(known)))
        return merged

    def to_record(self, *, is_drafting: bool, is_random: bool) -> SamplesRecord:
        """The samples without counts of drafts if nothing is drafted or, with random weights, they
        mean nothing."""
        values = vars(self)
        if not is_drafting or is_random:
            drafted = (
                "padded_gamma",
                "num_drafted",
                "num_accepted",
                "draft_hashes",
                "draft_keys",
            )
            values = values | dict.fromkeys(drafted)
        if is_drafting and is_random:
            values = values | {"num_emitted": None}
        return SamplesRecord(**values)

    def begin_batch(self) -> None:
        for steps in (
            self.step_ms,
            self.num_forwards,
            self.padded_gamma,
            self.num_drafted,
            self.num_accepted,
            self.num_emitted,
        ):
            steps.append([])

    def observe_begin(
        self, seconds: float, calibration_s: float | None, is_draft_prefill: bool
    ) -> None:
        """Adds the time before a batch's first step, of which calibration took `calibration_s`."""
        self.begin_ms.append(to_ms(seconds - (calibration_s or 0.0)))
        if calibration_s is not None:
            self.calibration_ms = [*(self.calibration_ms or ()), to_ms(calibration_s)]
        if is_draft_prefill:
            self.draft_prefill_ms = list(self.begin_ms)

    def observe_phases(self, seconds: Mapping[str, Sequence[float]]) -> None:
        self.draft_ms, self.verify_ms, self.decode_ms = (
            [to_ms(s) for s in seconds.get(name, ())] for name in ("draft", "verify", "decode")
        )

    def observe(self, output: StepOutput, seconds: float, num_forwards: int = 0) -> None:
        self.step_ms[-1].append(to_ms(seconds))
        self.num_forwards[-1].append(num_forwards)
        self.padded_gamma[-1].append(output.padded_gamma)
        self.num_drafted[-1].append(output.num_drafted or [])
        self.num_accepted[-1].append(output.num_accepted or [])
        self.num_emitted[-1].append([len(tokens) for tokens in output.token_ids])
        if output.digests is not None:
            self._log(output.digests)

    def _log(self, digests: Sequence[tuple[str, int]]) -> None:
        self.draft_hashes, self.draft_keys = self.draft_hashes or [], self.draft_keys or []
        if len(self.draft_hashes) < len(self.step_ms):
            self.draft_hashes.append([])
            self.draft_keys.append([])
        self.draft_hashes[-1].append([hashed for hashed, _ in digests])
        self.draft_keys[-1].append([num_read for _, num_read in digests])

    def end_batch(self, requests: Sequence[Request], started_s: float) -> None:
        ends = [r.finished_s for r in requests if r.finished_s is not None]
        assert len(ends) == len(requests), "every request has ended"
        self.sequence_tokens.append([len(r.output_ids) - 1 for r in requests])
        self.num_tokens.append(sum(self.sequence_tokens[-1]))
        self.sequence_ms.append([to_ms(max(0.0, end - started_s)) for end in ends])


@dataclass(frozen=True, kw_only=True)
class PrefillSamples(RecordPart):
    """The raw times of prefill, which both passes of a run share."""

    prefill_ms: list[float] = recorded("time of the prefill, by batch", "ms")
    ttft_ms: list[list[float]] = recorded("TTFT, by batch and sequence", "ms")
    num_tokens: list[int] = recorded("prompt tokens of all sequences, by batch", "tokens")

    def observe(self, requests: Sequence[Request], seconds: float) -> None:
        self.prefill_ms.append(to_ms(seconds))
        firsts = [(r.arrived_s, r.first_token_s) for r in requests]
        self.ttft_ms.append([to_ms(at - arrived) for arrived, at in firsts if at is not None])
        self.num_tokens.append(sum(len(r.prompt_ids) for r in requests))


def unequal_threads(passes: Mapping[str, SamplesRecord]) -> str | None:
    """A message if a batch of any pass had other ranks or threads than the run's first batch, or
    does not say."""
    first = next(chain.from_iterable(samples.threads for samples in passes.values()), None)
    for name, samples in passes.items():
        num_known = len(samples.threads)
        count = len(samples.step_ms)
        if num_known != count:
            return f"{name} has the threads of {num_known} batches, but there are {count}"
        for batch, threads in enumerate(samples.threads):
            if threads != first:
                return (
                    f"{name}, batch {batch}: the ranks had {threads} threads, but {first} in the "
                    "first batch of the run"
                )
    return None
