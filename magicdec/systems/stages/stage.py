"""StageLoop: the loop of a stage, or of a drafter, that answers messages."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, Protocol

from magicdec.distributed.channels.message import Ends, Kind, Message
from magicdec.systems.stages.spans import SpanKind, Spans


class MessageHandler(Protocol):
    """The part of the model that answers a stage's or the drafter's messages. `what` is the kind of
    its spans."""

    what: ClassVar[SpanKind]

    def answer(self, message: Message) -> tuple[Message | None, int | None]:
        """The message to send on, if any, and its span's value: the layers computed for a run, None
        for a message of no run or draft step."""


@dataclass(frozen=True)
class StageLoop:
    """The loop of a stage. `spans` get one span per run or draft step, from arrival until the
    answer is sent."""

    part: MessageHandler
    ends: Ends
    spans: Spans

    def serve(self) -> None:
        """Serve messages until END. The first stage of a ring has another loop, since it begins the
        runs."""
        inbound = self.ends.inbound
        outbound = self.ends.outbound
        while (message := inbound.receive()).kind is not Kind.END:
            begin_s = time.perf_counter()
            answer, value = self.part.answer(message)
            if value is not None:
                # Before sending: the receiver may have the answer before this rank goes on.
                self.spans.add(self.part.what, message.run, begin_s, value)
            if answer is not None:
                outbound.send(answer)
        outbound.send(message)
        outbound.close()
