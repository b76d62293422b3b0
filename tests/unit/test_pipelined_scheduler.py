"""The pipelined scheduler on simulated stages: it emits what plain decoding emits, whatever the
times are, and never reads a cell of a run that was skipped."""

import random
from collections.abc import Sequence as Tokens

import pytest
from checked_cells import VOCABULARY, CheckedModels, generate

from magicdec.predict.simulator.simulation import SimulatedMachine, Simulation, SimulationTrace
from magicdec.systems.pipeinfer.messages import (
    Action,
    Cancel,
    Candidate,
    Commit,
    JudgedRun,
    RunLaunch,
)
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler
from magicdec.systems.pipeinfer.sequence import Sequence

ACCEPTANCE = (0.0, 0.3, 0.7, 1.0)
BLOCK = 250  # schedules of a test; the wide tier has 20 such tests
WIDE = [pytest.param(block, marks=pytest.mark.wide) for block in range(1, 20)]


def random_options(chooser: random.Random) -> Options:
    choose = chooser.choice
    return Options(
        mode=choose(
            ["pipeinfer", "pipeinfer", "pipeinfer", "pipeinfer", "pipeline+draft", "pipeline"]
        ),
        pa=choose([0, 0.3, 0.5]),
        pr=choose([0, 0, 0.1, 0.4]),
        pd=choose([0, 0, 0.05]),
        gamma=chooser.randint(1, 5),
        max_in_flight=choose([None, None, 2, 5]),
        lanes=chooser.randint(1, 3),
    )


def random_machine(chooser: random.Random) -> SimulatedMachine:
    choose = chooser.choice
    stages = tuple(choose([0.1, 1, 1, 2, 5]) for _ in range(chooser.randint(1, 5)))
    return SimulatedMachine(
        stages,
        layers=chooser.randint(1, 4),
        link_s=choose([0, 0.1, 2]),
        draft_s=choose([0.05, 0.3, 1.5]),
        row_cost=choose([0, 0.3]),
        bytes_per_s=choose([None, 20_000]),
    )


class Recount:
    """The counts of a schedule, told from its actions alone: which tokens were sent on their way
    before they were known to be right, and which of these were right."""

    def __init__(self, is_sync: bool) -> None:
        self.is_sync = is_sync
        self.texts: dict[int, list[int]] = {}  # prompts and committed tokens
        self.drafts: dict[tuple[int, int], tuple[int, int]] = {}  # by place: token and run
        self.cancelled = set[int]()
        # By request and run, in the order of launches: draft tokens, and how many are accepted;
        # None until the first is judged.
        self.open: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.firsts: dict[int, int] = {}  # the place of the first draft of each run
        self.committed: dict[int, int] = {}  # tokens before which no run begins, by request
        self.runs = self.speculative_runs = self.launched = 0

    def observe(self, actions: Tokens[Action]) -> None:
        for action in actions:
            if isinstance(action, Cancel):
                self.cancelled.update(action.runs)
            elif isinstance(action, RunLaunch):
                self.launch(action)
            elif isinstance(action, Commit):
                self.commit(action)

    def launch(self, launch: RunLaunch) -> None:
        """What a lane holds from the first position on is void, and nothing ever before what is
        committed."""
        request = launch.request
        known = len(self.texts[launch.request])
        assert launch.first >= self.committed.get(request, 0)
        self.committed[request] = launch.num_committed
        assert launch.num_committed == min(launch.first, known - 1)
        self.forget(request, launch.first)
        drafts = [
            (place, token)
            for place, token in zip(launch.positions, launch.tokens, strict=True)
            if place >= known
        ]
        self.drafts |= {(request, place): (token, launch.run) for place, token in drafts}
        self.runs += 1
        self.speculative_runs += bool(drafts)
        self.launched += len(drafts)
        if drafts:
            self.open[request, launch.run] = len(drafts), None
            self.firsts[launch.run] = drafts[0][0]

    def commit(self, commit: Commit) -> None:
        """Checks what it says of runs: all whose drafts are accepted, and that with the first
        rejected one; what follows that is cancelled."""
        request = commit.request
        judged = list[JudgedRun]()
        num_cancelled = 0
        for token in commit.tokens:
            text = self.texts[request]
            draft, run = self.drafts.get((request, len(text)), (None, -1))
            if draft is not None:
                count, accepted = self.open.pop((request, run))
                accepted = (accepted or 0) + (draft == token)
                if draft != token or accepted == count:
                    judged.append(JudgedRun(count, accepted, self.firsts[run]))
                else:
                    self.open = {(request, run): (count, accepted), **self.open}
            if draft != token:
                self.forget(request, len(text))
                num_cancelled += sum(count for count, _ in self.close(request))
            text.append(token)
        keys = [key for key in self.open if key[0] == request]
        closed = zip(keys, self.close(request), strict=True) if commit.finished else ()
        for (_, run), (count, accepted) in closed:
            if accepted is not None:
                judged.append(JudgedRun(accepted, accepted, self.firsts[run]))
            num_cancelled += count - (accepted or 0)
        if self.is_sync and commit.finished:  # its last run judges drafts past the end too
            known = num_cancelled + sum(run.num_drafted for run in judged)
            assert commit.num_cancelled == 0
            assert sum(run.num_drafted for run in commit.judged) == known
            return
        assert (commit.judged, commit.num_cancelled) == (tuple(judged), num_cancelled)

    def close(self, request: int) -> list[tuple[int, int | None]]:
        """The runs of a request about which nothing more will be known."""
        return [self.open.pop(key) for key in list(self.open) if key[0] == request]

    def forget(self, request: int, first: int) -> None:
        self.drafts = {
            place: draft
            for place, draft in self.drafts.items()
            if place[0] != request or place[1] < first
        }


