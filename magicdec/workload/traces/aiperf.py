"""AIPerf's custom data sets (ai-dynamo/aiperf, `src/aiperf/dataset/loader/models.py`): JSON lines
of the types whose prompts are known before anything is answered. As in AIPerf, all lines have one
type, which the first says by `type` or by its keys (`composer/custom.py`). Times are in ms.

Prompts that go on with the answers of the model that is measured are refused: of `multi_turn` with
several questions, of `message_mode` delta, and of `dag_jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from magicdec.workload.prompt_sets import ASSISTANT, USER
from magicdec.workload.traces.chat_messages import TOOL, Name, ToolCall, refuse
from magicdec.workload.traces.mooncake import BLOCK_SIZE
from magicdec.workload.traces.reading import (
    OBJECT,
    STRICT,
    Length,
    Time,
    check_order,
    object_in,
    placed_lines,
)
from magicdec.workload.traces.sessions import (
    ChatPrompt,
    MessageFields,
    Prompt,
    Session,
    TracedRequest,
    blocks_at,
)

LIVE = "its prompts go on with answers of the model that is measured"
ELSEWHERE = f"{LIVE}; --turns asks conversations of a prompt set so"


@dataclass(frozen=True)
class Asked:
    """What a line says of when a request comes, and of its session."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    timestamp: Time | None = field(default=None, kw_only=True)
    delay: Time | None = field(default=None, kw_only=True)
    session_id: Name | None = field(default=None, kw_only=True)
    output_length: Length | None = field(default=None, kw_only=True)
    type: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SingleTurn(Asked):
    """Lines of a session come one after the other, each for itself."""

    text: Name
    role: Literal["user"] | None = None

    def prompt(self, place: str) -> Prompt:
        return ChatPrompt(({"role": USER, "content": self.text},), is_text=True)


@dataclass(frozen=True)
class AIPerfTurn:
    """A turn of a conversation: its question, or the system's words before it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    text: Name
    role: Literal["user", "system"] | None = None
    timestamp: Time | None = None
    delay: Time | None = None
    output_length: Length | None = None


@dataclass(frozen=True)
class MultiTurn:
    """A conversation of one question, and what the system says before it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    turns: Annotated[list[AIPerfTurn], Field(min_length=1)]
    session_id: Name | None = None
    type: str | None = None

    @property
    def asked(self) -> AIPerfTurn:
        return self.turns[-1]

    @property
    def timestamp(self) -> float | None:
        return self.asked.timestamp

    @property
    def delay(self) -> float | None:
        return self.asked.delay

    @property
    def output_length(self) -> int | None:
        return self.asked.output_length

    def prompt(self, place: str) -> Prompt:
        for number, turn in enumerate(self.turns):
            is_last = number == len(self.turns) - 1
            if is_last == (turn.role == "system"):
                what = "the question is missing" if is_last else ELSEWHERE
                refuse(place, f"turns[{number}].text", turn.text, what)
            if not is_last and (number or turn.timestamp or turn.delay or turn.output_length):
                refuse(place, f"turns[{number}].role", turn.role, "it must begin a conversation")
        messages = [{"role": turn.role or USER, "content": turn.text} for turn in self.turns]
        return ChatPrompt(tuple(messages), is_text=len(messages) == 1)


