"""Small trace files in the forms of Weka, Mooncake and MLPerf, made for tests, and the definition
of what a cache without limits has of their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Call = dict[str, Any]
BLOCK = 8
THINKING = st.sampled_from([None, 0.0, 0.02])


def call(t: float, length: int, ids: Sequence[int] | None = None, **more: Any) -> Call:
    """An API call of Weka's form. Without ids its blocks are 1, 2, 3 and so on."""
    blocks = list(range(1, length // BLOCK + 1)) if ids is None else list(ids)
    return {"t": t, "type": "n", "model": "m", "in": length, "out": 3, "hash_ids": blocks} | more


def agent(t: float, *calls: Call, **more: Any) -> Call:
    named = {"agent_id": "a", "subagent_type": "Explore", "status": "completed", "models": ["m"]}
    return {"t": t, "type": "subagent", "requests": list(calls)} | named | more


def weka(*requests: Call, **more: Any) -> dict[str, Any]:
    fixed = {"id": "s", "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local"}
    return fixed | {"requests": list(requests)} | more


def mooncake(timestamp: float, length: int, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    row = {"timestamp": timestamp, "input_length": length, "output_length": 3}
    return row | {"hash_ids": list(ids)} | more


def user(turn: int, content: str, **more: Any) -> dict[str, Any]:
    """A row of MLPerf's form, of conversation "c" unless `more` says another."""
    return {"conversation_id": "c", "turn": turn, "role": "user", "content": content} | more


def assistant(turn: int, content: str | None = None, *calls: str, **more: Any) -> dict[str, Any]:
    """With calls of a tool, by their ids."""
    row = {"conversation_id": "c", "turn": turn, "role": "assistant", "content": content} | more
    return row | ({"tool_calls": [tool_call(name) for name in calls]} if calls else {})


def tool_call(name: str, arguments: str = '{"at": [1, "é"]}') -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}


def tool(turn: int, *calls: str, **more: Any) -> dict[str, Any]:
    results = [{"tool_call_id": name, "content": f"saw <{name}>"} for name in calls]
    row = {"conversation_id": "c", "turn": turn, "role": "tool", "tool_results": results}
    return row | more


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
WORDS = st.sampled_from(["the cat", "sat", "on a mat.", "", "é 世", "cat the </s>", "\n\nx = [1]"])


@st.composite
def mlperf_rows(draw: st.DrawFn, most_answers: int = 3) -> list[dict[str, Any]]:
    """The rows of a few conversations, some with tools, thoughts, and a last row without answer."""
    rows = list[dict[str, Any]]()
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True)):
        delay = st.sampled_from([None, 0.0, 0.02])
        first = {"system": f"Be {name}."} if draw(st.booleans()) else {}
        own = [user(1, f"Ask {draw(WORDS)}", tools=TOOLS, **first)]
        for number in range(draw(st.integers(1, most_answers))):
            calls = [f"{number}.{k}" for k in range(draw(st.integers(0, 2)))]
            thought = {"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}
            text = draw(WORDS) if calls else f"So {draw(WORDS)}"
            own.append(assistant(len(own) + 1, text, *calls, **thought))
            turn = len(own) + 1
            asks = tool(turn, *calls) if calls else user(turn, f"And {draw(WORDS)}")
            own.append(asks | {"delay_seconds": draw(delay)})
        if draw(st.booleans()):
            own.pop()  # the record ends on an answer
        rows += [row | {"conversation_id": name} for row in own]
    return rows


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@st.composite
def weka_traces(draw: st.DrawFn, most_calls: int = 5, most_blocks: int = 6) -> dict[str, Any]:
    """A session whose calls begin with what earlier ones had in common, some by sub-agents."""
    newest = 0
    known: list[list[int]] = [[]]

    def prompt(t: float) -> Call:
        nonlocal newest
        before = draw(st.sampled_from(known))
        ids = before[: draw(st.integers(0, len(before)))]
        for _ in range(draw(st.integers(0, most_blocks - min(most_blocks, len(ids))))):
            newest += 1
            ids = [*ids, newest]
        known.append(ids)
        length = max(1, len(ids) * BLOCK + draw(st.integers(0, BLOCK - 1)))
        return call(t, length, ids, out=draw(st.integers(1, 6)), think_time=draw(THINKING))

    requests = list[Call]()
    t = 0.0
    for _ in range(draw(st.integers(1, most_calls))):
        if draw(st.integers(0, 3)) == 0 and requests:
            inner = [prompt(t + number) for number in range(draw(st.integers(1, 2)))]
            requests.append(agent(t, *inner, duration_ms=draw(st.sampled_from([0.0, 5e3, 1e6]))))
        else:
            requests.append(prompt(t))
        t += draw(st.sampled_from([0.0, 1.0, 10.0]))
    return weka(*requests)


def known_by_definition(timed: Sequence[tuple[str, Sequence[int], int]]) -> list[int]:
    """Of requests in the order of time, by namespace, ids and length: the tokens of the longest
    beginning of whose blocks each is one of an earlier request."""
    found = []
    for number, (namespace, ids, length) in enumerate(timed):
        counts = [
            count
            for count in range(len(ids) + 1)
            if all(
                any(
                    hash_id in other_ids
                    for other, other_ids, _ in timed[:number]
                    if other == namespace
                )
                for hash_id in ids[:count]
            )
        ]
        found.append(min(max(counts) * BLOCK, length))
    return found
