"""Traces of sessions: what their files say, what is refused in one line, how they are scaled, what
a cache without limits would have of them, and that equal blocks are equal text."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import (
    BLOCK,
    agent,
    assistant,
    call,
    known_by_definition,
    mooncake,
    tool,
    tool_call,
    user,
    weka,
    weka_traces,
    write_lines,
)

from magicdec.names import TRACES
from magicdec.workload.request_shapes import RequestShape
from magicdec.workload.traces.block_texts import BlockTexts
from magicdec.workload.traces.replay import Replay
from magicdec.workload.traces.sessions import (
    Blocks,
    Session,
    known_tokens,
    parse_scale,
    read_sessions,
)

BOS = 1


def sessions_of(tmp_path: Path, form: str, *rows: Any, most: int | None = None) -> list[Session]:
    path = write_lines(tmp_path / "t.jsonl", rows)
    return read_sessions(f"--arrival {form}", form, path, most)


def blocks_in(session: Session) -> list[Blocks]:
    return [request.prompt for request in session.requests]


def test_an_agent_waits_for_its_sub_agents(tmp_path: Path) -> None:
    """Those that have ended by then. Their own calls follow on the agent's, and on each other."""
    (session,) = sessions_of(
        tmp_path,
        "weka",
        weka(
            call(2.0, 16, api_time=3.0),
            agent(7.0, call(0.0, 8, api_time=1.0), call(2.5, 8, think_time=0.5), duration_ms=4000),
            agent(8.0, call(8.5, 8), duration_ms=90_000),
            call(20.0, 24, think_time=1.0, api_time=2.0),
            call(30.0, 32),
            call(40.0, 32, think_time=0.25),
            call(120.0, 32, think_time=0.25),
        ),
    )
    found = [(r.branch, r.after, r.wait_s, r.start_s) for r in session.requests]
    assert found == [
        (0, (), 2.0, 0.0),
        (1, (0,), 2.0, 5.0),  # from 5 on the agent's call has ended, the sub-agent begins at 7
        (1, (1,), 0.5, 7.5),
        (2, (0,), 3.5, 6.5),
        (0, (0, 2), 10.5, 18.0),  # the first sub-agent has ended, its last call at 9.5
        (0, (4,), 8.0, 28.0),  # it says no time of thinking
        (0, (5,), 0.25, 38.0),
        (0, (6, 3), 80.0, 118.0),  # the second has ended too
    ]
    assert [request.place.rpartition(", ")[2] for request in session.requests][1] == (
        "requests[1].requests[0]"
    )
    plans = Replay((session,), "think").plans()
    assert [plan.number for plan in plans[0]] == [1, 1, 2, 1, 2, 3, 4, 5]


def test_a_folder_has_a_session_a_file_and_a_file_is_read_no_further(tmp_path: Path) -> None:
    for name, length in (("b", 16), ("a", 8)):
        (tmp_path / f"{name}.json").write_text(json.dumps(weka(call(0, length)), indent=1))
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "notes.txt").write_text("no trace")
    first, second = read_sessions("--arrival weka", "weka", tmp_path, 2)
    assert [blocks_in(session)[0].length for session in (first, second)] == [8, 16]
    assert first.namespace != second.namespace
    with pytest.raises(ValueError, match=r"--arrival weka: .*/c\.json: it is "):
        read_sessions("--arrival weka", "weka", tmp_path)
    rows = [mooncake(50, 600, [4, 5]), mooncake(350, 40, []), "no row"]
    sessions = sessions_of(tmp_path, "mooncake", *rows, most=2)
    assert [(s.begin_s, len(s.requests), s.namespace) for s in sessions] == [
        (0, 1, ""),
        (0.3, 1, ""),
    ]
    assert blocks_in(sessions[0]) == [Blocks((4, 5), 512, 600)]


