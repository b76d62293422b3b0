"""How an audited server is asked: for answers with all that it says of them, alone or several at
once, for scores of given texts, and for tokens of a text. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.connection import (
    METRICS_BYTES,
    PROMPT_BYTES,
    STREAM_BYTES,
    TOKEN_BYTES,
    Connection,
    Refused,
    is_same_server,
)
from magicdec.systems.servers.counters import Counters
from magicdec.systems.servers.details import formats
from magicdec.systems.servers.http_client import Server
from magicdec.systems.servers.server_format import (
    GREEDILY,
    AskedSampling,
    AskedText,
    ReportedRates,
    ScoredToken,
    as_count,
    part_of,
)

NUM_LOGPROBS = 20  # likeliest tokens at a place, the most that vLLM says by default
SCORE_BYTES = 1 << 12  # of an answer, for each token with its likeliest ones
T = TypeVar("T")


@dataclass
class ServerAnswer:
    """An answer to a prompt. `parts` are its events with tokens: seconds since it was asked for,
    and the number of tokens; empty if it came in one piece. `cached`: tokens of the prompt of which
    the server had the KV."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    parts: list[tuple[float, int]] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    counts: ReportedCounts | None = None
    rates: ReportedRates | None = None
    problem: str | None = None  # of the counts
    cached: int | None = None
    program: str | None = None  # in whose form the counts are

    @property
    def text_ids(self) -> list[int]:
        """The prompt and its answer."""
        return [*self.prompt_ids, *self.output_ids]


class NoScores(ValueError):
    """A server that does not say log-probabilities, or in a form that is not known."""


