"""Replay: the sessions of a trace as they are served here, scaled, with the waits that were chosen,
and with the tokens of their texts. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from magicdec.workload.conversations import TurnPlan
from magicdec.workload.request_shapes import RequestShape
from magicdec.workload.traces.chat_texts import ChatTexts
from magicdec.workload.traces.sessions import (
    NO_WAITS,
    START,
    THINK,
    Blocks,
    ChatPrompt,
    Session,
    TokenPrompt,
    TracedRequest,
    known_tokens,
    read_sessions,
)


@dataclass(frozen=True, eq=False)
class Replay:
    """Scaled sessions, and when a request comes after those that it follows (`waits`). `name` is
    that of the trace in records."""

    sessions: tuple[Session, ...]
    waits: str
    name: str = ""

    @classmethod
    def read(
        cls,
        flag: str,
        form: str,
        path: Path,
        most: int | None,
        scale: Fraction,
        waits: str,
        longest_wait_s: float | None,
    ) -> Replay:
        """The first `most` sessions of a file, or all. Waits are bounded before they are scaled.
        Raises ValueError as `read_sessions` and `Session.scaled`, and for waits that the file does
        not have."""
        sessions = read_sessions(flag, form, path, most)
        if waits == START and not all(session.has_starts for session in sessions):
            raise ValueError(
                f"--waits {START}: {path} does not say when its requests were sent; choose {THINK} "
                f"or {NO_WAITS}"
            )
        if longest_wait_s is not None:
            sessions = [bounded(session, longest_wait_s) for session in sessions]
        scaled = tuple(session.scaled(scale) for session in sessions)
        return cls(scaled, waits, f"{form}:{path.name}")

    @property
    def requests(self) -> Iterator[TracedRequest]:
        return (request for session in self.sessions for request in session.requests)

    @property
    def has_blocks(self) -> bool:
        """Whether the text of a prompt is made up."""
        return any(isinstance(request.prompt, Blocks) for request in self.requests)

    @property
    def has_chats(self) -> bool:
        """Whether a prompt is real text, of which the tokens are not known yet."""
        return any(isinstance(request.prompt, ChatPrompt) for request in self.requests)

    @property
    def lacks_lengths(self) -> bool:
        """Whether the trace does not say how long an output is."""
        return any(
            request.output_len is None
            and not (isinstance(request.prompt, ChatPrompt) and request.prompt.answer is not None)
            for request in self.requests
        )

    def with_texts(self, texts: ChatTexts, draw_length: Callable[[], int]) -> Replay:
        """With the tokens of real texts, and outputs as long as the recorded answers or, without
        one, as drawn. Raises ValueError as `ChatTexts.of`."""
        sessions = []
        for session in self.sessions:
            chats = [
                (request.place, request.prompt)
                for request in session.requests
                if isinstance(request.prompt, ChatPrompt)
            ]
            made = texts.of([place for place, _ in chats], [prompt for _, prompt in chats])
            requests = list[TracedRequest]()
            for request in session.requests:
                prompt = request.prompt
                length = request.output_len
                if isinstance(prompt, ChatPrompt):
                    text = next(made)
                    prompt = TokenPrompt(text.ids)
                    if length is None and text.answer_len is not None:
                        length = max(1, text.answer_len)
                if length is None:
                    length = draw_length()
                requests.append(replace(request, prompt=prompt, output_len=length))
            sessions.append(replace(session, requests=tuple(requests)))
        return replace(self, sessions=tuple(sessions))

    @property
    def num_block_tokens(self) -> int:
        """Tokens of all different blocks, and of what is in no block."""
        sizes = dict[tuple[str, int], int]()
        total = 0
        for session in self.sessions:
            prompts = (request.prompt for request in session.requests)
            for prompt in (prompt for prompt in prompts if isinstance(prompt, Blocks)):
                for hash_id in prompt.hash_ids:
                    sizes[session.namespace, hash_id] = prompt.block_size
                total += prompt.length - prompt.num_in_blocks
        return total + sum(sizes.values())

    def shapes(self, starts_ms: Sequence[float] | None) -> list[RequestShape]:
        """The longest prompt and output of each session, and when it begins: as in the trace, or at
        `starts_ms`. A length that is not known yet counts as 1."""
        return [
            RequestShape(
                1e3 * session.begin_s if starts_ms is None else starts_ms[number],
                max(request.prompt.length for request in session.requests),
                max(request.output_len or 1 for request in session.requests),
                session.requests[0].place,
            )
            for number, session in enumerate(self.sessions)
        ]

    def check_lengths(self, most: int, model: str) -> None:
        """Raises ValueError, naming the place in the trace, for a request longer than the `most`
        tokens of the model."""
        for session in self.sessions:
            for request in session.requests:
                prompt = request.prompt.length
                output = request.output_len or 1
                if prompt + output > most:
                    is_scaled = isinstance(request.prompt, Blocks)
                    raise ValueError(
                        f"{request.place}: a prompt of {prompt} tokens and {output} new ones"
                        f"{', after --scale,' if is_scaled else ''} exceed the {most} positions of "
                        f"{model}; choose a "
                        f"{'smaller --scale' if is_scaled else 'model with more'}"
                    )

    def plans(self) -> list[tuple[TurnPlan, ...]]:
        """When each request of each session comes, and what a cache without limits has of it."""
        known = known_tokens(self.sessions)
        return [
            tuple(self._plans_of(session, own_known))
            for session, own_known in zip(self.sessions, known, strict=True)
        ]

    def _plans_of(self, session: Session, known: Sequence[int]) -> list[TurnPlan]:
        numbers = Counter[int]()
        plans = list[TurnPlan]()
        for request, num_known in zip(session.requests, known, strict=True):
            numbers[request.branch] += 1
            plans.append(
                TurnPlan(
                    numbers[request.branch],
                    request.after,
                    wait_s=request.wait_s if self.waits == THINK else 0.0,
                    at_s=request.start_s if self.waits == START else 0.0,
                    output_len=request.output_len,
                    branch=request.branch,
                    num_known=num_known,
                )
            )
        return plans


def bounded(session: Session, longest_s: float) -> Session:
    """The session with no longer waits."""
    requests = tuple(
        replace(request, wait_s=min(request.wait_s, longest_s)) for request in session.requests
    )
    return replace(session, requests=requests)
