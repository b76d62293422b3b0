"""ServerFormat: in which form another program reports its drafts, in an answer and in its counters;
and ServerApi: how it is asked for tokens, and for their log-probabilities. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import Counters

ServerEvent = dict[str, Any]
"""One of the JSON objects of a streamed answer."""
NOTHING = ReportedCounts(0, 0, 0, 0)  # of an answer that says that nothing was drafted


@dataclass(frozen=True)
class ReportedRates:
    """What an answer says of its drafts beside counts, by the server's own division: accepted /
    draft tokens, and the tokens of a verification."""

    acceptance_rate: float | None
    acceptance_length: float | None


@dataclass(frozen=True)
class ServerFormat:
    """`read` finds what an event says of the drafts of its request, and is None without a word.
    The names of counters begin with `prefix`; `generated` counts output tokens, and `total` makes
    the counts of a pass of counted differences and of its output tokens after the first of each
    request. `rates` finds the rates in an event, if there are any; `preemptions` counts how often
    requests lost their KV to others, to continue later. What reads counts and rates raises
    ValueError, one sentence, for what is no number."""

    read: Callable[[ServerEvent], ReportedCounts | None]
    prefix: str
    generated: str
    total: Callable[[Counters, int], ReportedCounts]
    rates: Callable[[ServerEvent], ReportedRates | None] = lambda event: None
    preemptions: str | None = None


@dataclass(frozen=True)
class AskedSampling:
    """How a server is to choose tokens: greedily, or at a temperature among the tokens that `top_k`
    and `top_p` leave."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a request, which servers name alike. What else would choose among tokens,
        by a server's or a model's own defaults, is off."""
        found: dict[str, Any] = {"temperature": self.temperature}
        if self.temperature:
            found |= {"top_k": self.top_k or -1, "top_p": self.top_p or 1.0, "min_p": 0.0}
        return found


GREEDILY = AskedSampling()


@dataclass(frozen=True)
class AskedText:
    """A request as it is sent: the token ids of its prompt, or their text. `keeps_prompt`: the
    server may keep the KV of prompts, and begin with what it has of this one. `num_logprobs`: of
    how many of the likeliest tokens it is to say the log-probability at each place."""

    model: str | None
    prompt: Sequence[int] | str
    max_tokens: int
    ignores_eos: bool
    keeps_prompt: bool = False
    sampling: AskedSampling = GREEDILY
    num_logprobs: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class ScoredToken:
    """A token of an output or of a given text, and log-probabilities at its place by token id: of
    the likeliest tokens and, if the server says it, of the token itself."""

    token_id: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True)
class TextScoring:
    """How a server scores a given text in one request, by a forward that never speculates. `body`
    asks of `ids` for the tokens from `first` on, with so many likeliest ones; `read` finds them in
    the answer."""

    body: Callable[[str | None, Sequence[int], int, int], dict[str, Any]]
    read: Callable[[ServerEvent, Sequence[int], int], list[ScoredToken]]


@dataclass(frozen=True)
class ServerApi:
    """An interface for streamed completions. `path` is below the URL, or with `is_at_root` below
    the URL without its `/v1`. `event` makes an event in OpenAI's form of one that was sent, given
    how many token ids came before. `is_last` tells an event after which none comes; without it the
    stream ends with `[DONE]`.

    `whole` makes the body of an answer that is not streamed, if a stream may lack ids that it has.

    `scores` are the log-probabilities in an event as it was sent; they and what `scoring` reads
    raise KeyError, TypeError, ValueError, IndexError or AttributeError for what has another form.
    `tokenize` asks `/tokenize` for the ids of a text, without special tokens."""

    path: str
    body: Callable[[AskedText], dict[str, Any]]
    event: Callable[[ServerEvent, int], ServerEvent]
    scores: Callable[[ServerEvent], list[ScoredToken]]
    tokenize: Callable[[str | None, str], dict[str, Any]]
    scoring: TextScoring | None = None
    whole: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    is_at_root: bool = False
    is_last: Callable[[ServerEvent], bool] = lambda event: False


def part_of(event: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The object of that name; None if there is none."""
    part = event.get(name)
    return part if isinstance(part, dict) else None


def cached_tokens(count: object) -> dict[str, Any]:
    """What OpenAI's `usage` has for the prompt tokens of which the server had the KV; nothing where
    it does not say that."""
    return {} if count is None else {"prompt_tokens_details": {"cached_tokens": count}}


def count_in(part: Mapping[str, Any], *names: str) -> int:
    """The count under the first of these names that `part` has."""
    name = next((candidate for candidate in names if candidate in part), names[0])
    return as_count(name, part.get(name))


def counts_in(part: Mapping[str, Any], *names: str) -> tuple[int, ...] | None:
    """The list of counts under the first of these names that `part` has; None without one."""
    name = next((candidate for candidate in names if part.get(candidate) is not None), None)
    if name is None:
        return None
    values = part[name]
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list of counts")
    return tuple(as_count(name, value) for value in values)


def rate_in(part: Mapping[str, Any], name: str) -> float | None:
    """The finite number of that name; None without one."""
    value = part.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name} is no number")
    return float(value)


def as_count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is no count")
    return value
