"""Drafters of pipelined speculation, and the loop in which one serves the head's draft steps, on a
rank of its own or in a thread of the head's.

A drafter gives the most probable tokens after each path that follows the committed text of a
request. Must not know what of it is launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from magicdec.distributed.channels.message import Kind, Message, Receiver, Sender
from magicdec.drafting.ngram import MAX_NGRAM, Lookup
from magicdec.pipelined_run.parcel import DraftRequest, pack_candidates
from magicdec.pipelined_run.spans import Spans, What
from magicdec.pipelined_speculation.messages import Candidates


class Drafter(Protocol):
    def propose(self, asked: DraftRequest, text: list[int]) -> list[Candidates]:
        """The candidates after each of the paths that follow `text`. A request without paths tells
        the drafter a text that it will be asked about."""
        ...


class DraftLoop:
    """Ranks that share a draft model have a loop each. All of them do the same steps in the same
    order, and so meet in the collectives of each forward."""

    def __init__(
        self,
        drafter: Drafter,
        inbound: Receiver,
        outbound: Sender | None,
        spans: Spans,
        others: Sequence[Sender] = (),
    ) -> None:
        """`others` lead from the first of the draft's ranks to the others, which get every message
        that it gets. Theirs is no `outbound`: the first one answers."""
        self.drafter, self.inbound, self.outbound, self.spans = drafter, inbound, outbound, spans
        self.others = others
        self.texts: dict[int, list[int]] = {}  # the committed text of each lane

    def serve(self) -> None:
        """Serve draft steps until the head has no more."""
        while (message := self._receive()).kind is not Kind.END:
            asked = DraftRequest.from_message(message)
            text = self.texts.setdefault(asked.lane, [])
            text[asked.kept :] = asked.new
            if not asked.paths:
                self.drafter.propose(asked, text)
                continue
            with self.spans.during(What.DRAFT, message.run):
                found = self.drafter.propose(asked, text)
            if self.outbound is not None:
                self.outbound.send(pack_candidates(message.run, found))
        if self.outbound is not None:
            self.outbound.send(message)
            self.outbound.close()
        for other in self.others:
            other.close()

    def _receive(self) -> Message:
        message = self.inbound.receive()
        for other in self.others:
            other.send(message)
        return message


class LookupDrafter:
    """Prompt lookup: the token that followed the longest suffix of the path which occurred in the
    committed text, with probability 1."""

    def __init__(self, max_ngram: int = MAX_NGRAM) -> None:
        self.max_ngram = max_ngram
        self.lookups: dict[int, Lookup] = {}  # by lane

    def propose(self, asked: DraftRequest, text: list[int]) -> list[Candidates]:
        if asked.kept == 0 or asked.lane not in self.lookups:
            self.lookups[asked.lane] = Lookup(self.max_ngram)
        lookup = self.lookups[asked.lane]
        lookup.extend(text[len(lookup.tokens) :])
        found = [lookup.following(path) for path in asked.paths]
        return [() if token is None else ((token, 1.0),) for token in found]


class ScriptedDrafter:
    """Knows what the target will write. `ranks[i]` is the place of output token i among the
    candidates, -1 if it is none of them; `probabilities` are those of the candidates. A step takes
    `seconds`. For emulated acceptance, and for tests."""

    def __init__(
        self,
        outputs: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        ranks: Sequence[Sequence[int]],
        probabilities: Sequence[float],
        seconds: float = 0.0,
    ) -> None:
        self.outputs, self.prompt_lens, self.ranks = outputs, prompt_lens, ranks
        self.probabilities, self.seconds = probabilities, seconds

    def propose(self, asked: DraftRequest, text: list[int]) -> list[Candidates]:
        if asked.paths:
            time.sleep(self.seconds)
        return [self._after(asked.request, len(text), path) for path in asked.paths]

    def _after(self, request: int, num_committed: int, path: Sequence[int]) -> Candidates:
        output, begin = self.outputs[request], num_committed - self.prompt_lens[request]
        place = begin + len(path)
        if begin < 0 or place >= len(output):
            return ()  # a shortened request, or past the end
        is_right = tuple(output[begin:place]) == tuple(path)
        rank = self.ranks[request][place] if is_right else -1
        others = (token for token in range(len(self.probabilities) + 1) if token != output[place])
        return tuple(
            (output[place] if index == rank else next(others), probability)
            for index, probability in enumerate(self.probabilities)
        )
