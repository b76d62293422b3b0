"""Parts of pipelined speculation whose faults cost only work, so that no wrong token shows them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import pytest
from conftest import make_requests
from threaded_pipeline import FakeStage, drafted_in, serve

from magicdec.distributed.channels.message import Loopback
from magicdec.runner.request import Request, RequestStatus
from magicdec.systems.pipeinfer.head import there
from magicdec.systems.pipeinfer.messages import Candidate
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import DraftRequest, LookupPathDrafter
from magicdec.systems.pipeinfer.run_stage import CancelBoard, Canceller, listen
from magicdec.systems.pipeinfer.scripted_drafter import ScriptedPathDrafter
from magicdec.systems.stages.spans import SpanKind


def test_every_stage_hears_of_every_cancellation() -> None:
    own = CancelBoard()
    boards = [CancelBoard() for _ in range(2)]
    channels = []
    threads = []
    for board in boards:
        channels.append(Loopback())
        threads.append(listen(channels[-1], board))
    canceller = Canceller(own, channels)
    canceller.cancel([3, 5])
    canceller.close()
    for thread in threads:
        thread.join()
    for board in (own, *boards):
        assert [run for run in range(8) if board.is_cancelled(run)] == [3, 5]


def always(is_right: bool, lengths: list[int]) -> ScriptedPathDrafter:
    """For targets that write p + 1 behind position p."""
    outputs = [[length + i for i in range(30)] for length in lengths]
    return ScriptedPathDrafter(outputs, lengths, [[is_right] * 30] * len(lengths), 0.9)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_drafter_is_asked_about_the_text_of_the_request(lanes: int) -> None:
    """Also of requests whose lane had another request before."""
    lengths = [1, 3, 2]
    served = make_requests([tuple(range(length)) for length in lengths], 9)
    options = Options(mode="pipeline+draft", gamma=2, lanes=lanes)
    found = serve([FakeStage(2, True)], always(True, lengths), options, served)
    assert {step.request for step, _ in found.drafted} == {0, 1, 2}
    for request, known, path, candidate in drafted_in(found.drafted):
        text = [*served[request].prompt_ids, *served[request].output_ids]
        place = known + len(path)
        assert text[known:place] == list(path) and candidate[0] == text[place]
    assert found.scheduler.counts.num_accepted == found.scheduler.counts.num_drafted > 0


def test_a_head_that_comes_after_another_has_new_numbers() -> None:
    parts = [FakeStage(3, index == 1) for index in range(2)]
    options = Options(mode="pipeline+draft")
    first, again, alone = (make_requests([(9,)], num_new) for num_new in (20, 7, 7))
    found = serve(parts, always(False, [1]), options, again, before=first)
    assert first[0].output_ids == list(range(1, 21))
    assert again[0].output_ids == list(range(1, 8))
    assert found.drafted == serve(parts, always(False, [1]), options, alone).drafted != []
    assert [span.run for span in found.stages[0]] == list(range(len(found.stages[0])))


def test_a_request_gets_its_lane_when_its_first_run_is_launched() -> None:
    """Not when it arrives: with one lane it waits for the end of the request before it. And not
    when the last run of its prompt is launched."""
    before = make_requests([(9,)] * 4, 3)
    served = make_requests([(1, 2, 3), (1, 2), (1,)], 4)
    options = Options(mode="pipeline", lanes=1)
    found = serve([FakeStage(1, True)], always(True, [1]), options, served, 1, before=before)
    prompts = [s for s in found.head if s.what is SpanKind.PROMPT and s.run >= found.first_run]
    first = [prompts[place].begin_s for place in (0, 3, 5)]
    ends = [0.0, *(request.token_times_s[-1] for request in served)]
    assert sorted(found.moves) == [0, 1, 2], "nothing is kept of those that were served before"
    for request, launch_s, end_s in zip(served, first, ends, strict=False):
        (joined_s,) = found.moves[request.request_id].joined_s
        assert end_s <= joined_s <= launch_s < there(request.first_token_s)


@dataclass
class WorkClock:
    """As many seconds as requests have ended."""

    requests: Sequence[Request]

    def now(self) -> float:
        return sum(request.status is RequestStatus.FINISHED for request in self.requests)


@pytest.mark.parametrize("mode", ["pipeline", "pipeline+draft", "pipeinfer"])
def test_a_head_begins_again_when_a_request_arrives_after_all_have_ended(mode: str) -> None:
    """The second and the third request arrive when the first has ended, and the fourth when all
    others have."""
    served = make_requests([tuple(range(length)) for length in (3, 1, 2, 4)], 9)
    for request, arrived_s in zip(served, [0.0, 1.0, 1.0, 3.0], strict=True):
        request.arrived_s = arrived_s
    options = Options(mode=mode, gamma=2, lanes=2)
    drafter = always(True, [3, 1, 2, 4])
    parts = [FakeStage(2, index == 1) for index in range(2)]
    out_of_order = [served[place] for place in (3, 1, 0, 2)]
    found = serve(parts, drafter, options, out_of_order, clock=WorkClock(served).now)
    for request in served:
        first = len(request.prompt_ids)
        assert request.output_ids == list(range(first, first + 9))
    assert [request.arrived_s for request in served] == [0.0, 1.0, 1.0, 3.0]
    assert [found.moves[i].joined_s for i in range(4)] == [[0], [1], [1], [3]]
    assert found.scheduler.counts.num_accepted == found.scheduler.counts.num_drafted


class LateDrafter(ScriptedPathDrafter):
    """Answers when `request` has ended."""

    request: Request

    def propose(self, asked: DraftRequest, text: list[int]) -> Candidate | None:
        has_path = asked.path is not None
        while has_path and len(self.request.output_ids) < self.request.sampling.max_new_tokens:
            time.sleep(0.001)
        time.sleep(0.05 * has_path)
        return super().propose(asked, text)


def test_a_head_waits_for_a_draft_that_nobody_needs_any_more() -> None:
    drafter = LateDrafter([[1, 2, 3, 4, 5]], [1], [[True] * 5], 0.9)
    (drafter.request,) = served = make_requests([(9,)], 5)
    found = serve([FakeStage(1, True)], drafter, Options(gamma=1), served)
    assert served[0].output_ids == [1, 2, 3, 4, 5] and len(found.drafted) == 1


def test_a_head_that_serves_again_cancels_the_new_runs() -> None:
    """Run 0 served the first request. The newest token of the second is run 2, and its result comes
    when the wrong draft, run 3, is under way."""
    board = CancelBoard()
    run_3_is_out = Event()

    def at_first(run: int) -> None:
        if run == 3:
            run_3_is_out.set()

    def at_last(run: int, layer: int) -> None:
        if run == 2:
            assert run_3_is_out.wait(60.0)

    parts = [FakeStage(1, False, computed=at_first), FakeStage(1, True, wait=at_last)]
    first, again = (make_requests([(9,)], num_new) for num_new in (1, 4))
    found = serve(parts, always(False, [1]), Options(gamma=1), again, board=board, before=first)
    assert found.first_run == 1 and again[0].output_ids == [1, 2, 3, 4]
    assert board.is_cancelled(3) and not board.is_cancelled(2)


@pytest.mark.usefixtures("trusted_lookups")
def test_a_lookup_forgets_the_request_that_had_its_lane() -> None:
    text = [5, 6, 7, 8, 5, 6]
    drafter = LookupPathDrafter()
    asked = DraftRequest(0, 0, 0, (1, 2, 3, 1, 2), ())
    assert drafter.propose(asked, [*asked.new]) == (3, 1.0)
    asked = DraftRequest(1, 0, 0, tuple(text), (7,))
    assert drafter.propose(asked, text) == (8, 1.0)
