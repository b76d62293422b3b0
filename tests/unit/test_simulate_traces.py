"""scripts/dev/simulate_traces.py finds the times by which requests were made up, and a prompt takes
the sum of the steps in which it is prefilled."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from simulate_traces import Replay, StepTimes, prefill_fit, threads_of
from synthetic_records import PLAIN, served

from magicdec.records.pass_record import PassRecord, RequestRecord

ROOM = 512
EXACT = 1e-6  # of times of thousands of ms
PROMPTS = [(0, 300), (0, 1300), (256, 1400), (1024, 1100), (0, 2900)]  # found tokens and length


def invented_ms(begin: int, end: int) -> float:
    """A step takes 10 ms, and a token 0.5 ms and 0.001 ms for each token before it."""
    steps = -(-(end - begin) // ROOM)
    return 10 * steps + sum(0.5 + 0.001 * (place + 0.5) for place in range(begin, end))


def made_of(record: PassRecord, times: Callable[[int, int], float]) -> PassRecord:
    """One request after the other, with two tokens each, of which the second takes 7 ms."""
    requests = list[RequestRecord]()
    now = 0.0
    for number, (found, length) in enumerate(PROMPTS):
        first = now + times(found, length)
        requests.append(
            replace(
                record.requests[number],
                arrival_ms=now,
                joined_ms=[now],
                first_token_ms=first,
                finished_ms=first + 7,
                prompt_len=length,
                output_len=2,
                joined_prefix_tokens=[found],
                conversation=0,
                turn=number + 1,
            )
        )
        now = first + 7
    (group,) = record.groups
    config = record.config | {"workload": record.config["workload"] | {"prefill_tokens": None}}
    groups = [replace(group, num_requests=len(requests))]
    return replace(record, requests=requests, groups=groups, config=config)


def test_a_prompt_takes_the_sum_of_its_steps() -> None:
    record = made_of(served(PLAIN), invented_ms)
    fitted = prefill_fit([record], threads_of(record))
    assert list(fitted) == pytest.approx([10, 0.5, 0.001])
    replay = Replay(record, record.requests, StepTimes(np.array([7.0, 0.0, 0.0]), fitted))
    assert 1e3 * replay.run() == pytest.approx(record.requests[-1].finished_ms, rel=EXACT)
    for made, request in zip(replay.requests, record.requests, strict=True):
        assert 1e3 * (made.first_token_s or 0) == pytest.approx(request.first_token_ms, rel=EXACT)


def test_passes_with_other_threads_are_fitted_apart() -> None:
    slow = made_of(served(PLAIN), invented_ms)
    fast = made_of(slow, lambda begin, end: invented_ms(begin, end) / 2)
    fast = replace(fast, groups=[replace(fast.groups[0], threads=[9])])
    assert list(prefill_fit([slow, fast], (9,))) == pytest.approx([5, 0.25, 0.0005])
    with pytest.raises(ValueError, match="record `sequential` as well"):
        prefill_fit([slow], (9,))
