"""MLPerf's conversations of agents (mlcommons/endpoints): a message a line, those of a conversation
behind each other, in the form of `scripts/agentic_inference_dataset_schema.json`.

A row of a user or of tools is a request, after the messages before it; what the assistant said in
the record follows on it, whatever a model answers here. Values for the whole conversation stand in
its first row. As in the loader there (`agentic_inference_dataset.py`), a row of metadata says
nothing of requests, and `system` may stand in a later row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from magicdec.workload.prompt_sets import ASSISTANT, USER
from magicdec.workload.traces.chat_messages import TOOL, Name, ToolCall, refuse
from magicdec.workload.traces.reading import (
    OBJECT,
    STRICT,
    Length,
    Time,
    object_in,
    placed_lines,
)
from magicdec.workload.traces.sessions import ChatPrompt, MessageFields, Session, TracedRequest

CLIENT_KEYS = ("tools", "delay_seconds", "max_new_tokens", "max_completion_tokens")
OWN_KEYS = {
    USER: ("system", *CLIENT_KEYS),
    ASSISTANT: ("tool_calls", "reasoning_content"),
    TOOL: ("tool_results", *CLIENT_KEYS),
}
METADATA = "dataset_metadata"


@dataclass(frozen=True)
class ToolResult:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    tool_call_id: Name
    content: str


@dataclass(frozen=True)
class MLPerfRow:
    """`model` and `stream` say how the record was made. Another key would change what a model
    answers, and is refused."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    conversation_id: Name
    turn: Annotated[int, Field(ge=1)]
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_results: Annotated[list[ToolResult], Field(min_length=1)] | None = None
    reasoning_content: str | None = None
    delay_seconds: Time | None = None
    max_new_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    model: str | None = None
    stream: bool | None = None

    @property
    def most_new(self) -> int | None:
        return self.max_new_tokens or self.max_completion_tokens

    @property
    def messages(self) -> list[MessageFields]:
        """Those of the interface. As in servers, a content that is null is empty."""
        if self.role == TOOL:
            return [
                {"role": TOOL, "tool_call_id": result.tool_call_id, "content": result.content}
                for result in self.tool_results or ()
            ]
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls is not None:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return [message]


def roles_after(row: MLPerfRow | None) -> tuple[str, ...]:
    """The roles of which one must follow on a row; of None, of which one begins."""
    if row is None:
        return (USER,)
    if row.role == ASSISTANT:
        return (TOOL,) if row.tool_calls else (USER,)
    return (ASSISTANT,) if row.role == USER else (ASSISTANT, USER)


ROW = TypeAdapter(MLPerfRow)


def read(path: Path) -> Iterator[Session]:
    """A conversation is read when it is asked for, with the first row of the next."""
    reader: ConversationReader | None = None
    ends = dict[str, str]()  # where the conversations end that were read
    for place, line in placed_lines(path):
        if b'"_type"' in line and object_in(OBJECT, line, place).get("_type") == METADATA:
            continue
        row = object_in(ROW, line, place)
        if reader is not None and reader.name != row.conversation_id:
            yield reader.session()
            ends[reader.name] = reader.place
            reader = None
        if reader is None:
            if row.conversation_id in ends:
                reason = (
                    f"rows must stand behind each other, but ended in {ends[row.conversation_id]}"
                )
                refuse(place, "conversation_id", row.conversation_id, reason)
            reader = ConversationReader(row.conversation_id)
        reader.add(place, row)
    if reader is not None:
        yield reader.session()


@dataclass
class ConversationReader:
    """Reads the rows of a conversation in their order. `place` is that of the newest one; `asked`
    are the rows that ask for an answer, each with its place and the number of messages up to it,
    and `answers` what the record has, by the numbers of these rows."""

    name: str
    place: str = ""
    rows: list[MLPerfRow] = field(default_factory=list)
    messages: list[MessageFields] = field(default_factory=list)
    asked: list[tuple[str, MLPerfRow, int]] = field(default_factory=list)
    answers: dict[int, MessageFields] = field(default_factory=dict)
    system: str | None = None

    def add(self, place: str, row: MLPerfRow) -> None:
        """Raises ValueError for a row that cannot stand there."""
        self._check(place, row)
        if row.system is not None and self.system not in (None, row.system):
            refuse(place, "system", row.system, "an earlier row has another one")
        self.system = row.system if self.system is None else self.system
        if row.role == ASSISTANT:
            (self.answers[len(self.asked) - 1],) = row.messages
        self.messages += row.messages
        if row.role != ASSISTANT:
            self.asked.append((place, row, len(self.messages)))
        self.rows.append(row)
        self.place = place

    def _check(self, place: str, row: MLPerfRow) -> None:
        before = self.rows[-1] if self.rows else None
        if row.turn != len(self.rows) + 1:
            refuse(
                place,
                "turn",
                row.turn,
                f"it must be {len(self.rows) + 1}, as turns of a conversation follow on each other",
            )
        allowed = roles_after(before)
        if row.role not in allowed:
            behind = "first" if before is None else f"behind a row of {before.role}"
            calls = " with tool_calls" if before is not None and before.tool_calls else ""
            refuse(place, "role", row.role, f"{behind}{calls} it must be {' or '.join(allowed)}")
        for key in dict.fromkeys(key for keys in OWN_KEYS.values() for key in keys):
            if key not in OWN_KEYS[row.role] and getattr(row, key) is not None:
                raise ValueError(f"{place}: {key} is no key of a row of role {row.role}")
        is_empty = not row.content and not row.tool_calls
        if row.role != TOOL and is_empty:
            also = " or tool_calls" if row.role == ASSISTANT else ""
            raise ValueError(f"{place}: content{also} of a row of role {row.role} is missing")
        if row.role == TOOL:
            self._check_results(place, row, before)

    def _check_results(self, place: str, row: MLPerfRow, before: MLPerfRow | None) -> None:
        if row.content is not None:
            refuse(place, "content", row.content, f"a row of role {TOOL} has it in tool_results")
        if row.tool_results is None:
            raise ValueError(f"{place}: tool_results is missing")
        calls = [call.id for call in (before and before.tool_calls) or ()]
        for number, result in enumerate(row.tool_results):
            if result.tool_call_id not in calls:
                refuse(
                    place,
                    f"tool_results[{number}].tool_call_id",
                    result.tool_call_id,
                    f"the row before it calls {', '.join(calls)}",
                )

    def session(self) -> Session:
        """A request for each row that asks, after the one before it."""
        begin = [] if self.system is None else [{"role": "system", "content": self.system}]
        first = self.rows[0]
        requests = []
        for number, (place, row, count) in enumerate(self.asked):
            tools = first.tools if row.tools is None else row.tools
            prompt = ChatPrompt(
                (*begin, *self.messages[:count]),
                tuple(tools) if tools else None,
                self.answers.get(number),
            )
            requests.append(
                TracedRequest(
                    place,
                    prompt,
                    row.most_new or first.most_new,
                    (number - 1,) if number else (),
                    row.delay_seconds or 0.0,
                )
            )
        return Session(self.name, 0.0, tuple(requests), self.name, has_starts=False)
