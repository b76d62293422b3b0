"""The pipelined scheduler on simulated stages: it emits what plain decoding emits, whatever the
times are, and never reads a cell of a run that was skipped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from checked_cells import VOCABULARY, CheckedModels, generate

from magicdec.pipelined_speculation.messages import Cancel, Commit, Draft, Launch, Stop
from magicdec.pipelined_speculation.options import Adjustment, Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.pipelined_speculation.sequence import Sequence
from magicdec.pipelined_speculation.token_tree import Run, TokenTree
from magicdec.simulator.machine import Machine
from magicdec.simulator.simulation import Simulation, Trace

ACCEPTANCE = (0.0, 0.3, 0.7, 1.0)
PROBABILITIES = (0.6, 0.3, 0.25, 0.15)
BLOCK = 250  # schedules of a test; the wide tier has 20 such tests
WIDE = [pytest.param(block, marks=pytest.mark.wide) for block in range(1, 20)]


def random_options(chooser: random.Random) -> Options:
    choose = chooser.choice
    return Options(
        mode=choose(["async", "async", "async", "async", "sync", "iterative"]),
        pa=choose([0, 0.3, 0.5]),
        ps=choose([0.05, 0.2]),
        pr=choose([0, 0, 0.1, 0.4]),
        pd=choose([0, 0, 0.05]),
        draft=chooser.randint(1, 5),
        np=choose([1, 1, 2, 3, 4]),
        recovery=choose(["acceptance", "attempt"]),
        relaunch=choose([True, False]),
        max_in_flight=choose([None, None, 2, 5]),
        lanes=chooser.randint(1, 3),
    )


def random_machine(chooser: random.Random) -> Machine:
    choose = chooser.choice
    stages = tuple(choose([0.1, 1, 1, 2, 5]) for _ in range(chooser.randint(1, 5)))
    return Machine(
        stages,
        layers=chooser.randint(1, 4),
        link_s=choose([0, 0.1, 2]),
        draft_s=choose([0.05, 0.3, 1.5]),
        row_cost=choose([0, 0.3]),
        bytes_per_s=choose([None, 20_000]),
    )


def run_random(seed: int) -> None:
    """One random schedule: the output of every request is what the target writes alone."""
    chooser = random.Random(seed)
    options, machine = random_options(chooser), random_machine(chooser)
    num_requests = chooser.choice([1, 1, 2, 4])
    prompts = [
        [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 4))]
        for _ in range(num_requests)
    ]
    eos, length = chooser.choice([-1, 3]), chooser.randint(1, 16)
    scheduler = PipelinedScheduler(options, prefill_chunk=chooser.choice([None, 2]))
    shown = PROBABILITIES[: options.np]
    acceptance = ACCEPTANCE[seed % 4]
    cancelled = set[int]()
    models = CheckedModels(prompts, machine, acceptance, shown, cancelled, seed)
    delays = random.Random(seed + 1)
    simulation = Simulation(
        machine,
        scheduler,
        models,
        cancel_delay=lambda _: [delays.choice([0, 0.1, 1, 9]) for _ in machine.stage_s],
    )
    simulation.trace.cancelled = cancelled
    trace = simulation.run(prompts, length, eos)
    for request, prompt in enumerate(prompts):
        assert trace.outputs[request] == generate(prompt, length, eos), f"seed {seed}"
    assert not scheduler.in_flight and not scheduler._sequences


@pytest.mark.parametrize("block", [0, *WIDE])
def test_every_schedule_emits_what_plain_decoding_emits(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        run_random(seed)


@pytest.mark.parametrize("seed", [1615, 2099, 3346])
def test_a_newest_token_without_a_cell_leaves_none_taken(seed: int) -> None:
    """No cell is left for launching the newest token once more: the path that only this second
    node would have read gives its cells back."""
    run_random(seed)


def first_failure(seeds: range) -> str | None:
    for seed in seeds:
        try:
            run_random(seed)
        except AssertionError as error:
            return str(error)
    return None


def skip_what_is_known(self: Sequence) -> set[Run]:
    """The original's rule: a run is needed only while one of its own rows can tell something."""
    return {node.run for node in self.tree.below() if node.run is not None}


def test_skipping_a_run_that_a_live_run_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "needed_runs", skip_what_is_known)
    assert "read a cell that it must not" in (first_failure(range(BLOCK)) or "")


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (TokenTree, "above", lambda self: set()),  # cells that live rows read are given away
        (Sequence, "_go_home", lambda self, node: None),  # the path is not moved to its cells
    ],
)
def test_a_wrong_cell_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: object
) -> None:
    monkeypatch.setattr(owner, name, planted)
    assert first_failure(range(BLOCK)) is not None


