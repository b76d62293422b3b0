"""Samples that contradict each other are refused with the names and values; those of a run by hand
are not."""

from __future__ import annotations

import pytest
from identities import check_run
from synthetic_samples import pass_samples

from magicdec.records.samples import PassSamples, PrefillSamples


def speculation() -> PassSamples:
    """Two batches of two rows. In the first, row 1 ends after a step without drafts, and row 0
    after two more tokens of three; in the second, both rows end at once."""
    return pass_samples(
        begin_ms=[5.0, 7.0],
        calibration_ms=[40.0, 0.0],
        warmup_calibration_ms=60.0,
        step_ms=[[20.0, 10.0, 16.0], [30.0, 30.0]],
        padded_gamma=[[2, 0, 2], [2, 2]],
        num_accepted=[[[2, 0], [], [2]], [[1, 1], [2, 0]]],
        num_emitted=[[[3, 1], [1, 1], [2]], [[2, 2], [3, 1]]],
        sequence_tokens=[[6, 2], [5, 3]],
        sequence_ms=[[46.5, 30.1], [60.0, 60.0]],
        draft_ms=[4.0, 4.0, 6.0, 6.0],
        verify_ms=[15.0, 11.0, 20.0, 20.0],
        decode_ms=[9.0],
        bytes_read=[[10**6, 10**6], [2 * 10**6, 10**6]],
        peak_memory_bytes=[[7, 8], [9, 10]],
        threads=[[2, 1], [2, 1]],
    )


def baseline() -> PassSamples:
    """The same tokens, one a step."""
    return pass_samples(
        begin_ms=[0.0, 0.0],
        step_ms=[[15.0] * 6, [20.0] * 5],
        padded_gamma=[[0] * 6, [0] * 5],
        num_accepted=[[[]] * 6, [[]] * 5],
        num_emitted=[[[1, 1]] * 2 + [[1]] * 4, [[1, 1]] * 3 + [[1]] * 2],
        sequence_tokens=[[6, 2], [5, 3]],
        sequence_ms=[[90.0, 30.0], [100.2, 60.1]],
        decode_ms=[14.0] * 11,
        bytes_read=[[10**7], [10**7]],
        peak_memory_bytes=[[7], [8]],
        threads=[[2, 1], [2, 1]],
    )


def make_run() -> tuple[PassSamples, PassSamples, PrefillSamples]:
    prefill = PrefillSamples(
        prefill_ms=[300.0, 310.0], ttft_ms=[[100.0, 299.0], [150.0, 310.0]], num_tokens=[80, 80]
    )
    return speculation(), baseline(), prefill


def test_consistent_samples_are_those_of_a_run() -> None:
    """Also where nothing was emitted after the first tokens of a batch."""
    ours, base, prefill = make_run()
    check_run({"autoregressive": base, "speculative": ours}, prefill)
    for samples in (ours, base):
        for key in ("step_ms", "padded_gamma", "num_accepted", "num_emitted"):
            getattr(samples, key)[1] = []
        samples.sequence_tokens[1] = [0, 0]
        samples.sequence_ms[1] = [0.0, 0.0]
    del ours.draft_ms[2:], ours.verify_ms[2:], base.decode_ms[6:]
    check_run({"autoregressive": base, "speculative": ours}, prefill)


# A statement that changes the samples `ours`, `base` or `prefill`, and what is said then.
FAULTS = {
    "a step's time is halved where it drafts": (
        "ours.step_ms[0][0] = 10.0",
        "step 0: the time of its phases",
    ),
    "the clock of sequences starts late": ("ours.sequence_ms[1] = [59.5, 59.5]", "its sequence_ms"),
    "all sequences have the TTFT of the first": (
        "prefill.ttft_ms[0] = [100.0, 100.0]",
        "does not rise",
    ),
    "a TTFT after the end of prefill": ("prefill.ttft_ms[0] = [100.0, 301.0]", "the last TTFT"),
    "a token is counted that no step emitted": (
        "ours.sequence_tokens[1] = [6, 3]",
        "1 \\+ num_accepted|its tokens",
    ),
    "more is accepted than was drafted": (
        "ours.num_accepted[1][0] = [3, 1]",
        r"padded_gamma 2, num_accepted \[3, 1\]",
    ),
    "more is emitted than was accepted": ("ours.num_emitted[0][0] = [3, 2]", "num_emitted"),
    "an accepted token is lost": ("ours.num_emitted[0][0] = [2, 1]", "num_emitted"),
    "a row is missing from a step": ("base.num_emitted[0][3] = []", "running sequences"),
    "a step is not counted as drafting": ("ours.padded_gamma[1][0] = 0", "padded_gamma 0"),
    "a phase is missing": ("ours.draft_ms.pop()", "times in draft_ms"),
    "calibration is counted twice": ("ours.begin_ms[0] = -35.0", "begin_ms is -35.0"),
    "a batch is missing": ("ours.begin_ms.pop()", "numbers of batches differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_samples_is_refused(fault: str) -> None:
    ours, base, prefill = make_run()
    statement, message = FAULTS[fault]
    exec(statement, {"ours": ours, "base": base, "prefill": prefill})
    with pytest.raises(AssertionError, match=message):
        check_run({"autoregressive": base, "speculative": ours}, prefill)
