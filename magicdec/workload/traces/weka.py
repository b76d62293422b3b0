"""Weka's traces of coding agents (kv-cache-tester): a JSON object a session, in a file of its own,
in a line of a `.jsonl` file, or in one of the files of a folder. A session has API calls and
sub-agents, whose calls run beside it. Times are in seconds. Hash ids are those of the session.

Fields are those of AIPerf's loader (`weka_trace_models.py`). The times of a sub-agent's calls count
from its own start, or from that of the session, as in later corpora; they are told apart by its
first call, which is no earlier than the sub-agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from magicdec.output.files import MOST_LINE_BYTES, is_folder, read_bytes
from magicdec.workload.traces.reading import (
    STRICT,
    TAGS,
    Length,
    OutputLength,
    Time,
    check_order,
    object_in,
    objects_of,
)
from magicdec.workload.traces.sessions import Session, TracedRequest, blocks_at

SUFFIXES = (".json", ".jsonl")
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class ApiCall:
    """A request: `n`, or `s` where it was streamed."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    t: Time
    type: Literal["n", "s"]
    model: str
    input_length: Annotated[Length, Field(validation_alias="in")]
    output_length: Annotated[OutputLength, Field(validation_alias="out")]
    hash_ids: list[int] = field(default_factory=list)
    input_types: list[str] = field(default_factory=list)
    output_types: list[str] = field(default_factory=list)
    stop: str = ""
    api_time: Time | None = None
    think_time: Time | None = None
    ttft: Time | None = None

    @property
    def end_s(self) -> float:
        return self.t + (self.api_time or 0.0)


@dataclass(frozen=True)
class Subagent:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    t: Time
    type: Literal["subagent"]
    agent_id: str
    subagent_type: str
    status: str
    requests: list[ApiCall]
    models: list[str]
    duration_ms: Time | None = None
    total_tokens: Count | None = None
    tool_use_count: Count | None = None
    tool_tokens: Count = 0
    system_tokens: Count = 0


def kind_of(part: Any) -> str:
    """The tag of a part of a trace."""
    is_agent = isinstance(part, dict) and part.get("type") == "subagent"
    return TAGS[is_agent]


CallOrAgent = Annotated[
    Annotated[ApiCall, Tag(TAGS[0])] | Annotated[Subagent, Tag(TAGS[1])], Discriminator(kind_of)
]


@dataclass(frozen=True)
class WekaTrace:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    id: str
    models: list[str]
    block_size: Annotated[int, Field(ge=1, le=1 << 20)]
    hash_id_scope: Literal["local"]
    requests: list[CallOrAgent]
    tool_tokens: Count = 0
    system_tokens: Count = 0
    totals: dict[str, Any] | None = None


TRACE = TypeAdapter(WekaTrace)


def read(path: Path) -> Iterator[Session]:
    files = [path]
    if is_folder(path):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(SUFFIXES)}")
    for file in files:
        for place, trace in _traces_of(file):
            yield SessionReader(place, trace).session()


def _traces_of(path: Path) -> Iterator[tuple[str, WekaTrace]]:
    if path.suffix.lower() == ".jsonl":
        yield from objects_of(TRACE, path)
    else:
        yield str(path), object_in(TRACE, read_bytes(path, MOST_LINE_BYTES), str(path))


@dataclass
class SessionReader:
    """Reads the calls of a trace in their order. `agent_ends` are those of sub-agents that have run
    since the agent's last call: when each ended, and its last request."""

    place: str
    trace: WekaTrace
    requests: list[TracedRequest] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # of the requests, as recorded
    agent_ends: list[tuple[float, int]] = field(default_factory=list)
    num_branches: int = 1

    def session(self) -> Session:
        last: int | None = None  # the agent's newest request
        before_s = 0.0
        for number, call in enumerate(self.trace.requests):
            key = f"requests[{number}]"
            if isinstance(call, Subagent):
                self._add_subagent(call, key, last)
                continue
            check_order(f"{self.place}: {key}.", "t", call.t, before_s)
            before_s = call.t
            ended = [agent for agent in self.agent_ends if agent[0] <= call.t]
            self.agent_ends = [agent for agent in self.agent_ends if agent[0] > call.t]
            after = [*([] if last is None else [last]), *(request for _, request in ended)]
            # The agent has thought, or its sub-agents have worked, since its last call.
            last = self._add(call, key, after, 0, bool(ended))
        if not self.requests:
            raise ValueError(f"{self.place}: requests is empty")
        return Session(self.trace.id, 0.0, tuple(self._in_time()), self.place)

    def _add_subagent(self, agent: Subagent, key: str, last: int | None) -> None:
        """The calls of a sub-agent, which follow on the agent's newest request."""
        calls = agent.requests
        branch = self.num_branches
        self.num_branches += 1
        begin_s = agent.t if calls and calls[0].t < agent.t else 0.0
        after = [] if last is None else [last]
        before_s = 0.0
        for number, call in enumerate(calls):
            call_key = f"{key}.requests[{number}]"
            check_order(f"{self.place}: {call_key}.", "t", call.t, before_s)
            before_s = call.t
            at_s = begin_s + call.t
            after = [self._add(replace(call, t=at_s), call_key, after, branch, number == 0)]
        if calls:
            end_s = max(self.ends_s[after[0]], agent.t + (agent.duration_ms or 0.0) / 1e3)
            self.agent_ends.append((end_s, after[0]))

    def _add(self, call: ApiCall, key: str, after: Sequence[int], branch: int, is_gap: bool) -> int:
        """A request that follows on others, after its `think_time`, or with `is_gap`, and without
        one, after the time between their recorded ends and its start. Returns its place."""
        prompt = blocks_at(
            f"{self.place}: {key}.",
            "in",
            tuple(call.hash_ids),
            self.trace.block_size,
            call.input_length,
        )
        ready_s = max((self.ends_s[place] for place in after), default=0.0)
        gap_s = max(0.0, call.t - ready_s)
        think_s = call.think_time
        self.requests.append(
            TracedRequest(
                f"{self.place}, {key}",
                prompt,
                max(1, call.output_length),
                tuple(after),
                gap_s if is_gap or think_s is None else think_s,
                call.t,
                branch,
            )
        )
        self.ends_s.append(call.end_s)
        return len(self.requests) - 1

    def _in_time(self) -> list[TracedRequest]:
        """The requests with the first one at 0."""
        begin_s = min(request.start_s for request in self.requests)
        return [replace(request, start_s=request.start_s - begin_s) for request in self.requests]