class AuditedServer:
    """A server whose model is `model`. All methods raise ValueError, one line naming it, if it
    fails; those that need log-probabilities `NoScores`."""

    def __init__(self, connection: Connection, model: str | None, metrics_url: str | None) -> None:
        self.connection = connection
        self.model = connection.find_model(model)
        self.metrics: Server | None = None
        if metrics_url is not None:
            is_same = is_same_server(metrics_url, connection.url)
            self.metrics = Server(metrics_url, connection.key if is_same else None)
        self.num_requests = 0
        started = f"{time.time_ns():x}"
        self.salts = (f"{started}-{number}" for number in count())

    def new_salt(self) -> str:
        """A salt that no request had."""
        return next(self.salts)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text."""
        c = self.connection
        size = STREAM_BYTES + PROMPT_BYTES * len(text)
        answer = c.post(c.root, "/tokenize", c.api.tokenize(self.model, text), size)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or {type(token) for token in tokens} - {int}:
            raise ValueError(f"{c.flag} answers /tokenize with no token ids: {c.shown(tokens)}")
        return tokens

    def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: AskedSampling = GREEDILY,
        *,
        salt: str | None = None,
        num_logprobs: int = 0,
        cancelled_after: int | None = None,
    ) -> ServerAnswer:
        """The answer to a prompt, without an early end; with `cancelled_after`, as far as it has
        come when the connection is closed after so many tokens. With a `salt`, the server begins
        with no KV that it had of the prompt."""
        c = self.connection
        self.num_requests += 1
        asked = AskedText(
            self.model,
            prompt,
            max_tokens,
            ignores_eos=True,
            keeps_prompt=salt is None,
            sampling=sampling,
            num_logprobs=num_logprobs,
            salt=salt,
        )
        found = ServerAnswer(tuple(prompt))
        size = STREAM_BYTES + PROMPT_BYTES * len(prompt)
        size += (TOKEN_BYTES + SCORE_BYTES * bool(num_logprobs)) * max_tokens
        limits = c.limits(size)
        started_s = time.monotonic()
        with closing(c.events(limits, c.api.body(asked))) as events:
            for sent in events:
                event = c.api.event(sent, len(found.output_ids))
                self._observe(found, event)
                if num_logprobs:
                    found.scores += self._read(partial(c.api.scores, sent))
                num_new = self._take(found, event, max_tokens)
                if num_new:
                    limits.progress()
                    found.parts.append((time.monotonic() - started_s, num_new))
                if cancelled_after is not None and len(found.output_ids) >= cancelled_after:
                    return found
        if len(found.output_ids) < max_tokens and c.api.whole is not None:
            found = self._whole_answer(asked, c.api.whole(c.api.body(asked)), size)
        if len(found.output_ids) != max_tokens:
            raise ValueError(
                f"{c.flag}: an answer has {len(found.output_ids)} token ids, not {max_tokens} as "
                "it was asked for"
            )
        return found

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        concurrency: int = 1,
        *,
        are_new: bool = False,
    ) -> list[ServerAnswer]:
        """The answers to prompts, so many of which are under way at once. If they `are_new`, the
        server begins with no KV that it had of them."""
        salts = [self.new_salt() if are_new else None for _ in prompts]
        pairs = zip(prompts, salts, strict=True)
        jobs = [partial(self.answer, prompt, max_tokens, salt=salt) for prompt, salt in pairs]
        return together(jobs, concurrency)

    def _whole_answer(
        self, asked: AskedText, body: dict[str, object], num_bytes: int
    ) -> ServerAnswer:
        """The answer in one piece, of which it is not known when its tokens came, because a stream
        lacked ids."""
        c = self.connection
        assert not isinstance(asked.prompt, str), "prompts are token ids"
        found = ServerAnswer(tuple(asked.prompt))
        sent = c.post(c.root if c.api.is_at_root else c.server, c.api.path, body, num_bytes)
        event = c.api.event(sent, 0)
        self._observe(found, event)
        if asked.num_logprobs:
            found.scores = self._read(partial(c.api.scores, sent))
        self._take(found, event, asked.max_tokens)
        return found

    def _take(self, found: ServerAnswer, event: dict[str, object], most: int) -> int:
        """Take the token ids of an event. Returns how many there are."""
        c = self.connection
        num_new = 0
        for choice in c.parts(event, "choices"):
            tokens = choice.get("token_ids") or []
            if not isinstance(tokens, list) or {type(token) for token in tokens} - {int}:
                raise ValueError(f"{c.flag} sends token_ids that are no ids: {c.shown(tokens)}")
            if choice.get("text") and not (tokens or found.output_ids):
                raise Refused(
                    f"{c.flag} sends the text of an answer and no token ids, without which nothing "
                    "can be judged; ask by an --endpoint_api that sends ids"
                )
            found.output_ids += tokens
            num_new += len(tokens)
        if len(found.output_ids) > most:
            raise ValueError(f"{c.flag}: an answer has more than {most} token ids")
        return num_new

    def _observe(self, found: ServerAnswer, event: dict[str, object]) -> None:
        """Note what an event says of drafts and of the prompt."""
        details = part_of(part_of(event, "usage") or {}, "prompt_tokens_details") or {}
        try:
            if (cached := details.get("cached_tokens")) is not None:
                found.cached = as_count("cached_tokens", cached)
            for name, form in formats().items():
                if (counts := form.read(event)) is not None:
                    found.counts = counts
                    found.program = name
                if (rates := form.rates(event)) is not None:
                    found.rates = rates
        except ValueError as error:
            found.problem = str(error)

    def _read(self, read: Callable[[], list[ScoredToken]]) -> list[ScoredToken]:
        try:
            return read()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            c = self.connection
            reason = c.shown(f"{type(error).__name__}: {error}")
            raise NoScores(
                f"{c.flag} says log-probabilities in an unknown form: {reason}"
            ) from None

    @property
    def scores_texts(self) -> bool:
        """Whether its interface has a request that scores a whole text."""
        return self.connection.api.scoring is not None

    def score_text(self, ids: Sequence[int], first: int) -> list[ScoredToken]:
        """The tokens of a text from `first` on, scored in one request by a forward that does not
        speculate."""
        c = self.connection
        assert c.api.scoring is not None, "its interface has such a request"
        body = c.api.scoring.body(self.model, ids, first, NUM_LOGPROBS)
        size = STREAM_BYTES + (PROMPT_BYTES + SCORE_BYTES) * len(ids)
        self.num_requests += 1
        try:
            answer = c.post(c.root if c.api.is_at_root else c.server, c.api.path, body, size)
        except Refused as error:
            raise NoScores(str(error)) from None
        scoring = c.api.scoring
        return self._read(lambda: scoring.read(answer, ids, first))

    def next_token(self, ids: Sequence[int], salt: str | None = None) -> ScoredToken:
        """The next token of a text, alone: it comes from the forward of the prompt, which does not
        speculate."""
        try:
            found = self.answer(ids, 1, salt=salt, num_logprobs=NUM_LOGPROBS)
        except Refused as error:
            raise NoScores(str(error)) from None
        if len(found.scores) != 1 or len(found.scores[0].logprobs) < 2:
            raise NoScores(f"{self.connection.flag} says no log-probabilities of likely tokens")
        return found.scores[0]

    def counters(self) -> Counters:
        """Its counters now."""
        assert self.metrics is not None, "asked only with --endpoint_metrics"
        sent = self.connection.text(self.metrics, "", METRICS_BYTES, "--endpoint_metrics")
        return Counters.read(sent.decode(errors="replace"))


def together(jobs: Sequence[Callable[[], T]], concurrency: int) -> list[T]:
    """The results of jobs of which so many are under way at once. Raises the first error, after the
    others that are under way have ended; Ctrl-C at once, and starts no more of them."""
    if concurrency == 1:
        return [job() for job in jobs]
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    for future in futures:
        if not future.cancelled():
            future.result()
    return [future.result() for future in futures]