WEKA_REFUSALS = {
    '{"id": 3}': "line 1: id is 3; it must be a valid string",
    "[": "line 1: it is ",
    "null": "line 1: it is null; ",
    json.dumps(weka(call(0, 9), more=1)): "line 1: more is no key that is known here",
    json.dumps(weka(call(0, 9, extra="x"))): "requests[0].extra is no key that is known here",
    json.dumps(weka({"t": 0, "type": "n"})): "requests[0].model is missing",
    json.dumps(weka(call(0, 9) | {"type": "z"})): 'requests[0].type is "z"; ',
    json.dumps(weka(call(0, 9), hash_id_scope="global")): 'hash_id_scope is "global"; ',
    json.dumps(weka(call(0, 9), block_size=0)): "block_size is 0; it must be greater than or equal",
    json.dumps(weka()): "line 1: requests is empty",
    json.dumps(weka(call(-1, 9))): "requests[0].t is -1; it must be greater than or equal to 0",
    json.dumps(weka(call(0, 9, think_time=-2))): "requests[0].think_time is -2; it must be greater",
    json.dumps(weka(call(0, 9, api_time="3"))): 'requests[0].api_time is "3"; it must be a valid',
    json.dumps(weka(call(0, 0, []))): "requests[0].in is 0; it must be greater than or equal to 1",
    json.dumps(weka(call(0, 1 << 41, []))): "requests[0].in is 2199023255552; it must be less than",
    json.dumps(weka(call(0, 9, [1.5]))): "requests[0].hash_ids[0] is 1.5; it must be a valid integ",
    json.dumps(
        weka(call(5, 9), call(4, 9))
    ): "requests[1].t 4 is earlier than the one before it, 5",
    json.dumps(weka(call(0, 24, [1]))): "requests[0].hash_ids has 1 ids, but in 24 has 3 blocks of",
    json.dumps(weka(call(0, 25, [1] * 5))): "hash_ids has 5 ids, but in 25 has 3 or 4 blocks of 8",
    json.dumps(weka(agent(0, call(3, 8), call(1, 8)))): "requests[0].requests[1].t 1 is earlier",
    json.dumps(weka(agent(0, call(3, 8, out=-1)))): "requests[0].requests[0].out is -1; it must be",
    json.dumps(weka(agent(0, duration_ms=-1))): "requests[0].duration_ms is -1; it must be greater",
    '{"id": NaN}': "line 1: ",
    '{"id": "' + "[" * 9 + '"}' + "{": "line 1: it is ",
    "[" * 100_000: "line 1: it is ",
    '{"id": "\\ud800"}': "line 1: ",
    json.dumps(weka(call(0, 9))).replace('"in": 9', '"in": 9e999'): "line 1: ",
    json.dumps(weka(call(0, 9))).replace("[1]", f"[{'9' * 4400}]"): "line 1: ",
}
MOONCAKE_REFUSALS = {
    json.dumps(mooncake(-5, 9, [1])): "line 1: timestamp is -5; it must be greater than or equal",
    json.dumps(mooncake(0, 0, [])): "line 1: input_length is 0; it must be greater than or equal",
    json.dumps(
        mooncake(0, 1100, [1])
    ): "line 1: hash_ids has 1 ids, but input_length 1100 has 2 or",
    json.dumps(mooncake(0, 600, [1], key=2)): "line 1: key is no key that is known here",
    '{"timestamp": 0}': "line 1: input_length is missing",
    "{}\n": "line 1: timestamp is missing",
    "": " has no requests",
    "\n\n": " has no requests",
    "\x00\xff": "line 1: it is ",
    "\n\n".join(json.dumps(mooncake(ms, 9, [1])) for ms in (9, 8)): "line 3: timestamp 8 is "
    "earlier than the one before it, 9",
}


def lines(*rows: Any) -> str:
    return "\n".join(map(json.dumps, rows))


