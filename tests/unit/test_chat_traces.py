"""Traces of real text: the requests that a file of MLPerf's form has, their tokens, which are those
of transformers' chat templates, and the tokens of all modes, with and without a prefix cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import check_metrics
from test_batching import measured
from test_chat_template import CHATML, reference, write
from test_trace_replay import CACHED, check_arrivals, command_of
from trace_files import (
    BLOCK,
    TOOLS,
    assistant,
    mlperf_rows,
    tool,
    tool_call,
    user,
    write_lines,
)

from magicdec.kv import prefix_cache
from magicdec.workload import chat_template
from magicdec.workload.chat_template import ChatTemplate
from magicdec.workload.traces.chat_texts import ChatTexts, worded
from magicdec.workload.traces.replay import Replay
from magicdec.workload.traces.seen_texts import SeenTexts
from magicdec.workload.traces.sessions import (
    Blocks,
    ChatPrompt,
    Session,
    TokenPrompt,
    known_tokens,
    read_sessions,
)

WITH_TOOLS = """\
{%- if tools %}<s>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</s>{% endif %}
{%- for message in messages %}
{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' + message.role + ': ' }}
{%- if message.reasoning_content %}(thinks {{ message.reasoning_content }}){% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }}{% for name, value in call.function.arguments | items %}
 {{ name }}={{ value | tojson }}{% endfor %}</call>
{%- endfor %}</s>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# What begins an answer is no part of the answer that is recorded.
OTHERWISE = WITH_TOOLS.replace("prompt %}<|assistant|>", "prompt %}<|assistant|>(thinks ")


def sessions_of(path: Path, rows: list[Any], most: int | None = None) -> list[Session]:
    return read_sessions("--arrival mlperf", "mlperf", write_lines(path / "t.jsonl", rows), most)


def chats_in(sessions: list[Session]) -> list[ChatPrompt]:
    prompts = [request.prompt for session in sessions for request in session.requests]
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    return [prompt for prompt in prompts if isinstance(prompt, ChatPrompt)]


def test_a_row_of_a_user_or_a_tool_is_a_request(tmp_path: Path) -> None:
    """After what stands before it in the record, whose answer says how long its output is."""
    rows = [
        {"_type": "dataset_metadata", "num_conversations": 2},
        user(1, "q", system="s", tools=TOOLS, delay_seconds=9.0),
        assistant(2, None, "a", "b", reasoning_content="hm"),
        tool(3, "b", "a", delay_seconds=0.5, max_new_tokens=7),
        user(4, "more", name="Bob", model="m", stream=True),
        assistant(5, "done"),
        user(1, "other", conversation_id="d", max_completion_tokens=5),
        assistant(2, "x", conversation_id="d"),
        user(3, "y", conversation_id="d"),
        assistant(4, "z", conversation_id="d"),
        user(5, "z", conversation_id="d", max_new_tokens=6),
    ]
    first, second = sessions_of(tmp_path, rows)
    assert (first.name, second.name) == ("c", "d")
    found = [(r.after, r.wait_s, r.output_len) for r in first.requests]
    assert found == [((), 9.0, None), ((0,), 0.5, 7), ((1,), 0.0, None)]
    assert [request.place.rpartition(" ")[2] for request in first.requests] == ["2", "4", "5"]
    assert [request.output_len for request in second.requests] == [5, 5, 6]
    function = {"name": "look", "arguments": {"at": [1, "é"]}}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "saw <b>"},
        {"role": "tool", "tool_call_id": "a", "content": "saw <a>"},
        {"role": "user", "content": "more", "name": "Bob"},
        {"role": "assistant", "content": "done"},
    ]
    prompts = chats_in([first])
    assert [list(prompt.messages) for prompt in prompts] == [
        messages[:2],
        messages[:5],
        messages[:6],
    ]
    assert [prompt.answer for prompt in prompts] == [messages[2], None, messages[6]]
    assert all(list(prompt.tools or ()) == TOOLS for prompt in prompts)
    assert [prompt.tools for prompt in chats_in([second])] == [None, None, None]


