"""ServerFormat: in which form another program reports its drafts, in an answer and in its counters;
and ServerApi: how it is asked for tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.counters import Counters

ServerEvent = dict[str, Any]
"""One of the JSON objects of a streamed answer."""
NOTHING = ReportedCounts(0, 0, 0, 0)  # of an answer that says that nothing was drafted


@dataclass(frozen=True)
class ServerFormat:
    """`read` finds what an event says of the drafts of its request, and is None without a word.
    The names of counters begin with `prefix`; `generated` counts output tokens, and `total` makes
    the counts of a pass of counted differences and of its output tokens after the first of each
    request. Both raise ValueError, one sentence, for what is no number of drafts."""

    read: Callable[[ServerEvent], ReportedCounts | None]
    prefix: str
    generated: str
    total: Callable[[Counters, int], ReportedCounts]


@dataclass(frozen=True)
class AskedText:
    """A request as it is sent: the token ids of its prompt, or their text. `keeps_prompt`: the
    server may keep the KV of prompts, and begin with what it has of this one."""

    model: str | None
    prompt: Sequence[int] | str
    max_tokens: int
    ignores_eos: bool
    keeps_prompt: bool = False


@dataclass(frozen=True)
class ServerApi:
    """An interface for streamed completions. `path` is below the URL, or with `is_at_root` below
    the URL without its `/v1`. `event` makes an event in OpenAI's form of one that was sent, given
    how many token ids came before. `is_last` tells an event after which none comes; without it the
    stream ends with `[DONE]`."""

    path: str
    body: Callable[[AskedText], dict[str, Any]]
    event: Callable[[ServerEvent, int], ServerEvent]
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


def as_count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is no count")
    return value