CALLED = (user(1, "q"), assistant(2, None, "a", "b"))
MLPERF_REFUSALS = {
    lines(user(1, "q"))[:-1]: "line 1: it is ",
    '{"content": "\\user@example.com"}': "line 1: it is ",
    "[1]": "line 1: it is [1]; ",
    "": " has no requests",
    lines({"_type": "dataset_metadata", "version": 1}): " has no requests",
    lines({"_type": "other"} | user(1, "q")): "line 1: _type is no key that is known here",
    lines(user(1, "q", temperature=0.7)): "line 1: temperature is no key that is known here",
    lines(user(1, "q") | {"role": "bot"}): "line 1: role is \"bot\"; it must be 'user', 'assista",
    lines({"turn": 1, "role": "user", "content": "q"}): "line 1: conversation_id is missing",
    lines(user(1, "q", conversation_id="")): 'line 1: conversation_id is ""; it must ',
    lines(user(0, "q")): "line 1: turn is 0; it must be greater than or equal to 1",
    lines(user(1, "q", conversation_id=5)): "line 1: conversation_id is 5; it must be a valid str",
    lines(user(2, "q")): "line 1: turn is 2; it must be 1, as turns of a conversation follow on",
    lines(user(1, "q"), assistant(3, "x")): "line 2: turn is 3; it must be 2, as turns of a conv",
    lines(user(1, "q"), assistant(1, "x")): "line 2: turn is 1; it must be 2, as turns of a conv",
    lines(
        user(1, "q"), user(1, "q", conversation_id="d"), assistant(2, "x")
    ): 'line 3: conversation_id is "c"; rows must stand behind each other, but ended in ',
    lines(assistant(1, "x")): 'line 1: role is "assistant"; first it must be user',
    lines(user(1, "q"), user(2, "q")): 'line 2: role is "user"; behind a row of user it must be as',
    lines(user(1, "q"), assistant(2, "x"), tool(3, "a")): 'role is "tool"; behind a row of assist',
    lines(*CALLED, user(3, "q")): 'line 3: role is "user"; behind a row of assistant with tool_cal',
    lines(
        *CALLED, tool(3, "a", "z")
    ): 'line 3: tool_results[1].tool_call_id is "z"; the row before it calls a, b',
    lines(*CALLED, tool(3)): "line 3: tool_results is []; ",
    lines(*CALLED, tool(3, "a", content="x")): 'line 3: content is "x"; a row of role tool has it',
    lines(*CALLED, tool(3) | {"tool_results": None}): "line 3: tool_results is missing",
    lines(*CALLED, tool(3, "a", delay_seconds=-0.1)): "line 3: delay_seconds is -0.1; it must be g",
    lines(user(1, "q"), assistant(2, "x", delay_seconds=1)): "line 2: delay_seconds is no key of a",
    lines(user(1, "q", tool_calls=[tool_call("a")])): "line 1: tool_calls is no key of a row of ro",
    lines(user(1, "")): "line 1: content of a row of role user is missing",
    lines(user(1, "q"), assistant(2)): "line 2: content or tool_calls of a row of role assistant",
    lines(
        user(1, "q"), assistant(2, tool_calls=[tool_call("a") | {"type": "code"}])
    ): 'line 2: tool_calls[0].type is "code"; ',
    lines(user(1, "q"), assistant(2, tool_calls=[{"id": "a", "type": "function"}])): "line 2: tool_"
    "calls[0].function is missing",
    lines(user(1, "q", max_new_tokens=0)): "line 1: max_new_tokens is 0; it must be greater than",
    lines(
        user(1, "q", system="one"), assistant(2, "x"), user(3, "q", system="other")
    ): 'line 3: system is "other"; an earlier row has another one',
    lines(user(1, "q", tools="bash")): 'line 1: tools is "bash"; it must be a valid ',
}


