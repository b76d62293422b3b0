"""Replay: the sessions of a trace as they are served here, scaled and with the waits that were
chosen. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from magicdec.workload.conversations import TurnPlan
from magicdec.workload.request_shapes import RequestShape
from magicdec.workload.traces.sessions import (
    START,
    THINK,
    Session,
    known_tokens,
    read_sessions,
)


@dataclass(frozen=True, eq=False)
class Replay:
    """Scaled sessions, and when a request comes after those that it follows (`waits`)."""

    sessions: tuple[Session, ...]
    waits: str

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
        Raises ValueError as `read_sessions` and `Session.scaled`."""
        sessions = read_sessions(flag, form, path, most)
        if longest_wait_s is not None:
            sessions = [bounded(session, longest_wait_s) for session in sessions]
        return cls(tuple(session.scaled(scale) for session in sessions), waits)

    @property
    def num_block_tokens(self) -> int:
        """Tokens of all different blocks, and of what is in no block."""
        sizes = dict[tuple[str, int], int]()
        total = 0
        for session in self.sessions:
            for request in session.requests:
                prompt = request.prompt
                for hash_id in prompt.hash_ids:
                    sizes[session.namespace, hash_id] = prompt.block_size
                total += prompt.length - prompt.num_in_blocks
        return total + sum(sizes.values())

    def shapes(self, starts_ms: Sequence[float] | None) -> list[RequestShape]:
        """The longest prompt and output of each session, and when it begins: as in the trace, or at
        `starts_ms`."""
        return [
            RequestShape(
                1e3 * session.begin_s if starts_ms is None else starts_ms[number],
                max(request.prompt.length for request in session.requests),
                max(request.output_len for request in session.requests),
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
                output = request.output_len
                if prompt + output > most:
                    raise ValueError(
                        f"{request.place}: a prompt of {prompt} tokens and {output} new ones, "
                        f"after --scale, exceed the {most} positions of {model}; choose a smaller "
                        "--scale"
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