class CheckedScheduler(PipelinedScheduler):
    """Checks after every event what is true of every schedule."""

    def submit(
        self, prompt: Tokens[int], max_new_tokens: int, eos_ids: Tokens[int] = ()
    ) -> tuple[int, list[Action]]:
        recount: Recount = self.__dict__.setdefault(
            "recount", Recount(self.options.mode == "pipeline+draft")
        )
        recount.texts[len(recount.texts)] = list(prompt)
        request, actions = super().submit(prompt, max_new_tokens, eos_ids)
        return request, self._checked(actions)

    def idle(self) -> list[Action]:
        return self._checked(super().idle())

    def result(self, run: int, tokens: Tokens[int] | None) -> list[Action]:
        return self._checked(super().result(run, tokens))

    def drafted(self, draft: int, candidate: Candidate | None) -> list[Action]:
        return self._checked(super().drafted(draft, candidate))

    def _checked(self, actions: list[Action]) -> list[Action]:
        limit = self.options.max_in_flight
        for request, sequence in self._sequences.items():
            own = [r for r in self.in_flight if r.request == request and not r.is_cancelled]
            assert sequence.num_in_flight == len(own)
            places = [node.position for node in sequence.chain]
            first = sequence.tip.position
            assert places == [*range(first, first + len(places))]
            if limit is not None and sequence.num_output:
                assert len(own) <= limit + 1, "the run of the newest token comes on top"
        named = [run for action in actions if isinstance(action, Cancel) for run in action.runs]
        already = self.__dict__.setdefault("already_cancelled", set[int]())
        assert not already & set(named), "a run is cancelled once"
        already.update(named)
        recount: Recount = self.__dict__["recount"]
        recount.observe(actions)
        counts = self.counts
        names = ("runs", "speculative_runs")
        assert {n: getattr(counts, n) for n in names} == {n: getattr(recount, n) for n in names}
        known = counts.num_drafted + counts.num_cancelled
        assert known + sum(count for count, _ in recount.open.values()) == recount.launched
        assert counts.invalid_runs == len(recount.cancelled)
        return actions