def test_a_run_that_a_live_run_reads_is_not_skipped() -> None:
    """The original skips run 2 here, which is known to be right, and run 3 reads what stages that
    skipped it have not written."""
    scheduler = PipelinedScheduler(Options(draft=1, relaunch=True))
    scheduler.submit([5], 9)
    scheduler.result(0, [6])  # run 1 is the token 6
    for token in (7, 8):  # runs 2 and 3
        (draft,) = scheduler.idle()
        assert isinstance(draft, Draft)
        scheduler.drafted(draft.draft, [((token, 1.0),)])
    commit, launch = scheduler.result(1, [7])
    assert commit == Commit(0, (7,), None) and isinstance(launch, Launch)
    assert [run.run for run in scheduler.in_flight] == [2, 3, 4]
    # Run 2 tells that 8 is next. Run 4, the token 7 once more, tells nothing new and nobody reads
    # it. Run 3 reads the cell of run 2.
    commit, cancel, again = scheduler.result(2, [8])
    assert (commit, cancel) == (Commit(0, (8,), None), Cancel((4,)))
    assert isinstance(again, Launch) and again.tokens == (8,)


def scripted(
    acceptance: float, machine: Machine, options: Options, length: int
) -> tuple[PipelinedScheduler, Trace]:
    cancelled = set[int]()
    models = CheckedModels([[1]], machine, acceptance, (1.0,), cancelled, seed=3)
    scheduler = PipelinedScheduler(options)
    simulation = Simulation(machine, scheduler, models)
    simulation.trace.cancelled = cancelled
    return scheduler, simulation.run([[1]], length)


FOUR_STAGES = Machine((4.0,) * 4, layers=4, cancel_s=0.5, draft_s=3.0)


def test_an_always_wrong_draft_is_cancelled_inside_the_stage_where_it_is() -> None:
    """Times by hand. The prompt is home at 16 with the first token, whose run takes 16 to 32. The
    drafts, of one token each, are launched at 19, 22, 25, 28 and 31. They begin at the first stage
    at 20, 24, 28, 32 and 36. At 32 the first draft turns out to be wrong. The stages know it at
    32.5, when each of them is in its first layer of one of these runs, which it finishes."""
    scheduler, trace = scripted(0.0, FOUR_STAGES, Options(draft=1), 12)
    layers = {flight.launch.run: flight.layers for flight in trace.flights}
    assert layers[0] == layers[1] == [4, 4, 4, 4]
    assert layers[2] == [4, 4, 4, 1]
    assert layers[3] == [4, 4, 1, 0]
    assert layers[4] == [4, 1, 0, 0]
    assert layers[5] == [1, 0, 0, 0]
    assert layers[6] == [0, 0, 0, 0]
    assert layers[7] == [4, 4, 4, 4]  # the right token
    cancelled = trace.cancelled
    assert scheduler.counts.invalid_runs == len(cancelled)
    useful = [run for run in layers if run not in cancelled]
    assert [layers[run] for run in useful] == [[4] * 4] * len(useful)
    computed = sum(sum(each) for each in layers.values())
    skipped = sum(4 - done for each in layers.values() for done in each)
    assert computed + skipped == 16 * scheduler.counts.runs


def test_nothing_of_an_always_right_draft_is_cancelled() -> None:
    scheduler, trace = scripted(1.0, FOUR_STAGES, Options(draft=2), 40)
    assert not trace.cancelled and scheduler.counts.speculative_runs > 15
    assert all(flight.layers == [4, 4, 4, 4] for flight in trace.flights)
    assert scheduler.counts.accepted == scheduler.counts.drafted
    # No token is launched twice, unless as in the original.
    rows = sum(flight.launch.num_rows for flight in trace.flights)
    assert rows == 40
    again, trace = scripted(1.0, FOUR_STAGES, Options(draft=2, relaunch=True), 40)
    assert sum(flight.launch.num_rows for flight in trace.flights) > 40
    assert again.counts.superfluous_runs > 0


def test_runs_are_launched_before_the_first_result_only_if_asynchronous() -> None:
    assert max_in_flight("async") >= 3
    assert max_in_flight("sync") == max_in_flight("iterative") == 1


def max_in_flight(mode: str) -> int:
    _, trace = scripted(0.7, FOUR_STAGES, Options(mode=mode, draft=2), 20)
    launched = [flight.launched_s for flight in trace.flights]
    return max(
        sum(flight.launched_s <= at < flight.home_s for flight in trace.flights) for at in launched
    )


def test_there_is_always_a_run_of_the_newest_token() -> None:
    """At acceptance 0 decoding is as fast as without drafts, but for a layer that is finished."""
    plain = scripted(0.0, FOUR_STAGES, Options(mode="iterative"), 20)[1]
    wrong = scripted(0.0, FOUR_STAGES, Options(draft=2), 20)[1]
    assert wrong.end_s <= plain.end_s * 1.1


def actions_of(scheduler: PipelinedScheduler) -> Iterator[object]:
    while actions := scheduler.idle():
        yield from actions


