"""Passes that contradict themselves are refused with the names and values; those of a run by hand
are not."""

from __future__ import annotations

import pytest
from identities import check_record
from synthetic_records import Batch, command_of, with_fields

from magicdec.records.pass_record import PassRecord


def speculation() -> list[Batch]:
    """Two batches of two rows. In the first, row 1 ends after a step without drafts, and row 0
    after two more tokens of three; in the second, both rows end at once."""
    return [
        Batch(
            rows=[[(2, 2, 3), (0, 0, 1), (2, 2, 2)], [(2, 0, 1), (0, 0, 1)]],
            step_ms=[20.0, 10.0, 16.0],
            begin_ms=5.0,
            calibration_ms=40.0,
            prefill_ms=300.0,
            ttft_ms=[100.0, 299.0],
            ends_ms=[46.5, 30.1],
            draft_ms=[4.0, 4.0],
            verify_ms=[15.0, 11.0],
            decode_ms=[9.0],
            threads=[2, 1],
        ),
        Batch(
            rows=[[(2, 1, 2), (2, 2, 3)], [(2, 1, 2), (2, 0, 1)]],
            step_ms=[30.0, 30.0],
            begin_ms=7.0,
            calibration_ms=0.0,
            prefill_ms=310.0,
            ttft_ms=[150.0, 310.0],
            draft_ms=[6.0, 6.0],
            verify_ms=[20.0, 20.0],
            threads=[2, 1],
        ),
    ]


def baseline() -> list[Batch]:
    """The same tokens, one a step."""
    return [
        Batch(
            rows=[[(0, 0, 1)] * 6, [(0, 0, 1)] * 2],
            step_ms=[15.0] * 6,
            prefill_ms=300.0,
            ttft_ms=[100.0, 299.0],
            decode_ms=[14.0] * 6,
            threads=[2, 1],
        ),
        Batch(
            rows=[[(0, 0, 1)] * 5, [(0, 0, 1)] * 3],
            step_ms=[20.0] * 5,
            prefill_ms=310.0,
            ttft_ms=[150.0, 310.0],
            ends_ms=[100.2, 60.1],
            decode_ms=[14.0] * 5,
            threads=[2, 1],
        ),
    ]


def make_run() -> tuple[PassRecord, PassRecord]:
    base, ours = command_of(speculation(), baseline=baseline())
    return ours, base


def test_consistent_passes_are_those_of_a_run() -> None:
    """Also where nothing was emitted after the first tokens of a batch."""
    for record in make_run():
        check_record(record)
    empty = Batch(rows=[[], []], step_ms=[], prefill_ms=310.0, ttft_ms=[150.0, 310.0])
    first = speculation()[0], baseline()[0]
    threads = {"threads": [2, 1]}
    empty = Batch(**(vars(empty) | threads))
    base, ours = command_of([first[0], empty], baseline=[first[1], empty])
    check_record(ours)
    check_record(base)


# The pass, the place of a value, another value, and what is said then.
FAULTS = {
    "a step's time is halved where it drafts": (
        "ours",
        {"groups__0__step_ms__0": 10.0},
        "step 0: the time of its phases",
    ),
    "the clock of requests starts late": (
        "ours",
        {"requests__2__finished_ms": 376.4},
        "its finished_ms",
    ),
    "all requests have the TTFT of the first": (
        "ours",
        {"requests__1__first_token_ms": 100.0},
        "does not rise",
    ),
    "a TTFT after the end of prefill": (
        "ours",
        {"requests__1__first_token_ms": 301.0},
        "the last TTFT",
    ),
    "a token is counted that no step emitted": (
        "ours",
        {"requests__3__output_len": 5, "requests__2__output_len": 4},
        "emitted tokens is 5",
    ),
    "more is accepted than was drafted": (
        "ours",
        {"requests__2__per_step_accepted__0": 3},
        "drafted 2, accepted 3",
    ),
    "more is emitted than was accepted": (
        "ours",
        {"requests__1__per_step_emitted__0": 2},
        "accepted 0, emitted 2",
    ),
    "an accepted token is lost": (
        "ours",
        {"requests__0__per_step_emitted__0": 2},
        "accepted 2, emitted 2",
    ),
    "more is drafted than by the row with the most": (
        "ours",
        {"requests__0__per_step_drafted__0": 3},
        "gamma 2, drafted 3",
    ),
    "a row is missing from a step": ("base", {"groups__0__step_rows__3": 0}, "running requests"),
    "a step is not counted as drafting": (
        "ours",
        {"groups__1__step_max_gamma__0": 0},
        "times in draft_ms is 2",
    ),
    "a step is not counted": ("base", {"groups__0__step_rows": [2, 2, 1, 1, 1]}, "step_rows is 5"),
    "a phase is missing": ("ours", {"groups__1__draft_ms": [6.0]}, "times in draft_ms"),
    "calibration is counted twice": ("ours", {"groups__0__begin_ms": -35.0}, "begin_ms is -35.0"),
    "a verification is missing": (
        "ours",
        {
            "requests__2__per_step_drafted": [2],
            "requests__2__per_step_accepted": [1],
            "requests__2__per_step_emitted": [2],
            "requests__2__per_step_context": None,
        },
        "rows is 2, but running requests is 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_pass_is_refused(fault: str) -> None:
    ours, base = make_run()
    name, values, message = FAULTS[fault]
    record = with_fields({"ours": ours, "base": base}[name], **values)
    with pytest.raises(AssertionError, match=message):
        check_record(record)