def run_random(seed: int) -> None:
    """One random schedule: the output of every request is what the target writes alone."""
    chooser = random.Random(seed)
    options = random_options(chooser)
    machine = random_machine(chooser)
    num_requests = chooser.choice([1, 1, 2, 4])
    prompts = [
        [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 4))]
        for _ in range(num_requests)
    ]
    eos = chooser.choice([-1, 3])
    length = chooser.randint(1, 16)
    scheduler = CheckedScheduler(options, prefill_chunk=chooser.choice([None, 2]))
    acceptance = ACCEPTANCE[seed % 4]
    cancelled = set[int]()
    models = CheckedModels(prompts, machine, acceptance, cancelled, seed)
    delays = random.Random(seed + 1)
    simulation = Simulation(machine, scheduler, models)
    simulation.cancel_delays = lambda: [  # type: ignore[method-assign]
        delays.choice([0, 0.1, 1, 9]) for _ in machine.stage_s
    ]
    simulation.trace.cancelled = cancelled
    trace = simulation.run(prompts, length, eos)
    for request, prompt in enumerate(prompts):
        assert trace.outputs[request] == generate(prompt, length, eos), f"seed {seed}"
    assert not scheduler.in_flight and not scheduler._sequences


@pytest.mark.parametrize("block", [0, *WIDE])
def test_every_schedule_emits_what_plain_decoding_emits(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        run_random(seed)


def first_failure(seeds: range) -> str | None:
    for seed in seeds:
        try:
            run_random(seed)
        except AssertionError as error:
            return str(error)
    return None


def test_a_run_that_is_skipped_although_it_is_read_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Sequence, "needed_runs", lambda self: {n.run for n in self.chain[-1:]} - {None}
    )
    assert first_failure(range(BLOCK)) is not None


def scripted(
    acceptance: float, machine: SimulatedMachine, options: Options, length: int
) -> tuple[PipelinedScheduler, SimulationTrace]:
    cancelled = set[int]()
    models = CheckedModels([[1]], machine, acceptance, cancelled, seed=3)
    scheduler = PipelinedScheduler(options)
    simulation = Simulation(machine, scheduler, models)
    simulation.trace.cancelled = cancelled
    return scheduler, simulation.run([[1]], length)


FOUR_STAGES = SimulatedMachine((4.0,) * 4, layers=4, cancel_s=0.5, draft_s=3.0)


def test_an_always_wrong_draft_is_cancelled_inside_the_stage_where_it_is() -> None:
    """Times by hand. The prompt is home at 16 with the first token, whose run takes 16 to 32. The
    drafts, of one token each, are launched at 19, 22, 25, 28 and 31. They begin at the first stage
    at 20, 24, 28, 32 and 36. At 32 the first draft turns out to be wrong. The stages know it at
    32.5, when each of them is in its first layer of one of these runs, which it finishes."""
    scheduler, trace = scripted(0.0, FOUR_STAGES, Options(gamma=1), 12)
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
    computed = sum(sum(layer) for layer in layers.values())
    skipped = sum(4 - done for layer in layers.values() for done in layer)
    assert computed + skipped == 16 * scheduler.counts.runs


def test_nothing_of_an_always_right_draft_is_cancelled() -> None:
    scheduler, trace = scripted(1.0, FOUR_STAGES, Options(gamma=2), 40)
    assert not trace.cancelled and scheduler.counts.speculative_runs > 15
    assert all(flight.layers == [4, 4, 4, 4] for flight in trace.flights)
    assert scheduler.counts.num_accepted == scheduler.counts.num_drafted
    rows = sum(flight.launch.num_rows for flight in trace.flights)
    assert rows == 40, "no token is launched twice"


def test_runs_are_launched_before_the_first_result_only_if_asynchronous() -> None:
    assert max_in_flight("pipeinfer") >= 3
    assert max_in_flight("pipeline+draft") == max_in_flight("pipeline") == 1


def max_in_flight(mode: str) -> int:
    _, trace = scripted(0.7, FOUR_STAGES, Options(mode=mode, gamma=2), 20)
    launched = [flight.launched_s for flight in trace.flights]
    return max(
        sum(flight.launched_s <= at < flight.home_s for flight in trace.flights) for at in launched
    )


def test_there_is_always_a_run_of_the_newest_token() -> None:
    """At acceptance 0 decoding is as fast as without drafts, but for a layer that is finished."""
    plain = scripted(0.0, FOUR_STAGES, Options(mode="pipeline"), 20)[1]
    wrong = scripted(0.0, FOUR_STAGES, Options(gamma=2), 20)[1]
    assert wrong.end_s <= plain.end_s * 1.1
