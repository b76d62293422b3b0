"""What the pipelined scheduler answers to single events, one after the other, without times."""

from typing import Any

import pytest

from magicdec.systems.pipeinfer.messages import (
    Action,
    Cancel,
    Candidate,
    Commit,
    DraftAction,
    JudgedRun,
    RunLaunch,
)
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler
from magicdec.systems.pipeinfer.sequence import Adjustment


def begun(eos: int = -1, **settings: Any) -> PipelinedScheduler:
    """Its only request has the prompt 1, and 2 as the first of 20 tokens: run 1 computes it."""
    scheduler = PipelinedScheduler(Options(**settings))
    scheduler.submit([1], 20, eos_ids=[eos])
    scheduler.result(0, [2])
    return scheduler


def propose(scheduler: PipelinedScheduler, candidate: Candidate) -> list[Action]:
    """The next draft step, and what the drafter gives."""
    (draft,) = scheduler.idle()
    assert isinstance(draft, DraftAction)
    return scheduler.drafted(draft.draft, candidate)


def test_runs_that_turn_out_to_be_right_go_on_and_wrong_ones_are_skipped() -> None:
    scheduler = PipelinedScheduler(Options(gamma=1))
    scheduler.submit([5], 9)
    scheduler.result(0, [6])  # run 1 is the token 6
    for token in (7, 8, 9):  # runs 2, 3 and 4
        (draft,) = scheduler.idle()
        assert isinstance(draft, DraftAction)
        scheduler.drafted(draft.draft, (token, 1.0))
    right = Commit(0, (7,), None, (JudgedRun(1, 1, position=2),))
    assert scheduler.result(1, [7]) == [right], "run 2 has the newest token already"
    assert [run.run for run in scheduler.in_flight] == [2, 3, 4]
    commit, cancel, launch = scheduler.result(2, [1])
    assert (commit, cancel) == (
        Commit(0, (1,), None, (JudgedRun(1, 0, position=3),), num_cancelled=1),
        Cancel((3, 4)),
    )
    assert isinstance(launch, RunLaunch) and launch.tokens == (1,)


def test_a_message_says_the_run() -> None:
    scheduler = begun(gamma=2)
    assert propose(scheduler, (10, 0.5)) == []
    assert scheduler.idle() == [DraftAction(1, 0, (10,))]
    (launch,) = scheduler.drafted(1, (20, 0.5))
    assert isinstance(launch, RunLaunch) and launch.is_speculative
    assert (launch.tokens, launch.first, launch.num_outputs) == ((10, 20), 2, 2)
    assert RunLaunch.from_words(launch.to_words()) == launch
    assert scheduler.idle() == [DraftAction(2, 0, (10, 20))], "it goes on behind what was launched"


def test_the_output_ends_at_eos_and_the_lane_goes_to_the_next_request() -> None:
    """Although the drafter went on behind the place where the target ends it."""
    scheduler = PipelinedScheduler(Options(gamma=4, lanes=1))
    scheduler.submit([1], 20, eos_ids=[9])
    other, actions = scheduler.submit([2, 3], 1)
    assert other == 1 and actions == []
    scheduler.result(0, [2])
    for token in (7, 6, 8, 5):
        scheduler.idle()
        actions = scheduler.drafted(scheduler._num_drafts - 1, (token, 1.0))
    assert [launch.tokens for launch in actions if isinstance(launch, RunLaunch)] == [(7, 6, 8, 5)]
    assert scheduler.result(1, [7]) == [Commit(0, (7,), None)]
    commit, prompt = scheduler.result(2, [9, 8, 5, 4])
    assert commit == Commit(0, (9,), "eos", (JudgedRun(4, 1, position=2),))
    assert isinstance(prompt, RunLaunch) and prompt.tokens == (2, 3) and prompt.lane == 0
    assert scheduler.result(3, [6]) == [Commit(1, (6,), "length")] and scheduler.is_over


def test_nothing_is_drafted_from_an_end_token_on() -> None:
    """It would be no input. If the target goes on, so does the drafter."""
    scheduler = begun(gamma=4, eos=9)
    assert propose(scheduler, (7, 1.0)) == []
    (launch,) = propose(scheduler, (9, 1.0))
    assert isinstance(launch, RunLaunch) and launch.tokens == (7,) and scheduler.idle() == []
    assert scheduler.result(1, [7]) == [Commit(0, (7,), None, (JudgedRun(1, 1, position=2),))]
    assert scheduler.idle() == []
    commit, again = scheduler.result(2, [8])
    assert commit == Commit(0, (8,), None) and isinstance(again, RunLaunch) and again.tokens == (8,)
    assert scheduler.idle() == [DraftAction(2, 0, ())]


def test_a_prompt_is_run_in_chunks_of_which_the_last_predicts() -> None:
    scheduler = PipelinedScheduler(Options(), prefill_chunk=2)
    _, launches = scheduler.submit([5, 6, 7, 8, 9], 4)
    assert all(isinstance(launch, RunLaunch) for launch in launches)
    assert [launch.tokens for launch in launches] == [(5, 6), (7, 8), (9,)]  # type: ignore[union-attr]
    assert [launch.num_outputs for launch in launches] == [0, 0, 1]  # type: ignore[union-attr]