def test_branches_open_where_a_candidate_is_probable_enough() -> None:
    scheduler = PipelinedScheduler(Options(draft=3, np=3, pa=0.4, ps=0.15))
    scheduler.submit([1], 20)
    scheduler.result(0, [2])
    (draft,) = scheduler.idle()
    assert draft == Draft(0, 0, ((),))
    assert scheduler.drafted(0, [((10, 0.5), (11, 0.2), (12, 0.1))]) == []
    (draft,) = scheduler.idle()
    assert draft == Draft(1, 0, ((10,), (11,)))
    # A third branch opens below the first; the fourth candidate and the branch 11 have no place.
    after = [((20, 0.5), (21, 0.3), (22, 0.2)), ((30, 0.3),)]
    (launch,) = scheduler.drafted(1, after)
    assert isinstance(launch, Launch) and launch.is_speculative and launch.parent == 1
    assert launch.tokens == (10, 11, 20, 21) and launch.parents == (-1, -1, 0, 0)
    assert launch.positions == (2, 2, 3, 3)
    assert launch.cells[0] == 2 and launch.cells[2] == 3, "first branches are at home"
    assert min(launch.cells[1], launch.cells[3]) >= 20, "others have spare cells"
    assert launch.context == ((0, 2),)
    assert Launch.from_words(launch.to_words()) == launch


def test_the_branch_that_wins_moves_home() -> None:
    scheduler = PipelinedScheduler(Options(draft=1, np=2, pa=0.4, ps=0.15))
    scheduler.submit([1], 20)
    scheduler.result(0, [2])
    scheduler.idle()
    (launch,) = scheduler.drafted(0, [((10, 0.5), (11, 0.4))])
    assert isinstance(launch, Launch) and launch.tokens == (10, 11)
    assert scheduler.result(1, [11]) == [Commit(0, (11,), None)]
    commit, following = scheduler.result(2, [99, 30])
    assert commit == Commit(0, (30,), None) and isinstance(following, Launch)
    assert following.moves == ((launch.cells[1], 2),)
    assert following.context == ((0, 3),) and following.cells == (3,)


def test_the_output_ends_at_eos_and_the_lane_goes_to_the_next_request() -> None:
    scheduler = PipelinedScheduler(Options(draft=4, lanes=1))
    scheduler.submit([1], 20, eos_ids=[9])
    other, actions = scheduler.submit([2, 3], 1)
    assert other == 1 and actions == []
    scheduler.result(0, [2])
    for token in (7, 9, 8, 5):
        scheduler.idle()
        actions = scheduler.drafted(scheduler._num_drafts - 1, [((token, 1.0),)])
    assert [launch.tokens for launch in actions if isinstance(launch, Launch)] == [(7, 9, 8, 5)]
    assert scheduler.result(1, [7]) == [Commit(0, (7,), None)]
    commit, prompt = scheduler.result(2, [9, 8, 5, 4])
    assert commit == Commit(0, (9,), "eos")
    assert isinstance(prompt, Launch) and prompt.tokens == (2, 3) and prompt.lane == 0
    assert scheduler.result(3, [6]) == [Commit(1, (6,), "length"), Stop()]


def test_thresholds_follow_the_formula() -> None:
    adjustment = Adjustment(Options(pa=0.5, pr=0.2, pd=0.05))
    adjustment.num_launched = 2
    assert adjustment.value == pytest.approx(0.4) and adjustment.may_draft
    adjustment.num_launched = 3
    assert not adjustment.may_draft
    adjustment.exhausted()
    assert not adjustment.may_draft, "only a commit begins anew"
    adjustment.rejects = 3
    assert adjustment.value == pytest.approx(3 * 0.2 - 3 * 0.05) and adjustment.may_draft
    adjustment.committed()
    assert adjustment.value == 0
    as_code = Adjustment(Options(pa=0.5, pr=0.2, recovery="attempt"), num_launched=3)
    as_code.exhausted()
    assert as_code.may_draft, "the original's code begins anew at once"


def test_an_unsure_draft_is_asked_again_only_if_the_threshold_falls() -> None:
    def attempts(options: Options) -> int:
        scheduler = PipelinedScheduler(options)
        scheduler.submit([1], 20)
        scheduler.result(0, [2])
        count = 0
        while (actions := scheduler.idle()) and count < 10:
            (draft,) = actions
            assert isinstance(draft, Draft)
            count += 1
            if scheduler.drafted(draft.draft, [((10, 0.42),)]):
                return count
        return -count

    assert attempts(Options(draft=1)) == -1
    assert attempts(Options(draft=1, pd=0.05)) == 3
    assert attempts(Options(draft=1, pa=0.4)) == 1


def test_results_come_home_in_order() -> None:
    scheduler = PipelinedScheduler(Options())
    scheduler.submit([1, 2, 3], 4)
    with pytest.raises(AssertionError, match="run 0 is the oldest"):
        scheduler.result(1, [5])


@pytest.mark.parametrize(
    "bad", [{"pa": 1.5}, {"draft": 0}, {"np": 9}, {"mode": "none"}, {"max_in_flight": 0}]
)
def test_settings_that_cannot_be_name_their_flag(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(bad))} "):
        replace(Options(), **bad)  # type: ignore[arg-type]
