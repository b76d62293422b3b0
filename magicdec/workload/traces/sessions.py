"""Sessions of agents' traces: what every format is read into, how a session is scaled to a smaller
machine, and how much of its prompts a cache without limits would have. Imports no torch.

A format has the blocks of its prompts (`Blocks`), whose text is made up, or the messages of chats
(`ChatPrompt`), whose tokens are known once the tokenizer of a model is (`TokenPrompt`).

A session is a tree of requests. One that follows on others waits until they have ended; the
requests of a sub-agent are a branch, which runs beside the agent that started it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from magicdec.names import TRACES, load_named
from magicdec.workload.request_shapes import MOST_TOKENS
from magicdec.workload.traces.seen_texts import SeenTexts

THINK = "think"
START = "start"
NO_WAITS = "none"
WAITS = (THINK, START, NO_WAITS)
MOST_DIGITS = 9  # of a number in `--scale`

MessageFields = Mapping[str, Any]


@dataclass(frozen=True)
class Blocks:
    """A prompt of `length` tokens by the ids of its blocks, of which equal ones are equal text. The
    last block may be cut by the end of the prompt, and tokens behind it are in no block."""

    hash_ids: tuple[int, ...]
    block_size: int
    length: int

    @property
    def num_in_blocks(self) -> int:
        """Tokens of the prompt that its blocks hold."""
        return min(self.length, len(self.hash_ids) * self.block_size)

    def scaled(self, scale: Fraction, place: str) -> Blocks:
        """With every whole block scaled, and what is left of the prompt rounded. Raises ValueError
        if a block would be no whole number of tokens."""
        size = self.block_size * scale
        if size.denominator > 1 and self.hash_ids:
            raise ValueError(
                f"--scale {scale}: a block of {place} has {self.block_size} tokens, which would be "
                f"no whole number; choose 1 over a divisor of {self.block_size}"
            )
        count = len(self.hash_ids)
        held = count if self.length >= count * self.block_size else count - 1
        rest = self.length - max(0, held) * self.block_size
        length = max(0, held) * int(size) if count else 0
        if rest:
            length += rounded(rest * scale, least=int(not count or held < count))
        return Blocks(self.hash_ids, max(1, int(size)), length)


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A prompt of real text: the messages before an answer, as OpenAI's interface has them, with
    the tools on offer. `answer` is the one that follows in the record, if any. A single message
    that `is_text` names no speaker where no chat template does. Its length is at least 1 until a
    tokenizer has made it a `TokenPrompt`."""

    messages: tuple[MessageFields, ...]
    tools: tuple[MessageFields, ...] | None = None
    answer: MessageFields | None = None
    is_text: bool = False
    length: ClassVar[int] = 1

    def scaled(self, scale: Fraction, place: str) -> NoReturn:
        """Raises ValueError: a part of a text is another text, with another answer."""
        raise ValueError(
            f"--scale {scale}: the prompt of {place} is real text, of which a part would be "
            "another text; leave it out, and choose fewer sessions by --num_requests or shorter "
            "waits by --longest_wait_s"
        )


@dataclass(frozen=True, eq=False)
class TokenPrompt:
    """A prompt by its token ids."""

    ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.ids)

    def scaled(self, scale: Fraction, place: str) -> NoReturn:
        raise AssertionError("texts are refused before they have tokens")


Prompt = Blocks | ChatPrompt | TokenPrompt


@dataclass(frozen=True)
class TracedRequest:
    """A request as a trace has it, at `place` of its file. `after` are the places in the session of
    the requests that must have ended before. `wait_s` comes then, of the user's thinking or of a
    tool; `start_s` is when it was recorded, after the session's begin. `branch` numbers the agents:
    0 is the session's own. `output_len` is None where the trace does not say it, until the tokens
    of the recorded answer are known."""

    place: str
    prompt: Prompt
    output_len: int | None
    after: tuple[int, ...] = ()
    wait_s: float = 0.0
    start_s: float = 0.0
    branch: int = 0