ASK = {"role": "user", "content": "q"}
AIPERF_REFUSALS = {
    "{": "line 1: it is ",
    "[1]": "line 1: it is [1]; ",
    "": " has no requests",
    "{}": "line 1: a line with no keys is not read; choose from single_turn, multi_turn, mooncake",
    lines({"payload": {}}): "line 1: a line with 'payload' is not read; choose from single_turn, m",
    lines({"type": "random_pool", "text": "a"}): "line 1: type 'random_pool' is not read; choose ",
    lines(
        {"chat_id": 1, "timestamp": 0, "input_length": 3, "output_length": 2, "type": "text"}
    ): "line 1: type 'text' is not read; choose from single_turn",
    lines({"session_id": "a", "turns": [{"messages": [ASK]}]}): "line 1: type 'dag_jsonl' is not r",
    lines(
        {"session_id": "a", "orchestrator": True}
    ): "line 1: type 'dag_jsonl' is not read; its pr",
    lines({"turns": [3]}): "line 1: turns[0] is 3; it must be ",
    lines({"turns": []}): "line 1: turns is []; ",
    lines(
        {"turns": [{"text": "a"}, {"text": "b"}]}
    ): 'line 1: turns[0].text is "a"; its prompts go',
    lines({"turns": [{"role": "system", "text": "a"}]}): 'line 1: turns[0].text is "a"; the questi',
    lines(
        {"turns": [{"role": "system", "text": "a", "delay": 3}, {"text": "b"}]}
    ): 'line 1: turns[0].role is "system"; it must begin a conversation',
    lines({"turns": [{"role": "assistant", "text": "a"}]}): 'turns[0].role is "assistant"; it must',
    lines({"text": "a", "image": "b"}): "line 1: image is no key that is known here",
    lines({"text": "a", "extra": {"seed": 1}}): "line 1: extra is no key that is known here",
    lines({"text": ""}): 'line 1: text is ""; it must ',
    lines({"text": "a", "role": "system"}): "line 1: role is \"system\"; it must be 'user'",
    lines({"text": "a", "delay": -4}): "line 1: delay is -4; it must be greater than or equal to 0",
    lines({"text": "a", "output_length": 0}): "line 1: output_length is 0; it must be greater than",
    lines({"text": "a"}, {"input_length": 4}): "line 2: text is missing",
    lines(
        {"text": "a"}, {"text": "a", "type": "multi_turn"}
    ): 'line 2: type is "multi_turn"; the l',
    lines(
        {"text": "a", "timestamp": 5}, {"text": "b", "timestamp": 4}
    ): "line 2: timestamp 4 is earlier than the one before it, 5",
    lines({"input_length": 1100, "hash_ids": [1]}): "hash_ids has 1 ids, but input_length 1100 has",
    lines({"text_input": "a", "hash_ids": [1]}): "line 1: hash_ids is there without input_length",
    lines({"text_input": "a", "tools": [{}]}): "line 1: tools is there without messages",
    lines(
        {"text_input": "a", "input_length": 4}
    ): "line 1: input_length and text_input are there, ",
    lines({"message_mode": "history"}): "line 1: input_length, text_input or messages is missing",
    lines({"messages": [ASK], "message_mode": "delta"}): 'line 1: message_mode is "delta"; its pro',
    lines({"messages": []}): "line 1: messages is []; ",
    lines({"messages": [ASK | {"role": "bot"}]}): 'line 1: messages[0].role is "bot"; it must be',
    lines({"messages": [ASK | {"content": [{"type": "text"}]}]}): "messages[0].content is [{",
    lines(
        {"messages": [ASK, ASK | {"role": "assistant"}]}
    ): 'messages[1].role is "assistant"; the ',
    lines(
        {"messages": [ASK, {"role": "tool", "tool_call_id": "a", "content": "x"}]}
    ): 'line 1: messages[1].tool_call_id is "a"; no message before it calls it',
    lines(
        {"messages": [ASK | {"tool_call_id": "a"}]}
    ): 'messages[0].role is "user"; tool alone has',
    lines({"messages": [ASK | {"tool_calls": [tool_call("a")]}]}): "only assistant has tool_calls",
    lines(
        *[{"session_id": "a", "text_input": "x"}] * 2
    ): 'line 2: session_id is "a"; its prompts go on with answers of the model that is measured',
}


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [("weka", *case) for case in WEKA_REFUSALS.items()]
    + [("mooncake", *case) for case in MOONCAKE_REFUSALS.items()]
    + [("mlperf", *case) for case in MLPERF_REFUSALS.items()]
    + [("aiperf", *case) for case in AIPERF_REFUSALS.items()],
)
def test_what_no_trace_can_be_is_refused_in_one_line(
    tmp_path: Path, form: str, text: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError) as refused:
        read_sessions(f"--arrival {form}", form, path)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"--arrival {form}: {path}")
    assert len(str(refused.value)) < 400


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    for form in TRACES:
        with pytest.raises(ValueError, match=f"--arrival {form}: .*: No such file"):
            read_sessions(f"--arrival {form}", form, tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"has no file that ends in \.json, \.jsonl"):
        read_sessions("--arrival weka", "weka", tmp_path)
    for form in TRACES.keys() - {"weka"}:
        with pytest.raises(ValueError, match="Is a directory"):
            read_sessions(f"--arrival {form}", form, tmp_path)


