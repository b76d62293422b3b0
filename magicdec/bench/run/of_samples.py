"""The requests and groups of a pass from the samples of a run, by batch, step and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from magicdec.records.pass_record import GroupRecord, RequestRecord


class RowStep(NamedTuple):
    """What a step did for one row."""

    drafted: int
    accepted: int
    emitted: int
    digest: tuple[str, int] | None


def requests_of(
    samples: Any, prefill: Any, prompt_lens: Sequence[int], has_drafts: bool
) -> list[RequestRecord]:
    """The requests of all batches, in order."""
    requests = list[RequestRecord]()
    for batch, lengths in enumerate(samples.sequence_tokens):
        steps = steps_by_row(samples, batch, lengths) if has_drafts else None
        begin_ms = prefill.prefill_ms[batch] + samples.begin_ms[batch]
        begin_ms += (samples.calibration_ms or [0.0] * (batch + 1))[batch]
        for row, num_later in enumerate(lengths):
            number = len(requests)
            first_ms = prefill.ttft_ms[batch][row]
            later_ms = begin_ms + samples.sequence_ms[batch][row]
            scores = samples.answer_scores
            requests.append(
                RequestRecord(
                    arrival_ms=0.0,
                    joined_ms=[0.0],
                    preempted_ms=[],
                    prefilled_ms=[first_ms],
                    first_token_ms=first_ms,
                    finished_ms=later_ms if num_later else first_ms,
                    prompt_len=prompt_lens[number],
                    output_len=num_later + 1,
                    output_hash=samples.output_hashes[number],
                    answer_score=None if scores is None else scores[number],
                    **(drafts_of(steps[row]) if steps is not None else {}),
                )
            )
    return requests


def drafts_of(steps: Sequence[RowStep]) -> dict[str, Any]:
    """The counts of the verifications of a request; none without one."""
    if not steps:
        return {}
    accepted = [step.accepted for step in steps]
    digests = [step.digest for step in steps if step.digest is not None]
    is_logged = len(digests) == len(steps)
    return {
        "num_draft_tokens": sum(step.drafted for step in steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_spec_steps": len(steps),
        "acceptance_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
        "per_step_drafted": [step.drafted for step in steps],
        "per_step_accepted": accepted,
        "per_step_emitted": [step.emitted for step in steps],
        "draft_hashes": [hashed for hashed, _ in digests] if is_logged else None,
        "num_draft_kv_read": [num_read for _, num_read in digests] if is_logged else None,
    }


def steps_by_row(samples: Any, batch: int, lengths: Sequence[int]) -> list[list[RowStep]]:
    """The verifications of each row of a batch. A step has counts for the rows that have not yet
    emitted all of their tokens, in order."""
    left = list(lengths)
    found: list[list[RowStep]] = [[] for _ in lengths]
    for step, emitted in enumerate(samples.num_emitted[batch]):
        longest = samples.padded_gamma[batch][step]
        proposed = samples.num_drafted[batch][step] if samples.num_drafted else []
        accepted = samples.num_accepted[batch][step]
        running = [i for i, tokens in enumerate(left) if tokens > 0]
        for row, (i, tokens) in enumerate(zip(running, emitted, strict=False)):
            left[i] -= tokens
            drafted = proposed[row] if row < len(proposed) else longest
            if row < len(accepted) and drafted:
                digest = digest_of(samples, batch, step, row)
                counts = drafted, min(accepted[row], drafted), tokens
                found[i].append(RowStep(*counts, digest))
    return found


def digest_of(samples: Any, batch: int, step: int, row: int) -> tuple[str, int] | None:
    if samples.draft_hashes is None:
        return None
    return samples.draft_hashes[batch][step][row], samples.draft_keys[batch][step][row]


def groups_of(samples: Any, prefill: Any, has_drafts: bool) -> list[GroupRecord]:
    """The groups, one a batch. Phases of steps stand in one list for all batches."""
    groups = list[GroupRecord]()
    phases = {name: iter(getattr(samples, name)) for name in ("draft_ms", "verify_ms", "decode_ms")}
    for batch, step_ms in enumerate(samples.step_ms):
        gammas = [0] * len(step_ms)
        if samples.padded_gamma is not None:
            gammas = samples.padded_gamma[batch]
        rows = None
        if samples.num_emitted is not None:
            rows = [len(tokens) for tokens in samples.num_emitted[batch]]
        num_drafting = sum(gamma > 0 for gamma in gammas)
        num_plain = len(step_ms) - num_drafting
        if samples.padded_gamma is None and batch == 0:  # with random weights: all in the first
            num_drafting = len(samples.draft_ms)
            num_plain = len(samples.decode_ms)
        calibration = samples.calibration_ms
        draft_prefill = samples.draft_prefill_ms
        groups.append(
            GroupRecord(
                num_requests=len(samples.sequence_tokens[batch]),
                prefill_ms=prefill.prefill_ms[batch],
                begin_ms=samples.begin_ms[batch],
                calibration_ms=None if calibration is None else calibration[batch],
                draft_prefill_ms=None if draft_prefill is None else draft_prefill[batch],
                num_steps=len(step_ms),
                step_ms=step_ms,
                step_forwards=None if not samples.num_forwards else samples.num_forwards[batch],
                step_max_gamma=gammas if has_drafts else None,
                step_rows=rows,
                draft_ms=taken(phases["draft_ms"], num_drafting),
                verify_ms=taken(phases["verify_ms"], num_drafting),
                decode_ms=taken(phases["decode_ms"], num_plain),
                bytes_read=samples.bytes_read[batch],
                draft_kv_tokens=samples.draft_kv_tokens[batch],
                draft_rows=samples.draft_rows[batch],
                peak_memory_bytes=samples.peak_memory_bytes[batch],
                threads=samples.threads[batch],
            )
        )
    return groups


def taken(times: Iterator[float], count: int) -> list[float]:
    """The next of these times; none if they were not measured."""
    return [ms for _, ms in zip(range(count), times, strict=False)]
