"""The two parts of the verdict by hand and by simulation: steps that are judged again from their
logits, and limits of the errors of forwards."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from magicdec.bench.check.forwards import (
    ALARM,
    ALLOWED,
    Errors,
    PairedLogits,
    chosen,
    judge_errors,
    pairs_of,
)
from magicdec.bench.check.judgement import ends_elsewhere, first_wrong, judge_again, walks
from magicdec.bench.check.passes import Checked, combined
from magicdec.bench.recording import status_of
from magicdec.distributed.groups import Group
from magicdec.records.correctness import Correctness, ForwardErrors, JudgedAgain
from magicdec.records.record import Status
from magicdec.runner.request import Request, SamplingParams
from magicdec.runner.sampling.verification import Verdicts
from magicdec.speculation.steps.logits_recorder import KeptStep, LogitsRecorder

SIZE = 8  # of the vocabulary
RUNNER: Any = SimpleNamespace(
    vocab_places=[(0, SIZE)], group=Group((0,), 0), device=torch.device("cpu")
)


def request_of(output: Sequence[int], length: int | None = None, **params: Any) -> Request:
    sampling = SamplingParams(length or len(output), **params)
    return Request(3, (1, 2), sampling, output_ids=list(output), row=0)


def logits_for(tokens: Sequence[int], second: Sequence[int] = (), gap: float = 0.001) -> Tensor:
    """[1, T, V]: the largest are those of `tokens`, and others by a gap smaller."""
    logits = torch.zeros(1, len(tokens), SIZE)
    for place, token in enumerate(tokens):
        logits[0, place, token] = 1.0
    for place, token in enumerate(second):
        logits[0, place, token] = 1.0 - gap
    return logits


def step_of(
    request: Request,
    verdict: Sequence[int],
    logits: Tensor,
    drafts: Sequence[int],
    num_output: int = 1,
    count: int | None = None,
) -> KeptStep:
    count = len(drafts) if count is None else count
    ids = torch.tensor([list(drafts)]).long()
    accepted, *decided = verdict
    told = Verdicts([accepted], [decided])
    return KeptStep((request,), (num_output,), told, logits, ids, (count,))


def judged(step: KeptStep) -> JudgedAgain:
    recorder = LogitsRecorder((0,), 1.0, None, [step], 1)  # type: ignore[arg-type]
    return judge_again(recorder, step.requests, RUNNER)


# The request has emitted 5; drafts 4, 3, 6 are proposed, and the target says 4, 3, 7, 1.
RIGHT = [2, 4, 3, 7, 1]


def test_a_step_is_judged_by_its_logits_alone() -> None:
    logits = logits_for([4, 3, 7, 1])
    drafts = [4, 3, 6]
    right = judged(step_of(request_of([5, 4, 3, 7]), RIGHT, logits, drafts))
    assert (right.num_wrong, right.num_tokens, right.first_wrong) == (0, 3, None)
    # A draft that is second by very little is accepted, in what was decided and in the output.
    near = logits_for([4, 3, 7, 1], [0, 0, 6])
    found = judged(step_of(request_of([5, 4, 3, 6, 1]), [3, 4, 3, 6, 1], near, drafts))
    assert found.num_wrong == 1 and found.first_wrong is not None
    first = found.first_wrong
    assert (first.sequence, first.index, first.expected, first.found) == (3, 3, 7, 6)
    # Too few or too many are accepted, and what the request has got is not what was decided.
    assert judged(step_of(request_of([5, 4, 3]), [1, 4, 3], logits, drafts)).num_wrong == 1
    assert judged(step_of(request_of([5, 4, 3, 7, 1]), [3, 4, 3, 7, 1], logits, drafts)).num_wrong
    assert judged(step_of(request_of([5, 4, 3, 6]), RIGHT, logits, drafts)).num_wrong == 1
    # Padding is no draft, and a request may end within a step.
    short = step_of(request_of([5, 4, 3]), [1, 4, 3], logits, drafts, count=1)
    assert judged(short).num_wrong == 0
    assert judged(step_of(request_of([5, 4]), RIGHT, logits, drafts)).num_wrong == 0
    assert judged(step_of(request_of([5, 4], 9), RIGHT, logits, drafts)).num_wrong > 0


def test_a_request_ends_where_its_end_tokens_and_its_length_say() -> None:
    assert ends_elsewhere(request_of([5, 4, 3])) == []
    assert ends_elsewhere(request_of([5, 4], 9, eos_token_ids=(4,))) == []
    (late,) = ends_elsewhere(request_of([5, 4, 3], 9, eos_token_ids=(4,)))
    assert (late.index, late.expected, late.found) == (2, None, 3)
    (late,) = ends_elsewhere(request_of([5, 4, 3], 3, eos_token_ids=(4,)))
    assert (late.index, late.expected, late.found) == (2, None, 3)
    (early,) = ends_elsewhere(request_of([5, 4, 3], 9))
    assert early.index == 3 and early.found is None


def test_penalties_are_applied_again() -> None:
    """Token 4 is the largest, but was emitted; after it, 3 is no longer the largest either."""
    logits = logits_for([4, 3, 3], [3, 6, 6], gap=0.3)
    request = request_of([4, 3, 6], presence_penalty=0.5)
    step = step_of(request, [1, 3, 6], logits, [3, 1])
    assert [walk.tokens for walk in walks(step, RUNNER)] == [[3, 6]]
    repeated = request_of([4, 3, 6], repetition_penalty=2.0)
    assert [w.tokens for w in walks(replace(step, requests=(repeated,)), RUNNER)] == [[3, 6]]


def pass_of(output: Sequence[int], width: int) -> tuple[LogitsRecorder, list[Request]]:
    """A pass in steps of `width` tokens, of whose logits after token i each is i."""
    request = request_of(output)
    steps = []
    for at in range(1, len(output), width):
        tokens = list(output[at : at + width])
        logits = logits_for(tokens)
        logits[0, :, 0] = -torch.arange(at - 1.0, at - 1 + len(tokens))
        verdict = [len(tokens) - 1, *tokens]
        steps.append(step_of(request, verdict, logits, tokens[:-1], num_output=at))
    return LogitsRecorder((0,), 1.0, None, steps), [request]  # type: ignore[arg-type]


def test_logits_are_compared_after_the_same_text_alone() -> None:
    ours = pass_of([5, 4, 3, 7, 1, 2, 6], 1)
    theirs = pass_of([5, 4, 3, 7, 2, 2, 6], 2)
    pairs = list(pairs_of(ours, theirs, RUNNER))
    assert [pair.index for pair in pairs] == [0, 1, 2, 3]
    assert all(pair.decode[0] == pair.verify[0] == -pair.index for pair in pairs)
    theirs[1][0].prompt_ids = (1, 3)  # a turn behind another answer, which is answered alike
    assert list(pairs_of(ours, theirs, RUNNER)) == []


def test_rows_are_measured_of_which_logits_were_kept_late_alone() -> None:
    """Where steps are drawn, the first that both passes kept may be behind many tokens."""
    request = request_of([1] * 5000)
    late = [PairedLogits(0, index, *torch.zeros(2, SIZE)) for index in (4000, 4001, 4500)]
    assert [pair.index for pair in chosen(late, [request], 1)] == [4000]
    early = [PairedLogits(0, 3, *torch.zeros(2, SIZE)), *late]
    assert [pair.index for pair in chosen(early, [request], 1)] == [3]


def simulated(
    generator: torch.Generator, num_rows: int, length: int, added: float = 0.0, factor: float = 1.0
) -> Errors:
    """Errors of 0.02 logits at the median, like those of the demo model in bfloat16, of which
    neighbours have half in common, and some are far from the others; noise of `added` logits on
    verifications."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rare(*shape: int) -> Tensor:
        """Student's t of 8 degrees of freedom."""
        return normal(*shape) / normal(*shape, 8).square().mean(dim=-1).sqrt()

    def spread() -> Tensor:
        common = rare(num_rows, -(-length // 4), 1).expand(-1, -1, 4).flatten(1)[:, :length]
        return 0.13 * (common + rare(num_rows, length))

    level = 0.3 * normal(num_rows, length)
    decode, verify = (0.02 * (level + spread()).exp() for _ in "dv")
    verify = ((factor * verify).square() + added**2).sqrt()
    gap = normal(num_rows, length).abs() * 3
    wider_gap = gap + 0.03 * normal(num_rows, length)
    moved = gap + 0.03 * normal(num_rows, length) * 2**0.5
    places = [row for row in range(num_rows) for _ in range(length)]
    flat = [values.flatten() for values in (decode, verify, moved < 0, gap, wider_gap)]
    return Errors(places, flat[0], flat[1], flat[2].double(), flat[3], flat[4])


def count_alarms(num_runs: int, **kind: Any) -> tuple[int, list[ForwardErrors]]:
    generator = torch.Generator().manual_seed(0)
    found = [
        judge_errors(simulated(generator, 4, 63, **kind), 252, 252, 1.25) for _ in range(num_runs)
    ]
    return sum(bool(verdict.alarms) for verdict in found), found


def test_honest_forwards_exceed_the_limits_once_in_a_thousand_runs() -> None:
    """Also those whose errors are as much larger as is allowed. Of 400 runs, more than
    3 give an alarm with a probability of 0.0008. Twice as many alarms as allowed would not show
    here, but a limit that forgets chance does."""
    alarms, found = count_alarms(150)
    at_most, _ = count_alarms(250, factor=1.25)
    assert alarms + at_most <= 3 and ALARM == 1e-3
    expected = [verdict.expected_changed for verdict in found]
    changed = [verdict.num_changed for verdict in found]
    assert None not in expected and None not in changed
    # Predicted from the errors of the decode steps alone, and never much too small.
    ratio = sum(e for e in expected if e) / sum(c for c in changed if c)
    assert 0.9 < ratio < 1.6


def test_errors_as_large_as_the_verdict_says_would_have_been_seen() -> None:
    _, honest = count_alarms(50)
    hidden = [verdict.hidden_error for verdict in honest if verdict.hidden_error is not None]
    assert len(hidden) == 50 and max(hidden) < 0.03
    seen, _ = count_alarms(200, added=max(hidden))
    assert seen >= 196
    unseen, _ = count_alarms(50, added=min(hidden) / 3)
    assert unseen < 25, "the bound is not far above what can be seen"


def test_one_position_far_off_is_an_alarm() -> None:
    errors = simulated(torch.Generator().manual_seed(1), 4, 63)
    errors.verify[100] *= 60
    found = judge_errors(errors, 252, 252, 1.25)
    assert found.alarms == ["largest_error_ratio"]


def test_more_changes_than_rounding_makes_are_an_alarm() -> None:
    errors = simulated(torch.Generator().manual_seed(1), 4, 63)
    errors.is_changed[errors.gap.argsort()[50:60]] = 1
    assert judge_errors(errors, 252, 252, 1.25).alarms == ["num_changed"]


# By how much errors of honest kernels differ, and faults that are a little larger.
TOLERANCES = {"float32": 3.0, "bfloat16": 1.25}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_errors_beyond_what_is_allowed_fire(dtype: str) -> None:
    """By hand: every position's errors have the same ratio, so that their spread is 0 and the limit
    what the dtype allows. And the power, by simulation: half as much again as is allowed."""
    most = TOLERANCES[dtype]
    errors = simulated(torch.Generator().manual_seed(1), 4, 63)

    def judge(factor: float) -> ForwardErrors:
        alike = replace(errors, verify=factor * errors.decode)
        return judge_errors(alike, 252, 252, ALLOWED[dtype])

    within = judge(0.99 * most)
    beyond = judge(1.01 * most)
    assert within.alarms == [] and within.most_error_ratio == pytest.approx(most)
    assert "error_ratio" in beyond.alarms
    generator = torch.Generator().manual_seed(2)
    found = [
        judge_errors(simulated(generator, 4, 63, factor=1.5 * most), 252, 252, ALLOWED[dtype])
        for _ in range(60)
    ]
    assert sum("error_ratio" in verdict.alarms for verdict in found) >= 59
    assert ALLOWED == TOLERANCES


def test_limits_and_what_could_hide_by_hand() -> None:
    """Forty blocks of 8 positions, in each of which all ratios are one of five, so that the spread
    of the blocks' means and of the smaller half of the ratios are known. Quantiles of Student's t
    are from a table: of 39 degrees of freedom at 1 - 1/3000 and 0.99, of 8 at 1 - 1/3000/320."""
    values = [-0.2, -0.1, 0.0, 0.1, 0.2]
    ratios = torch.tensor(values * 8, dtype=torch.float64).repeat_interleave(8)
    decode = torch.full((320,), 0.02, dtype=torch.float64)
    gaps = torch.full((320,), 1.0, dtype=torch.float64)
    errors = Errors([0] * 320, decode, decode * ratios.exp(), 0 * gaps, gaps, gaps)
    found = judge_errors(errors, 320, 320, 1.25)
    mean_error = math.sqrt(8 * sum(value**2 for value in values) / 39) / math.sqrt(40)
    limit = math.log(1.25) + 3.69851 * mean_error
    assert found.most_error_ratio == pytest.approx(math.exp(limit), rel=1e-4)
    largest = math.log(1.25) + 0.94 * 12.04518 * math.sqrt((0.2**2 + 0.1**2) / 3)
    assert found.most_largest_error_ratio == pytest.approx(math.exp(largest), rel=1e-4)
    seen = limit + 2.42584 * mean_error  # in 99 of 100 runs
    hidden = 0.02 * math.sqrt(math.exp(seen) ** 2 - 1)  # squares of independent errors add up
    assert found.hidden_error == pytest.approx(hidden, rel=1e-4)


def test_changes_that_rounding_makes_by_hand() -> None:
    """Gaps of 0.15 that are alternately wrong by 0.1 to either side: of the moves between two of 32
    positions, 8 of 15 are of 0.2, and half of these to the smaller side. The limit is from a table
    of the binomial distribution."""
    size = 32
    gap = torch.full((size,), 0.15, dtype=torch.float64)
    wrong = torch.tensor([0.1, -0.1] * (size // 2), dtype=torch.float64)
    decode = torch.full((size,), 0.02, dtype=torch.float64)
    found = judge_errors(
        Errors([0] * size, decode, decode, 0 * gap, gap, gap - wrong), 32, 32, 1.25
    )
    chance = 8 * size / (15 * size + 1) / 2
    assert found.expected_changed == pytest.approx(size * chance)
    assert found.most_num_changed == 18
    for count, alarms in ((18, []), (19, ["num_changed"])):
        changed = (torch.arange(size) < count).double()
        again = judge_errors(Errors([0] * size, decode, decode, changed, gap, gap - wrong), 9, 9, 9)
        assert again.alarms == alarms


def test_few_positions_have_a_wide_limit_alone() -> None:
    """Of their mean, since how far they spread is not known; and of fewer than four positions
    none. Honest forwards stay below it, also those whose errors are as much larger as is
    allowed, and eight times as large errors do not."""
    generator = torch.Generator().manual_seed(1)
    for length in (4, 8, 15) * 60:
        honest = judge_errors(simulated(generator, 1, length, factor=1.25), length, length, 1.25)
        assert honest.most_error_ratio == pytest.approx(2.5) and honest.alarms == []
        assert honest.hidden_error is honest.most_largest_error_ratio is None
        wrong = judge_errors(simulated(generator, 1, length, factor=8.0), length, length, 1.25)
        assert wrong.alarms == ["error_ratio"]
    found = judge_errors(simulated(generator, 1, 3), 3, 3, 1.25)
    assert found.most_error_ratio is None and found.alarms == []


@pytest.mark.parametrize("part", ["judged_again", "forwards"])
def test_a_part_of_the_check_that_is_bad_makes_the_pass_a_mismatch(part: str) -> None:
    fine = Correctness("static", True, 10, num_excused=0, num_diverged=0)
    right = JudgedAgain(4, 4, 10, 0)
    equal = ForwardErrors(9, 0)
    fine = replace(fine, judged_again=right, forwards=equal)
    assert status_of(0, fine, "float32") == Status.VERIFIED
    wrong = {"judged_again": replace(right, num_wrong=1)}
    wrong |= {"forwards": replace(equal, error_ratio=2.0, most_error_ratio=1.3)}  # type: ignore[dict-item]
    bad = replace(fine, **{part: wrong[part]})
    assert status_of(0, bad, "float32") == Status.MISMATCH


def test_a_witness_keeps_what_there_is_room_for() -> None:
    def runner_of(vocab: int) -> Any:
        model = SimpleNamespace(head_rows=(0, vocab))
        return SimpleNamespace(model=model, cache=SimpleNamespace(k=torch.zeros(1)))

    every = LogitsRecorder.of(runner_of(2048), 4, 4, 64, "1", 4)
    assert every.rows == (0, 1, 2, 3) and every.share == 1
    some = LogitsRecorder.of(runner_of(128_000), 4, 4, 64, "1", 4)
    assert len(some.rows) == 3 and 0 < some.share < 0.2
    plain = LogitsRecorder.of(runner_of(128_000), 4, 0, 64, "1", 4)
    assert plain.rows == some.rows and plain.share == pytest.approx(5 * some.share)
    assert every.wants([0, 1]) == [], "not before it watches"
    every.is_watching = True
    assert every.wants([2, 7]) == [0] and every.wants([8]) == [] and every.num_seen == 1
    every.num_bytes = 1 << 27
    assert every.wants([2]) == [] and every.num_seen == 2


def test_the_first_wrong_token_is_where_both_differ() -> None:
    request = request_of([5, 4, 3, 7])
    step = step_of(request, RIGHT, logits_for([4, 3, 7, 1]), [4, 3, 6])
    (walk,) = walks(step, RUNNER)
    assert first_wrong(step, walk) == []
    ended = replace(step, verdicts=Verdicts([0], [[4]]))
    (wrong,) = first_wrong(ended, walk)
    assert (wrong.index, wrong.expected, wrong.found) == (2, 3, None)


UNCOMPARED = Correctness(num_tokens=10)
TIES = Correctness("static", False, 10, num_excused=2, num_diverged=0)
UNJUDGED = Correctness("static", False, 10)
DIVERGED = Correctness("static", False, 10, num_excused=0, num_diverged=1)
SAME = Correctness("static", True, 10, num_excused=0, num_diverged=0)
# What one group of requests gives alone, from right to wrong, and its status.
GROUPS = [
    ((0, SAME), Status.VERIFIED),
    ((2, TIES), Status.VERIFIED_WITH_TIES),
    ((None, UNCOMPARED), Status.UNVERIFIED),
    ((1, UNJUDGED), Status.UNVERIFIED),
    ((1, DIVERGED), Status.MISMATCH),
]
PAIRS = [(first, second) for first in range(len(GROUPS)) for second in range(len(GROUPS))]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_groups_together_are_as_bad_as_the_worst(first: int, second: int) -> None:
    checks = [Checked(*GROUPS[number][0]) for number in (first, second)]
    expected = GROUPS[max(first, second)][1]
    together = combined(checks)
    found = together.correctness
    assert status_of(together.num_differing, found, "bfloat16") == expected
    assert found.num_tokens == 20
    counts = [check.num_differing for check in checks]
    has_all = all(count is not None for count in counts)
    assert together.num_differing == (sum(count or 0 for count in counts) if has_all else None)
    judged = [check.correctness for check in checks]
    if found.num_diverged is not None:
        assert found.num_diverged == sum(verdict.num_diverged or 0 for verdict in judged)
        assert found.num_excused == sum(verdict.num_excused or 0 for verdict in judged)
    assert found.identical is (
        False
        if any(verdict.identical is False for verdict in judged)
        else (None if UNCOMPARED in judged else True)
    )
    # A difference that nothing could judge is a wrong token where every pass has the same ones.
    is_unjudged = UNJUDGED in judged and DIVERGED not in judged
    exact = Status.MISMATCH if is_unjudged else expected
    assert status_of(together.num_differing, found, "float32") == exact
    assert status_of(together.num_differing, found, "float32", is_external=True) == expected


def test_an_alarm_or_a_wrong_step_of_one_group_is_that_of_all() -> None:
    calm = ForwardErrors(9, 0)
    alarm = replace(calm, error_ratio=2.0, most_error_ratio=1.3)
    right = JudgedAgain(4, 4, 10, 0)
    fine = replace(SAME, forwards=calm, judged_again=right)
    alarmed = replace(fine, forwards=alarm)
    misjudged = replace(fine, judged_again=replace(right, num_wrong=1))
    for bad in (alarmed, misjudged):
        for order in ([fine, bad], [bad, fine]):
            together = combined([Checked(0, found) for found in order])
            assert status_of(0, together.correctness, "float32") == Status.MISMATCH