@given(st.lists(weka_traces(), min_size=1, max_size=3), st.data())
def test_known_tokens_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, traces: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Each session of Weka's has ids of its own; of Mooncake's they are those of the file."""
    path = tmp_path_factory.mktemp("traces")
    sessions = sessions_of(path, "weka", *traces)
    timed = sorted(
        (session.begin_s + request.start_s, number, place)
        for number, session in enumerate(sessions)
        for place, request in enumerate(session.requests)
    )
    rows = []
    for _, number, place in timed:
        prompt = blocks_in(sessions[number])[place]
        rows.append((sessions[number].namespace, prompt.hash_ids, prompt.length))
    known = known_tokens(sessions)
    assert [known[number][place] for _, number, place in timed] == known_by_definition(rows)


def test_requests_of_a_file_know_each_others_blocks(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 1030, [7, 8, 9]),
        mooncake(0, 1024, [7, 8]),
        mooncake(5, 1400, [7, 9, 10]),
        mooncake(6, 520, [8, 11]),
        mooncake(7, 6, []),
    ]
    sessions = sessions_of(tmp_path, "mooncake", *rows)
    assert known_tokens(sessions) == [[0], [1024], [1024], [512], [0]]


def test_a_request_knows_what_came_before_it_in_time(tmp_path: Path) -> None:
    """Not what stands before it in the file."""
    trace = weka(call(0, 8), agent(1, call(9, 16, [2, 3])), call(5, 16, [2, 4]))
    assert known_tokens(sessions_of(tmp_path, "weka", trace)) == [[0, 8, 0]]


def test_sessions_begin_with_other_texts() -> None:
    """Also where the text repeats itself."""
    texts = BlockTexts("x", [1, 2, 3, 4] * 10, 0, None)
    prompts = [texts.prompt(name, Blocks((7,), 4, 4)) for name in "abcd"]
    assert len(set(prompts)) == 4


def test_scaling_has_one_rule(tmp_path: Path) -> None:
    """A block of 8 tokens has 2, what is beyond whole blocks and outputs are rounded, and times are
    a quarter. A last block that the prompt cuts keeps at least a token."""
    trace = weka(
        call(4.0, 21, out=9),
        call(8.0, 8 * 3, think_time=2.0, out=1),
        call(9.0, 17, [1, 2, 9], out=6),
        call(9.0, 3, [], out=6),
    )
    (session,) = (s.scaled(Fraction(1, 4)) for s in sessions_of(tmp_path, "weka", trace))
    assert blocks_in(session) == [
        Blocks((1, 2), 2, 5),
        Blocks((1, 2, 3), 2, 6),
        Blocks((1, 2, 9), 2, 5),
        Blocks((), 2, 1),
    ]
    assert [request.output_len for request in session.requests] == [2, 1, 2, 2]
    assert [request.wait_s for request in session.requests] == [1.0, 0.5, 0.25, 0.0]
    assert [request.start_s for request in session.requests] == [0.0, 1.0, 1.25, 1.25]
    (same,) = (s.scaled(Fraction(1)) for s in sessions_of(tmp_path, "weka", trace))
    assert [blocks.length for blocks in blocks_in(same)] == [21, 24, 17, 3]
    with pytest.raises(ValueError) as refused:
        session.scaled(Fraction(1, 3))
    assert "requests[0] has 2 tokens, which would be no whole number" in str(refused.value)
    for text in ("0", "1/0", "-1/2", "1/", "x", "1e3", "0.0", "9" * 99, "1/2/3", "inf"):
        with pytest.raises(ValueError, match=r"--scale .* is not known; choose a number above 0"):
            parse_scale(text)
    assert parse_scale("0.25") == parse_scale("1/4") == Fraction(1, 4)


@given(weka_traces(), st.sampled_from([1, 2, 4, 8]))
def test_scaled_prompts_keep_their_blocks(
    tmp_path_factory: pytest.TempPathFactory, trace: dict[str, Any], divisor: int
) -> None:
    (session,) = sessions_of(tmp_path_factory.mktemp("traces"), "weka", trace)
    small = session.scaled(Fraction(1, divisor))
    for before, after in zip(blocks_in(session), blocks_in(small), strict=True):
        assert after.hash_ids == before.hash_ids and after.block_size == BLOCK // divisor
        assert abs(after.length - before.length / divisor) <= 1 and after.length >= 1
        assert after.num_in_blocks * divisor >= before.num_in_blocks - divisor


CORPUS = [2 + (7 * number + number * number // 11) % 90 for number in range(4000)]


@given(st.lists(weka_traces(), min_size=1, max_size=3), st.booleans(), st.sampled_from([1, 4]))
def test_equal_blocks_are_equal_text(
    tmp_path_factory: pytest.TempPathFactory,
    traces: list[dict[str, Any]],
    has_bos: bool,
    divisor: int,
) -> None:
    """And others differ, also in what follows BOS; of two sessions the first ones do."""
    read = sessions_of(tmp_path_factory.mktemp("traces"), "weka", *traces)
    sessions = [session.scaled(Fraction(1, divisor)) for session in read]
    texts = BlockTexts("x", CORPUS, 5, BOS if has_bos else None)
    size = BLOCK // divisor
    pieces = dict[tuple[str, int], tuple[int, ...]]()
    for session in sessions:
        for blocks in blocks_in(session):
            prompt = texts.prompt(session.namespace, blocks)
            assert len(prompt) == blocks.length
            assert not has_bos or prompt[0] == BOS
            for place, hash_id in enumerate(blocks.hash_ids):
                piece = prompt[place * size : (place + 1) * size]
                own = piece[1:] if has_bos else piece
                assert pieces.setdefault((session.namespace, hash_id), own) == own
    for session in sessions:
        own_pieces = [piece for (name, _), piece in pieces.items() if name == session.namespace]
        assert len(set(own_pieces)) == len(own_pieces)
    firsts = {
        pieces[session.namespace, blocks.hash_ids[0]]: session.namespace
        for session in sessions
        for blocks in blocks_in(session)
        if blocks.hash_ids
    }
    assert len(set(firsts.values())) == len(
        {s.namespace for s in sessions if any(b.hash_ids for b in blocks_in(s))}
    )


def test_new_blocks_go_on_in_the_text_and_follow_from_the_seed() -> None:
    corpus = list(range(100, 200))
    one, same, other = (BlockTexts("x", corpus, seed, None) for seed in (3, 3, 4))
    first = one.prompt("", Blocks((5, 6, 7), 4, 14))
    start = first[0]
    assert first == tuple(100 + (start - 100 + number) % 100 for number in range(14))
    assert one.prompt("", Blocks((5, 6, 8), 4, 12))[:8] == first[:8]
    assert same.prompt("", Blocks((5, 6, 7), 4, 14)) == first
    assert other.prompt("", Blocks((5, 6, 7), 4, 14)) != first
    with pytest.raises(ValueError) as refused:
        one.prompt("a", Blocks(tuple(range(101)), 1, 101))
    assert str(refused.value) == (
        "--dataset x has too few different blocks of 1 token for this trace, which needs more than "
        "100; choose a longer text or a larger --scale"
    )


def test_shapes_are_those_of_the_longest(tmp_path: Path) -> None:
    trace = weka(call(0, 21, out=2), call(1, 16, out=7))
    sessions = sessions_of(tmp_path, "weka", trace, weka(call(3, 8)))
    replay = Replay(tuple(sessions), "think")
    place = sessions[0].requests[0].place
    assert replay.shapes(None)[0] == RequestShape(0.0, 21, 7, place)
    assert [shape.arrival_ms for shape in replay.shapes([0.0, 40.0])] == [0.0, 40.0]
    replay.check_lengths(23, "--model m")
    with pytest.raises(ValueError) as refused:
        replay.check_lengths(22, "--model m")
    assert str(refused.value).endswith(
        "line 1, requests[0]: a prompt of 21 tokens and 2 new ones, after --scale, exceed the 22 "
        "positions of --model m; choose a smaller --scale"
    )