@dataclass(frozen=True, eq=False)
class Session:
    """The requests of an agent and its sub-agents; none comes before one that it follows. Hash ids
    of sessions with equal `namespace` name the same blocks. Not every format `has_starts`, the
    times at which its requests were recorded."""

    name: str
    begin_s: float
    requests: tuple[TracedRequest, ...]
    namespace: str = ""
    has_starts: bool = True

    def scaled(self, scale: Fraction) -> Session:
        """With block sizes, lengths and times scaled alike. Raises ValueError as
        `Blocks.scaled`."""
        if scale == 1:
            return self
        return replace(
            self,
            begin_s=float(self.begin_s * scale),
            requests=tuple(_scaled(request, scale) for request in self.requests),
        )


def _scaled(request: TracedRequest, scale: Fraction) -> TracedRequest:
    return replace(
        request,
        prompt=request.prompt.scaled(scale, request.place),
        output_len=request.output_len and rounded(request.output_len * scale, least=1),
        wait_s=float(request.wait_s * scale),
        start_s=float(request.start_s * scale),
    )


def rounded(number: Fraction, least: int) -> int:
    """The nearest whole number, a half upwards, but at least `least`."""
    return max(least, int(number + Fraction(1, 2)))


def parse_scale(text: str) -> Fraction:
    """The value of `--scale`. Raises ValueError."""
    number = rf"\d{{1,{MOST_DIGITS}}}"
    if re.fullmatch(rf"{number}(/{number}|\.{number})?", text):
        try:
            scale = Fraction(text)
        except ZeroDivisionError:
            scale = Fraction(0)
        if scale > 0:
            return scale
    raise ValueError(f"--scale {text} is not known; choose a number above 0, such as 1/64")


def read_sessions(flag: str, form: str, path: Path, most: int | None = None) -> list[Session]:
    """The first `most` sessions of a trace, or all; the file is read no further. The first session
    begins at 0. Raises ValueError, one line that names flag, file, place and key."""
    reader = load_named(TRACES, form)
    found: Iterator[Session] = reader(path)
    try:
        sessions = list(islice(found, most))
    except OSError as error:
        raise ValueError(f"{flag}: {error.filename or path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    if not sessions:
        raise ValueError(f"{flag}: {path} has no requests")
    begin_s = min(session.begin_s for session in sessions)
    return [replace(session, begin_s=session.begin_s - begin_s) for session in sessions]


def blocks_at(
    place: str, key: str, hash_ids: tuple[int, ...], block_size: int, length: int
) -> Blocks:
    """The prompt of these blocks. Raises ValueError, naming place and keys, if a prompt of `length`
    tokens, which stands at `key`, cannot have so many; without ids it may be any text."""
    least = length // block_size
    most = -(-length // block_size)
    if hash_ids and not least <= len(hash_ids) <= most:
        count = f"{least}" if least == most else f"{least} or {most}"
        raise ValueError(
            f"{place}hash_ids has {len(hash_ids)} ids, but {key} {length} has {count} blocks of "
            f"{block_size} tokens"
        )
    assert length <= MOST_TOKENS, "readers bound lengths"
    return Blocks(hash_ids, block_size, length)


def known_tokens(sessions: Sequence[Session]) -> list[list[int]]:
    """For each request of each session, the tokens that a cache without limits has when it comes:
    those of the longest beginning of its blocks that have all come before or, of a text, those
    with which another one began before it. Requests come in the order of their recorded times,
    without these in that of the file, and hash ids count within their namespace."""
    order = sorted(
        (session.begin_s + request.start_s, number, place)
        for number, session in enumerate(sessions)
        for place, request in enumerate(session.requests)
    )
    known = [[0] * len(session.requests) for session in sessions]
    seen = defaultdict[str, set[int]](set)
    texts = SeenTexts()
    for _, number, place in order:
        session = sessions[number]
        prompt = session.requests[place].prompt
        if not isinstance(prompt, Blocks):
            assert isinstance(prompt, TokenPrompt), "its tokens are known"
            known[number][place] = texts.add(prompt.ids)
            continue
        ids = seen[session.namespace]
        count = next(
            (at for at, hash_id in enumerate(prompt.hash_ids) if hash_id not in ids),
            len(prompt.hash_ids),
        )
        known[number][place] = min(count * prompt.block_size, prompt.length)
        ids.update(prompt.hash_ids)
    return known
