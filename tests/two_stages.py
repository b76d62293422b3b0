"""A ring of two stages in one process, for tests of what its messages carry."""

from collections import deque
from collections.abc import Sequence

from conftest import make_runner

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message, Traffic
from magicdec.model.transformer import Transformer
from magicdec.records.acceptance import Verifications
from magicdec.runner.request import Request
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.drafter import DraftModel, DraftSetup, make_drafter
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.observer import PassObserver

CHUNK = 16


class SecondStage:
    """The first stage's ends of the ring. The second stage computes what is sent at once."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.home = Loopback()
        self.sent = deque[Message]()
        self.traffic = Traffic()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if (answer := self.stage.answer(message)[0]) is not None:
            self.home.send(answer)

    def receive(self) -> Message:
        return self.home.receive()

    def close(self) -> None:
        """There is nothing to wait for."""


def halves(model: Transformer) -> tuple[Transformer, Transformer]:
    """The first layer with the ends of a model of two layers, and the second."""
    parts = Transformer(model.config, layers=range(1), has_ends=True)
    parts.embedding = model.embedding
    parts.norm = model.norm
    parts.head = model.head
    second = Transformer(model.config, layers=range(1, 2), has_ends=False)
    parts.blocks[0] = model.blocks[0]
    second.blocks[0] = model.blocks[1]
    return parts.eval(), second.eval()


def serve_with_drafts(
    model: Transformer,
    requests: Sequence[Request],
    lanes: tuple[int, int],
    max_tokens: int,
    gamma: int,
    drafter: str = "ngram",
    draft: DraftModel | None = None,
) -> Verifications:
    """Serve `requests` by two stages in this process; `lanes` are their number and size."""
    num_rows = lanes[0] * lanes[1]
    stages = [
        Stage(make_runner(half, num_rows, max_tokens), half.is_last) for half in halves(model)
    ]
    second = SecondStage(stages[1])
    runner = stages[0].runner
    decoding = DecodingSection("speculative", drafter, gamma)
    made = make_drafter(drafter, DraftSetup(runner, decoding, KVSection("full", -1), draft))
    speculation = RingSpeculation(runner, made, gamma)
    limits = BatchLimits(max_tokens, step_tokens=1 + gamma, prefill_tokens=num_rows * CHUNK)
    place = Ends(second, second), *lanes, limits, CHUNK
    seen = PassObserver()
    RecurrentPipeline(stages[0], *place, speculation=speculation).serve(requests, seen.observe)
    assert not any(row for stage in stages for row in stage.runner.cache.blocks)
    assert {m.kind for m in second.sent} == {Kind.HIDDEN, Kind.FREE}
    return seen.verifications
