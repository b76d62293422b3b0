"""The interface of a peer that serves requests, which join its running batch as they arrive, and
the loop that serves them by the clock."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServingSizes:
    """What a peer is created for. `max_tokens` is the longest request with its output, and
    `cache_tokens` what the KV cache must hold so that no request is preempted. `batch_tokens` (the
    tokens of a step at most) and `max_running` (the requests that run together) are settings of the
    peer; None: its default."""

    threads: int
    num_requests: int
    max_tokens: int
    cache_tokens: int
    batch_tokens: int | None = None
    max_running: int | None = None


@dataclass(frozen=True)
class TimedRequest:
    """A prompt which arrives `arrival_s` after the first one and gets `output_len` tokens."""

    arrival_s: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class ServedTokens:
    """The tokens of a request, and when each was known, in seconds after the first arrival."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class ServingPeer(ABC):
    """A model loaded in a dtype. Decoding is greedy and goes on past end tokens. Libraries are
    imported in methods, because the environment of a peer need not have those of the others."""

    @abstractmethod
    def __init__(self, model: str, dtype: str, sizes: ServingSizes) -> None:
        """Load the model in directory `model`, in dtype "float32" or "bfloat16"."""

    @abstractmethod
    def version(self) -> str:
        """The library's name and version."""

    @abstractmethod
    def submit(self, request_id: int, request: TimedRequest) -> None:
        """Let a request join the running batch as soon as the peer admits it."""

    @abstractmethod
    def advance(self, most_s: float | None) -> None:
        """Run one step. A peer that runs steps by itself waits for its next result, but at most
        `most_s` seconds (None: any time)."""

    @abstractmethod
    def read(self) -> list[tuple[int, list[int], list[float]]]:
        """The tokens of requests since the last call: id of the request, token ids, and the time
        of each on the clock of `time.perf_counter`."""

    def close(self) -> None:  # noqa: B027 (most peers have nothing to stop)
        """Stop what runs beside the calling thread."""


def serve_requests(peer: ServingPeer, requests: Sequence[TimedRequest]) -> list[ServedTokens]:
    """Submit each request when it arrives (the first arrives at once) and advance the peer until
    all have their tokens. Raises RuntimeError if one of them gets another number of tokens."""
    served = [ServedTokens() for _ in requests]
    coming = deque(sorted(enumerate(requests), key=lambda pair: pair[1].arrival_s))
    num_submitted = num_read = 0  # output tokens
    begun_s = time.perf_counter()
    while coming or num_read < num_submitted:
        now_s = time.perf_counter() - begun_s
        while coming and coming[0][1].arrival_s <= now_s:
            request_id, request = coming.popleft()
            peer.submit(request_id, request)
            num_submitted += request.output_len
        wait_s = coming[0][1].arrival_s - now_s if coming else None
        if num_read == num_submitted and wait_s is not None:
            time.sleep(wait_s)
            continue
        peer.advance(wait_s)
        for request_id, token_ids, times_s in peer.read():
            served[request_id].token_ids.extend(token_ids)
            served[request_id].times_s.extend(time_s - begun_s for time_s in times_s)
            num_read += len(token_ids)
    check_lengths(requests, served)
    return served


def check_lengths(requests: Sequence[TimedRequest], served: Sequence[ServedTokens]) -> None:
    for number, (request, one) in enumerate(zip(requests, served, strict=True)):
        if len(one.token_ids) != request.output_len:
            raise RuntimeError(
                f"request {number} got {len(one.token_ids)} tokens instead of {request.output_len}"
            )