@dataclass(frozen=True)
class MessageRow:
    """A message of OpenAI's interface; a content that is null is empty, as in servers."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: Name | None = None

    @property
    def message(self) -> MessageFields:
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for key in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls is not None:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message


@dataclass(frozen=True)
class MooncakeTrace(Asked):
    """A prompt by length and hash ids, as a text, or as the messages of the whole conversation."""

    input_length: Length | None = None
    hash_ids: tuple[int, ...] | None = None
    text_input: Name | None = None
    messages: Annotated[list[MessageRow], Field(min_length=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    message_mode: str = "history"

    def prompt(self, place: str) -> Prompt:
        given = [
            key
            for key in ("input_length", "text_input", "messages")
            if getattr(self, key) is not None
        ]
        if len(given) != 1:
            what = f"{' and '.join(given)} are there, of which one says the prompt"
            missing = "input_length, text_input or messages is missing"
            raise ValueError(f"{place}: {what if given else missing}")
        for key, owner in (("hash_ids", "input_length"), ("tools", "messages")):
            if getattr(self, key) is not None and owner not in given:
                raise ValueError(f"{place}: {key} is there without {owner}")
        if self.message_mode != "history":
            refuse(place, "message_mode", self.message_mode, ELSEWHERE)
        if self.input_length is not None:
            ids = self.hash_ids or ()
            return blocks_at(f"{place}: ", "input_length", ids, BLOCK_SIZE, self.input_length)
        if self.text_input is not None:
            return ChatPrompt(({"role": USER, "content": self.text_input},), is_text=True)
        rows = self.messages or []
        check_messages(place, rows)
        tools = None if self.tools is None else tuple(self.tools)
        return ChatPrompt(tuple(row.message for row in rows), tools)


def check_messages(place: str, rows: Sequence[MessageRow]) -> None:
    """Raises ValueError for results without calls, and for messages that ask nothing."""
    calls = set[str]()
    for number, row in enumerate(rows):
        key = f"messages[{number}]"
        if row.tool_calls is not None and row.role != ASSISTANT:
            refuse(place, f"{key}.role", row.role, f"only {ASSISTANT} has tool_calls")
        if (row.role == TOOL) != (row.tool_call_id is not None):
            refuse(place, f"{key}.role", row.role, f"{TOOL} alone has a tool_call_id")
        if row.tool_call_id is not None and row.tool_call_id not in calls:
            refuse(place, f"{key}.tool_call_id", row.tool_call_id, "no message before it calls it")
        calls.update(call.id for call in row.tool_calls or ())
    if rows[-1].role == ASSISTANT:
        refuse(place, f"messages[{len(rows) - 1}].role", ASSISTANT, "the last one must ask")


AIPerfRow = SingleTurn | MultiTurn | MooncakeTrace
ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "single_turn": TypeAdapter(SingleTurn),
    "multi_turn": TypeAdapter(MultiTurn),
    "mooncake_trace": TypeAdapter(MooncakeTrace),
}


def read(path: Path) -> Iterator[Session]:
    """A line is a session, read when it is asked for. Lines with a `session_id` are those of one
    wherever they stand, for which the whole file is read."""
    form = ""
    before = 0.0
    sessions: dict[str, list[tuple[str, AIPerfRow]]] | None = None
    for place, line in placed_lines(path):
        if not form:
            form = type_of(object_in(OBJECT, line, place), place)
        row: AIPerfRow = object_in(ADAPTERS[form], line, place)
        if row.type not in (None, form):
            refuse(place, "type", row.type, f"the lines before it are {form}")
        if row.timestamp is not None:
            check_order(f"{place}: ", "timestamp", row.timestamp, before)
            before = row.timestamp
        if row.session_id is None:
            yield session_of(place, [(place, row)])
            continue
        sessions = {} if sessions is None else sessions
        sessions.setdefault(row.session_id, []).append((place, row))
    for name, rows in (sessions or {}).items():
        yield session_of(name, rows)


def type_of(first: dict[str, Any], place: str) -> str:
    """The type of a file, by its first line. Raises ValueError for one that is not read."""
    stated = first.get("type")
    if isinstance(stated, str) and stated in ADAPTERS:
        return stated
    turns = first.get("turns")
    turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    if "orchestrator" in first or any("messages" in turn for turn in turns):
        raise ValueError(f"{place}: type 'dag_jsonl' is not read; {ELSEWHERE}")
    if "turns" in first:
        return "multi_turn"
    if "text" in first and stated is None:
        return "single_turn"
    if stated is None and {"input_length", "text_input", "messages", "message_mode"} & first.keys():
        return "mooncake_trace"
    keys = ", ".join(map(repr, first))[:80]
    what = f"type {stated!r}"[:60] if stated is not None else f"a line with {keys or 'no keys'}"
    raise ValueError(f"{place}: {what} is not read; choose from {', '.join(ADAPTERS)}")


def session_of(name: str, rows: Sequence[tuple[str, AIPerfRow]]) -> Session:
    """The requests of a session, each after the one before it and its `delay`."""
    begin_ms = rows[0][1].timestamp or 0.0
    requests = []
    for number, (place, row) in enumerate(rows):
        prompt = row.prompt(place)
        # Only messages, and lines of `single_turn`, say all that stands before their answer.
        whole = isinstance(row, SingleTurn) or (
            isinstance(row, MooncakeTrace) and row.messages is not None
        )
        if number and not whole:
            refuse(place, "session_id", name, ELSEWHERE)
        requests.append(
            TracedRequest(
                place,
                prompt,
                row.output_length,
                (number - 1,) if number else (),
                (row.delay or 0.0) / 1e3,
                max(0.0, (row.timestamp or 0.0) - begin_ms) / 1e3,
            )
        )
    has_starts = all(row.timestamp is not None for _, row in rows)
    return Session(name, begin_ms / 1e3, tuple(requests), has_starts=has_starts)