@pytest.mark.parametrize("arguments", ["[1]", "no JSON", '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(tmp_path: Path, arguments: str) -> None:
    rows = [user(1, "q"), assistant(2, tool_calls=[tool_call("a", arguments)])]
    (prompt,) = chats_in(sessions_of(tmp_path, rows))
    assert prompt.answer is not None
    assert prompt.answer["tool_calls"][0]["function"]["arguments"] == arguments


def from_aiperf(path: Path, *rows: Any, most: int | None = None) -> list[Session]:
    return read_sessions("--arrival aiperf", "aiperf", write_lines(path / "t.jsonl", rows), most)


def test_lines_of_aiperf_are_sessions_of_their_own(tmp_path: Path) -> None:
    """Each is read when it is asked for, or those of a `session_id` with the whole file."""
    rows = [
        {"text": "a", "timestamp": 2000, "output_length": 5},
        {"text": "b", "timestamp": 2500, "type": "single_turn"},
        {"text": "c", "delay": 40},
        "broken",
    ]
    sessions = from_aiperf(tmp_path, *rows, most=3)
    found = [(s.begin_s, s.has_starts, s.requests[0].output_len) for s in sessions]
    assert found == [(2.0, True, 5), (2.5, True, None), (0.0, False, None)]
    assert sessions[2].requests[0].wait_s == 0.04
    prompts = chats_in(sessions)
    assert [prompt.messages for prompt in prompts] == [
        ({"role": "user", "content": text},) for text in "abc"
    ]
    assert all(prompt.is_text for prompt in prompts)
    rows = [{"text": text, "session_id": name} for text, name in ("ax", "by", "cx")]
    first, second = from_aiperf(tmp_path, *rows, {"text": "d", "session_id": "x", "delay": 500})
    assert [prompt.messages[0]["content"] for prompt in chats_in([first])] == ["a", "c", "d"]
    assert [(r.after, r.wait_s) for r in first.requests] == [((), 0.0), ((0,), 0.0), ((1,), 0.5)]
    assert (first.name, second.name) == ("x", "y")
    turns = [{"role": "system", "text": "s"}, {"text": "q", "output_length": 4, "timestamp": 9}]
    (session,) = from_aiperf(tmp_path, {"session_id": "x", "turns": turns})
    assert session.requests[0].output_len == 4 and session.has_starts
    (prompt,) = chats_in([session])
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert not prompt.is_text


def test_prompts_of_aiperfs_mooncake_traces_have_three_forms(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "q"}
    calls = {"role": "assistant", "content": None, "tool_calls": [tool_call("a")]}
    seen = {"role": "tool", "tool_call_id": "a", "content": "x"}
    blocks, text, short, full = from_aiperf(
        tmp_path,
        {"input_length": 600, "hash_ids": [4, 5], "output_length": 3, "timestamp": 0},
        {"text_input": "t", "timestamp": 1},
        {"messages": [ask], "tools": TOOLS, "timestamp": 2000},
        {"messages": [ask, calls, seen], "timestamp": 3000, "message_mode": "history"},
    )
    assert blocks.requests[0].prompt == Blocks((4, 5), 512, 600)
    assert chats_in([text])[0].is_text
    assert list(chats_in([short])[0].tools or ()) == TOOLS
    function = {"name": "look", "arguments": {"at": [1, "é"]}}
    called = {"id": "a", "type": "function", "function": function}
    assert list(chats_in([full])[0].messages) == [
        ask,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        seen,
    ]
    rows = [{"messages": [ask], "session_id": "s", "timestamp": ms} for ms in (500, 2000)]
    (session,) = from_aiperf(tmp_path, *rows)
    found = [(r.after, r.wait_s, r.start_s) for r in session.requests]
    assert found == [((), 0.0, 0.0), ((0,), 0.0, 1.5)] and session.has_starts


def test_a_file_is_read_as_far_as_conversations_are_asked_for(tmp_path: Path) -> None:
    rows = [user(1, "q"), user(1, "r", conversation_id="d"), "broken"]
    (session,) = sessions_of(tmp_path, rows, most=1)
    assert session.name == "c"
    with pytest.raises(ValueError, match=r"t\.jsonl, line 3: it is \"broken\"; "):
        sessions_of(tmp_path, rows)


@pytest.mark.parametrize("template", [WITH_TOOLS, OTHERWISE])
@given(mlperf_rows())
@settings(max_examples=8)
def test_tokens_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, template: str, rows: list[dict[str, Any]]
) -> None:
    """Of the same messages with the same tools; names of special tokens in them included."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = write(folder, template)
    prompts = chats_in(sessions_of(folder, rows))
    texts = ChatTexts(tokenizer, None, ChatTemplate(tokenizer))
    found = list(texts.of(["here"] * len(prompts), prompts))

    def expected(messages: Any, is_open: bool) -> list[int]:
        ids: list[int] = reference(template).apply_chat_template(
            list(messages), tools=TOOLS, add_generation_prompt=is_open, return_dict=False
        )
        return ids

    for prompt, text in zip(prompts, found, strict=True):
        assert list(text.ids) == expected(prompt.messages, True)
        if prompt.answer is None:
            assert text.answer_len is None
            continue
        answered = expected([*prompt.messages, prompt.answer], False)
        same = [one == other for one, other in zip(text.ids, answered, strict=False)]
        count = same.index(False) if False in same else len(same)
        assert text.answer_len == len(answered) - count


def test_many_chats_are_written_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MOST_CHATS", 2)
    rows = [user(1, "q")]
    for number in range(3):
        rows += [assistant(len(rows) + 1, f"a{number}"), user(len(rows) + 2, f"q{number}")]
    prompts = chats_in(sessions_of(tmp_path, rows))
    tokenizer = write(tmp_path, WITH_TOOLS)
    texts = ChatTexts(tokenizer, None, ChatTemplate(tokenizer))
    found = [tokenizer.decode(text.ids) for text in texts.of([""] * 4, prompts)]
    assert found[0] == "user: q" and found[3] == "user: qa0user: q0a1user: q1a2user: q2"


NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": WITH_TOOLS}]


@pytest.mark.parametrize("is_file", [False, True])
def test_chats_with_tools_take_the_template_for_them(tmp_path: Path, is_file: bool) -> None:
    tokenizer = write(tmp_path, NAMED)
    if is_file:
        tokenizer = write(tmp_path, None)
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    texts = ChatTexts(tokenizer, None, ChatTemplate(tokenizer))
    for tools, template in ((None, CHATML), (TOOLS, WITH_TOOLS)):
        more = {} if tools is None else {"tools": tools}
        (text,) = texts.of([""], chats_in(sessions_of(tmp_path, [user(1, "q", **more)])))
        expected = reference(template).apply_chat_template(
            [{"role": "user", "content": "q"}],
            tools=tools,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert list(text.ids) == expected


def test_without_a_template_words_name_the_speakers(tmp_path: Path) -> None:
    rows = [
        user(1, "Look.", system="Be kind.", tools=TOOLS),
        assistant(2, None, "a", reasoning_content="Hm."),
        tool(3, "a"),
    ]
    prompt = chats_in(sessions_of(tmp_path, rows))[1]
    assert worded(prompt) == (
        f"Tools: {json.dumps(TOOLS)}\n\nSystem: Be kind.\n\nUser: Look.\n\nAssistant: Hm.\n"
        '{"name": "look", "arguments": {"at": [1, "é"]}}\n\nTool: saw <a>\n\nAssistant:'
    )
    tokenizer = write(tmp_path, None)
    (text,) = ChatTexts(tokenizer, 7, None).of([""], [prompt])
    assert text.ids == (7, *tokenizer.encode(worded(prompt)))


CANNOT = {
    "{% for m in messages %}{{ m.content + (m.x if tools else '') }}{% endfor %}": "cannot be "
    "rendered (UndefinedError: ",
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}": "writes no call of look",
}


@pytest.mark.parametrize("template", CANNOT)
def test_a_template_that_cannot_write_a_chat_is_named_with_the_place(
    tmp_path: Path, template: str
) -> None:
    """One that knows no tools would leave calls out, and answers with them."""
    tokenizer = write(tmp_path, template)
    rows = [user(1, "look", tools=TOOLS), assistant(2, "ok", "a")]
    prompts = chats_in(sessions_of(tmp_path, rows))
    with pytest.raises(ValueError) as refused:
        list(ChatTexts(tokenizer, None, ChatTemplate(tokenizer)).of(["f, line 1"], prompts))
    assert str(refused.value).startswith(
        f"--prompt_format chat: f, line 1: the chat template in {tmp_path}/tokenizer_config.json "
        f"{CANNOT[template]}"
    )
    assert str(refused.value).endswith("; use --prompt_format plain")


IDS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=8)


@given(IDS)
def test_a_text_knows_the_longest_beginning_that_has_come(texts: list[tuple[int, ...]]) -> None:
    seen = SeenTexts()
    for number, text in enumerate(texts):
        counts = [
            count
            for count in range(len(text) + 1)
            if any(other[:count] == text[:count] for other in texts[:number])
        ]
        assert seen.add(text) == max(counts, default=0)


def test_texts_know_each_other_across_sessions(tmp_path: Path) -> None:
    """In the order of the file, where no times are recorded."""
    rows = [
        user(1, "the cat", system="s"),
        assistant(2, "sat"),
        user(3, "so"),
        user(1, "the mat", system="s", conversation_id="d"),
    ]
    replay = Replay(tuple(sessions_of(tmp_path, rows)), "think")
    tokenizer = write(tmp_path, WITH_TOOLS)
    replay = replay.with_texts(ChatTexts(tokenizer, None, ChatTemplate(tokenizer)), lambda: 9)
    prompts = [request.prompt for request in replay.requests]
    assert all(isinstance(prompt, TokenPrompt) for prompt in prompts)
    shared = reference(WITH_TOOLS)("<|user|>system: s</s><|user|>user: the ")["input_ids"]
    known = known_tokens(replay.sessions)
    # The answer begins with the token that ends the prompt.
    assert known == [[0, prompts[0].length], [len(shared)]]
    assert [request.output_len for request in replay.requests] == [3, 9, 9]


@pytest.fixture(scope="session")
def tiny_chat(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_checkpoint, folder)
    template = WITH_TOOLS.replace("<|user|>", "<s>").replace("<|assistant|>", "<s>")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def command(checkpoint: Path, folder: Path, rows: list[Any], *words: str) -> Any:
    """As `command_of`, without the text from which blocks would be cut."""
    return command_of(checkpoint, None, folder, "mlperf", rows, *words)


@settings(max_examples=3)
@given(mlperf_rows(), st.sampled_from(["think", "none"]), st.sampled_from(["plain", "chat"]))
def test_tokens_of_random_conversations_are_equal(
    tiny_chat: Path, rows: list[dict[str, Any]], waits: str, form: str
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "LEAST_COPIED", 1)
        words = ["--waits", waits, "--ignore_eos", "--prompt_format", form]
        replay = Replay(tuple(sessions_of(Path(name), rows)), waits)
        if replay.lacks_lengths:
            words += ["--gen_len", "3"]
        outputs = list[list[str]]()
        for more in ((), CACHED):
            served = measured(command(tiny_chat, Path(name), rows, *words, *more))
            for record in served.records:
                assert record.status == "verified", record.name
                assert check_metrics(record) == [], record.name
                check_arrivals(record, replay.sessions, waits)
                outputs.append(record.output_hashes)
        assert len(outputs) == 6 and all(output == outputs[0] for output in outputs)


TALKS = [
    user(1, "the cat sat", tools=TOOLS),
    assistant(2, None, "a"),
    tool(3, "a", delay_seconds=0.01),
    assistant(4, "on a mat"),
    user(1, "the cat ran", tools=TOOLS, conversation_id="d", max_new_tokens=3),
]


def test_a_cache_has_what_one_without_limits_has(
    tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole blocks, but for the last token of a prompt."""
    monkeypatch.setattr(prefix_cache, "LEAST_COPIED", 1000)
    words = ["--concurrency", "1", "--prompt_format", "chat", "--ignore_eos", *CACHED]
    served = measured(command(tiny_chat, tmp_path, TALKS, *words))
    for record in served.records:
        assert record.status == "verified" and check_metrics(record) == [], record.name
        assert record.workload.dataset == "mlperf:trace.jsonl"
        for request in record.requests:
            known = min(request.num_known_tokens or 0, request.prompt_len - 1)
            assert request.joined_prefix_tokens == [known // BLOCK * BLOCK], record.name
        assert [request.num_known_tokens > 0 for request in record.requests] == [False, True, True]
        assert record.requests[-1].output_len == 3


def test_texts_and_blocks_of_aiperf_are_served_beside_each_other(
    tiny_chat: Path, text_file: Path, tmp_path: Path
) -> None:
    rows = [
        {"timestamp": 0, "input_length": 600, "hash_ids": [4, 5], "output_length": 3},
        {"timestamp": 2, "text_input": "the cat sat on a mat"},
        {"timestamp": 3, "input_length": 514, "hash_ids": [4], "output_length": 3},
    ]
    words = ["--gen_len", "4", "--ignore_eos", *CACHED]
    served = measured(command_of(tiny_chat, text_file, tmp_path, "aiperf", rows, *words))
    for record in served.records:
        assert record.status == "verified" and check_metrics(record) == [], record.name
        assert [request.num_known_tokens for request in record.requests] == [0, 0, 512]
        assert [request.output_len for request in record.requests] == [3, 4, 3]
    with pytest.raises(
        ValueError, match="--prompt_format chat: the prompts of --arrival aiperf are"
    ):
        command_of(
            tiny_chat, text_file, tmp_path, "aiperf", rows, *words, "--prompt_format", "chat"
        )


@pytest.mark.wide
def test_every_kind_of_mode_replays_chats(tiny_chat: Path, tmp_path: Path) -> None:
    modes = ["sequential", "static", "inflight", "ring", "ring+draft", "pipeinfer"]
    words = ["--prompt_format", "chat", "--modes", *modes]
    records = measured(command(tiny_chat, tmp_path, TALKS, *words)).records
    assert [record.mode for record in records] == modes
    assert all((record.status, record.num_differing) == ("verified", 0) for record in records)


REFUSED = {
    "--scale 1/2": "--scale 1/2: the prompt of TRACE, line 1 is real text, of which a part would",
    "--waits start": "--waits start: TRACE does not say when its requests were sent; choose think",
    "--dataset demo": "--dataset does nothing here: the trace has texts of its own",
    "--skip_tokens 5": "--skip_tokens does nothing here: the trace has texts of its own",
    "--gen_len 5": "--gen_len does nothing here: the trace has the lengths",
    "--prefix_len 5": "--prefix_len does nothing here: the trace has the lengths",
    "--num_requests 3": "--num_requests 3: TRACE has 2; choose fewer",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_real_text_cannot_have_is_refused_in_one_line(
    words: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as refused:
        command(tiny_checkpoint, tmp_path, TALKS, *words.split())
    message = REFUSED[words].replace("TRACE", f"{tmp_path}/trace.jsonl")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_a_model_cannot_serve_is_refused_in_one_line(
    tiny_checkpoint: Path, tiny_chat: Path, tmp_path: Path
) -> None:
    for checkpoint, rows, message in (
        (
            tiny_checkpoint,
            TALKS,
            "--prompt_format chat: the tokenizer in MODEL has no chat template, neither "
            "chat_template.jinja nor a chat_template in tokenizer_config.json; use --prompt_format "
            "plain, or a model that is made for chats",
        ),
        (
            tiny_chat,
            [user(1, "the cat sat. " * 900, max_new_tokens=2)],
            "trace.jsonl, line 1: a prompt of ",
        ),
    ):
        with pytest.raises(ValueError) as refused:
            measured(command(checkpoint, tmp_path, rows, "--prompt_format", "chat"))
        assert message.replace("MODEL", str(checkpoint)) in str(refused.value)
        assert "\n" not in str(refused.value)
    assert "2 new ones exceed the 1024 positions of --model" in str(refused.value)