def test_what_can_be_an_input_is_drafted_and_nothing_after_it() -> None:
    """The last of three output tokens is never an input."""
    scheduler = PipelinedScheduler(Options(gamma=8))
    scheduler.submit([1], 3)
    scheduler.result(0, [2])
    assert scheduler.idle() == [DraftAction(0, 0, ())]
    (launch,) = scheduler.drafted(0, (7, 0.9))
    assert isinstance(launch, RunLaunch) and launch.tokens == (7,) and scheduler.idle() == []


@pytest.mark.parametrize(("drafted", "launched"), [(7, (8,)), (9, None)])
def test_a_result_may_come_before_the_draft_of_its_token(
    drafted: int, launched: tuple[int, ...] | None
) -> None:
    """A right draft goes on behind the committed token; a wrong one is not launched any more."""
    scheduler = begun(gamma=2)
    scheduler.idle()
    assert isinstance(scheduler.result(1, [7])[-1], RunLaunch)
    assert scheduler.drafted(0, (drafted, 0.9)) == []
    assert scheduler.idle() == [DraftAction(1, 0, ())]
    actions = scheduler.drafted(1, (8, 0.9))
    assert [a.tokens for a in actions if isinstance(a, RunLaunch)] == (
        [launched] if launched else []
    )


def test_nothing_is_drafted_while_enough_runs_are_in_flight() -> None:
    scheduler = begun(gamma=1, max_in_flight=2)
    assert len(propose(scheduler, (7, 0.9))) == 1
    assert len(scheduler.in_flight) == 2 and scheduler.idle() == []
    scheduler.result(1, [7])
    assert len(scheduler.in_flight) == 1 and scheduler.idle() == [DraftAction(1, 0, ())]


def test_requests_take_turns_at_drafting() -> None:
    scheduler = PipelinedScheduler(Options(gamma=1, pa=0.0, lanes=2))
    asked = list[int]()
    for _ in range(2):
        scheduler.submit([1], 20)
    for run in range(2):
        scheduler.result(run, [2])
    for number in range(6):
        (draft,) = scheduler.idle()
        assert isinstance(draft, DraftAction) and draft.draft == number
        asked.append(draft.request)
        scheduler.drafted(number, (7, 0.9))
    assert sorted(asked[:2]) == [0, 1] and asked == asked[:2] * 3


def test_synchronous_speculation_runs_the_newest_token_with_its_drafts() -> None:
    scheduler = PipelinedScheduler(Options(mode="pipeline+draft", gamma=2))
    scheduler.submit([1], 20)
    assert scheduler.result(0, [2]) == [Commit(0, (2,), None)]
    for number, token in enumerate((7, 8)):
        assert isinstance(scheduler.idle()[0], DraftAction)
        actions = scheduler.drafted(number, (token, 0.9))
    (launch,) = actions
    assert isinstance(launch, RunLaunch) and launch.tokens == (2, 7, 8) and launch.num_outputs == 3
    assert scheduler.idle() == [], "its result decides what is drafted next"


def test_the_threshold_rises_with_each_microbatch_until_a_commit() -> None:
    scheduler = begun(gamma=1, pa=0.5, pr=0.2)
    for number, is_launched in enumerate((True, False, True)):  # the second needs 0.7
        assert isinstance(scheduler.idle()[0], DraftAction)
        assert bool(scheduler.drafted(number, (7, 0.6))) == is_launched
        if not is_launched:
            assert scheduler.counts.failed_attempts == 1 and scheduler.idle() == []
            scheduler.result(1, [7])


def test_thresholds_follow_the_formula() -> None:
    adjustment = Adjustment(Options(pa=0.5, pr=0.2, pd=0.05))
    adjustment.num_launched = 2
    assert adjustment.value == pytest.approx(0.4) and adjustment.may_draft
    adjustment.num_launched = 3
    assert not adjustment.may_draft, "only a commit begins anew"
    adjustment.rejects = 3
    assert adjustment.value == pytest.approx(3 * 0.2 - 3 * 0.05) and adjustment.may_draft


def test_an_unsure_draft_is_asked_again_only_if_the_threshold_falls() -> None:
    def attempts(options: Options) -> int:
        scheduler = PipelinedScheduler(options)
        scheduler.submit([1], 20)
        scheduler.result(0, [2])
        count = 0
        while (actions := scheduler.idle()) and count < 10:
            (draft,) = actions
            assert isinstance(draft, DraftAction)
            count += 1
            if scheduler.drafted(draft.draft, (10, 0.42)):
                return count
        return -count

    assert attempts(Options(gamma=1)) == -1
    assert attempts(Options(gamma=1, pd=0.05)) == 3
    assert attempts(Options(gamma=1, pa=0.4)) == 1


def test_results_come_home_in_order() -> None:
    scheduler = PipelinedScheduler(Options())
    scheduler.submit([1, 2, 3], 4)
    with pytest.raises(AssertionError, match="run 0 is the oldest"):
        scheduler.result(1, [5])
