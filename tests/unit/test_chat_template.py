"""Prompts with a chat template: the ids of `transformers`, text that stays plain, lengths, and
every template that is refused. The tokenizer is made here, with words and special tokens of its
own."""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from conftest import Command
from serving_command import parse_as, prepare_as
from synthetic_records import drawn, with_fields
from test_workload import BOS, build, write_lines
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from magicdec.bench.report.listing import settings
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import CHAT, ModelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.model.presets.presets import demo_directory
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.records.describe import title_of
from magicdec.setup.prepare import SetupCache, complete, find, prepare
from magicdec.workload import chat_template
from magicdec.workload.chat_template import STAND_IN, ChatTemplate, Frame, Refusal
from magicdec.workload.prompt_sets import Roles

NAMES = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CONTENT = "{{ messages[0].content }}"
CHATML = """\
{%- for message in messages %}
    {{- '<|user|>' if message.role == 'user' else '' }}
    {% if message['content'] is string %}
{{ message['content'] | trim }}</s>
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}
    <|assistant|>
{% endif %}
"""
TEMPLATES = {
    "blocks": CHATML,
    "bos": "{{ bos_token }}[INST]\n{{ messages[0]['content'] }} [/INST]{{ eos_token }}",
    "undefined": "{{ pad_token }}{% if not tools %}<|user|>{{ messages[-1].content }}{% endif %}",
    "helpers": (
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ {'a<b': [1, 'é'], 'b': none} | tojson }}\n{{ strftime_now('%Y') }}"
        "<|user|>{{ messages[0].content }}</s>{{ ['x', 'y'] | tojson(indent=2) }}"
    ),
    "loops": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<|user|>"
        "{{ m.content }}</s>{% break %}{% endfor %}"
        "{% generation %}<|assistant|>\n{% endgeneration %}{% if documents %}no{% endif %}"
    ),
    "namespace": (
        "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}"
        "<|user|>{{ m.content }}{% endfor %}{{ '</s>' if ns.found }}"
    ),
}
TEXTS = ("the cat sat", "é 世界, 12 345\n\n  x = [1];", "x")


def make_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "th", "the", "at", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("Ġ", "the")]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(NAMES))
    return backend


def write(directory: Path, template: Any, **config: Any) -> Tokenizer:
    """The tokenizer of a directory whose config has the template."""
    directory.mkdir(exist_ok=True)
    make_backend().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None} | config
    config |= {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


def frame_of(directory: Path, template: Any, **config: Any) -> Frame:
    return ChatTemplate(write(directory, template, **config)).frame


def reference(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = write(tmp_path, TEMPLATES[name])
    frame = ChatTemplate(tokenizer).frame
    for text in TEXTS:
        chat = [{"role": "user", "content": text}]
        expected = reference(TEMPLATES[name]).apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert list(frame.around(tokenizer.encode(text))) == expected


def test_no_token_reaches_across_the_seam(tmp_path: Path) -> None:
    """A prompt is cut in tokens, so that its text has the same ones in every template; encoded
    together, " the" would be one."""
    tokenizer = write(tmp_path, "<s>[INST] " + CONTENT)
    frame = ChatTemplate(tokenizer).frame
    assert tokenizer.decode(frame.before) == "[INST] "
    ids = frame.around(tokenizer.encode("the cat"))
    assert tokenizer.decode(ids) == "[INST] the cat"
    assert len(ids) == 1 + len(tokenizer.encode("[INST] the cat")) + 1  # BOS and the blank


def test_special_tokens_of_the_text_stay_text(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, CHATML)
    special = {i for i, piece in tokenizer.pieces.items() if piece in NAMES}
    frame = ChatTemplate(tokenizer).frame
    assert [sum(i in special for i in ids) for ids in (frame.before, frame.after)] == [1, 2]
    text = "the </s><|assistant|> cat"
    ids = tokenizer.encode(text)
    assert not special & set(ids) and tokenizer.decode(ids) == text
    assert len(special & set(tokenizer.encode_with_special(text))) == 2
    assert tokenizer.encode(text) == ids  # also afterwards


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, "<s>{{ messages[0].content }}")
    (tmp_path / "chat_template.jinja").write_text("<|user|>{{ messages[0].content }}</s>")
    assert ChatTemplate(tokenizer).frame == frame_of(
        tmp_path / "b", "<|user|>{{ messages[0].content }}</s>"
    )
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate(tokenizer).frame.num_tokens == 2


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "<s>{{ messages[0].content }}"},
        {"name": "default", "template": CHATML},
    ]
    assert frame_of(tmp_path, named) == frame_of(tmp_path / "b", CHATML)


BAD = {
    "none": (None, "has no chat template, neither chat_template.jinja nor a chat_template in"),
    "number": (5, "is not a text"),
    "list": ([{"name": "rag", "template": "x"}], "is a list without one that is named 'default'"),
    "twice": (CONTENT * 2, "has the text 2 times unchanged, not once"),
    "never": ("<s>", "has the text 0 times unchanged, not once"),
    "upper": ("{{ messages[0].content | upper }}", "has the text 0 times unchanged"),
    "syntax": ("{% if %}", "cannot be rendered (TemplateSyntaxError: Expected"),
    "raises": ("{{ raise_exception('no\nway') }}", "cannot be rendered (TemplateError: no)"),
    "type": (CONTENT + "{{ 1 + 'a' }}", "cannot be rendered (TypeError: unsupported"),
    "value": (CONTENT + "{{ 'a' % 1 }}", "cannot be rendered (TypeError: not all"),
    "format": (CONTENT + "{{ '{'.format(1) }}", "cannot be rendered (ValueError: Single '{'"),
    "json": (CONTENT + "{{ messages | tojson(indent=[]) }}", "cannot be rendered (TypeError"),
    "range": (CONTENT + "{{ range(9999999) }}", "cannot be rendered (OverflowError: Range too big"),
    "key": (CONTENT + "{{ ''.encode('x' * 3) }}", "cannot be rendered (LookupError: unknown"),
    "sandbox": (CONTENT + "{{ ''.__class__.__mro__ }}", "cannot be rendered (SecurityError"),
    "changes": ("{% set _ = messages.append(1) %}" + CONTENT, "cannot be rendered (SecurityError"),
    "unnamed": (
        CONTENT + "{{ sep_token }}",
        "uses sep_token, which tokenizer_config.json does not",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_templates_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    template, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        frame_of(tmp_path, template)
    refusal = str(caught.value)
    assert refusal.startswith("--prompt_format chat: ") and "; use --prompt_format plain" in refusal
    assert "\n" not in refusal and str(tmp_path) in refusal


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<bos>"}, "names the token <bos>, but tokenizer.json has no such one"),
        (
            {"added_tokens_decoder": {"7": {"content": "<|im|>"}}},
            "names the token <|im|>, but tokenizer.json has no such one of id 7",
        ),
        (
            {"added_tokens_decoder": {"7": {"content": "<s>"}}},
            "names the token <s>, but tokenizer.json has no such one of id 7",
        ),
    ],
)
def test_unknown_special_tokens_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        frame_of(tmp_path, "{{ bos_token }}<s>" + CONTENT + "<|im|>", **config)


BESIDE = {
    "special_tokens_map.json": [
        ({"additional_special_tokens": ["<|im|>"]}, "names the token <|im|>, but tokenizer.json"),
        ({"extra_special_tokens": {"im": "<|im|>"}}, "names the token <|im|>, but tokenizer.json"),
        ({"sep_token": {"content": "<|im|>"}}, "names the token <|im|>, but tokenizer.json has no"),
        (
            {"bos_token": {"content": "<|user|>"}},
            "uses bos_token, which is <s> in tokenizer_config.json and <|user|> in special_",
        ),
    ],
    "added_tokens.json": [
        ({"<|im|>": 260}, "names the token <|im|>, but tokenizer.json has no such one of id 260"),
        ({"<s>": 7}, "names the token <s>, but tokenizer.json has no such one of id 7"),
    ],
}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [(file, content, message) for file, cases in BESIDE.items() for content, message in cases],
)
def test_tokens_that_files_beside_the_tokenizer_state_are_its_own(
    tmp_path: Path, file: str, content: dict[str, Any], message: str
) -> None:
    template = "{{ bos_token }}" + CONTENT + "<|im|>"
    tokenizer = write(tmp_path, template)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatTemplate(tokenizer)
    other = {"additional_special_tokens": ["<|user|>"], "bos_token": "<s>"}
    (tmp_path / file).write_text(json.dumps(other if "map" in file else {"<s>": 260, "<|y|>": 9}))
    assert ChatTemplate(tokenizer).frame.num_tokens > 2


def test_words_that_are_no_tokens_are_plain_text_as_for_transformers(tmp_path: Path) -> None:
    """As TinyLlama's and Zephyr's `<|user|>`, which were trained so."""
    template = "<s><|human|>\n" + CONTENT + "</s>\n<|human|><|assistant|> <<SYS>> [INST]\n"
    tokenizer = write(tmp_path, template)
    chat = ChatTemplate(tokenizer)
    expected = reference(template).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
    )
    assert list(chat.frame.around(tokenizer.encode("x"))) == expected
    assert chat.plain_words == ("<|human|>", "<SYS>", "[INST]")
    assert ChatTemplate(write(tmp_path / "b", CHATML)).plain_words == ()


def test_a_token_of_the_vocabulary_that_no_text_becomes_is_refused(tmp_path: Path) -> None:
    """The word has an id, but not among the added tokens."""
    tokenizer = write(tmp_path, "<s><|im|>" + CONTENT)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["<|im|>"] = len(words)
    for token in content["added_tokens"]:
        token["id"] += 1
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    message = "has the word <|im|>, which is the token 260 of tokenizer.json, but is encoded as 6"
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatTemplate(tokenizer)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, CHATML)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^--prompt_format chat: .*tokenizer_config.json cannot"):
        ChatTemplate(tokenizer)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"^--prompt_format chat: .*template.jinja cannot be read"):
        ChatTemplate(tokenizer)


def test_the_stand_in_is_one_that_trimming_leaves() -> None:
    assert STAND_IN.format(7).isalnum()


FRAME = Frame((1, 2, 3), (4, 5))


class Framed:
    """Frames as a chat template makes them: with 7 and 8 between two messages."""

    frame = FRAME

    def of(self, conversations: Collection[Roles]) -> dict[Roles, Frame | Refusal]:
        return {
            roles: replace(
                FRAME, between=((7, 8),) * (len(roles) - 1), order=tuple(range(len(roles)))
            )
            for roles in conversations
        }


CHATTED = Framed()


def test_books_are_cut_so_that_prompts_have_the_length(tmp_path: Path) -> None:
    book = "".join(chr(0x4E00 + i) for i in range(36))  # no character comes twice
    dataset = write_lines(tmp_path / "book.jsonl", [book])
    work = build(dataset, BOS, prefix_len=12, num_prompts=5, chat=CHATTED)
    plain = build(dataset, None, prefix_len=7, num_prompts=5)
    assert work.sources == plain.sources and work.num_available == 5
    assert work.prompts == tuple((1, 2, 3, *prompt, 4, 5) for prompt in plain.prompts)
    assert len({work.sha256, plain.sha256}) == 2
    with pytest.raises(ValueError, match=r"holds 5 prefixes of --prefix_len 12 tokens; 6 are"):
        build(dataset, BOS, prefix_len=12, num_prompts=6, chat=CHATTED)


@pytest.mark.parametrize("dataset", ["demo", "ruler:vt", "longbench:none.json"])
def test_a_prefix_without_room_is_refused(dataset: str) -> None:
    with pytest.raises(ValueError, match=r"--prefix_len 5 is too short for") as caught:
        build(dataset, prefix_len=5, chat=CHATTED)
    if dataset != "ruler:vt":
        assert "whose template has 5 tokens; it must be at least 6" in str(caught.value)


def test_ruler_has_the_frame_within_its_length() -> None:
    work = build("ruler:vt", BOS, prefix_len=1000, chat=CHATTED)
    plain = build("ruler:vt", None, prefix_len=995)
    assert work.prompts == tuple(FRAME.around(prompt) for prompt in plain.prompts)
    assert work.answers == plain.answers
    with pytest.raises(ValueError) as caught:
        build("ruler:vt", None, prefix_len=100)
    least = int(str(caught.value).rpartition(" ")[2])
    with pytest.raises(ValueError, match=rf"--prefix_len 100 .* must be at least {least + 5}"):
        build("ruler:vt", BOS, prefix_len=100, chat=CHATTED)
    build("ruler:vt", BOS, prefix_len=least + 5, chat=CHATTED)


@pytest.mark.parametrize("dataset", ["recall", "recall:demo"])
def test_recall_cannot_go_on_in_another_message(dataset: str) -> None:
    with pytest.raises(ValueError, match=rf"chat: the answer of --dataset {dataset} goes on where"):
        build(dataset, prefix_len=400, chat=CHATTED)


def write_set(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"turns": [question]}) + "\n" for question in questions))
    return f"speed_bench:{path}"


def test_prompt_sets_are_bare_questions_in_the_frame(tmp_path: Path) -> None:
    dataset = write_set(tmp_path / "set.jsonl", "abcdefghij", "ab")
    (prompt,) = build(dataset, BOS, prefix_len=10, num_prompts=1, chat=CHATTED).prompts
    assert prompt == (1, 2, 3, *map(ord, "abcij"), 4, 5)
    whole = build(dataset, BOS, prefix_len=15, num_prompts=2, is_whole=True, chat=CHATTED)
    texts = ("abcdefghij", "ab")
    assert sorted(whole.prompts) == sorted(FRAME.around([*map(ord, t)]) for t in texts)
    with pytest.raises(ValueError, match="holds 1 prompts of at most --prefix_len 14 tokens; 2"):
        build(dataset, BOS, prefix_len=14, num_prompts=2, is_whole=True, chat=CHATTED)


def write_chat(path: Path, *turns: tuple[str, str]) -> str:
    path.write_text(
        json.dumps([{"conversations": [{"from": who, "value": what} for who, what in turns]}])
    )
    return f"sharegpt:{path}"


def test_several_turns_are_messages(tmp_path: Path) -> None:
    turns = [("human", "ab"), ("gpt", "b"), ("human", "cd"), ("gpt", "d")]
    dataset = write_chat(tmp_path / "chat.json", *turns)
    inner = [*map(ord, "ab"), 7, 8, ord("b"), 7, 8, *map(ord, "cd")]
    work = build(dataset, BOS, prefix_len=14, num_prompts=1, is_whole=True, chat=CHATTED)
    assert work.prompts == (FRAME.around(inner),)  # without BOS
    (cut,) = build(dataset, BOS, prefix_len=9, num_prompts=1, chat=CHATTED).prompts
    assert cut == FRAME.around([*inner[:2], *inner[-2:]])
    message = "holds 0 prompts of at most --prefix_len 13 tokens; 1 are needed"
    with pytest.raises(ValueError, match=message):
        build(dataset, BOS, prefix_len=13, num_prompts=1, is_whole=True, chat=CHATTED)


CONVERSATION = ("system", "user", "assistant", "user")


@pytest.mark.parametrize("name", ["blocks", "loops", "namespace"])
def test_conversations_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = write(tmp_path, TEMPLATES[name].replace("{% break %}", ""))
    texts = ["be brief", *TEXTS]
    chat = [{"role": r, "content": t} for r, t in zip(CONVERSATION, texts, strict=True)]
    kept = chat if name != "loops" else chat[1:]  # it passes over a system's message
    frame = ChatTemplate(tokenizer).of([tuple(message["role"] for message in kept)]).popitem()[1]
    assert isinstance(frame, Frame)
    expected = reference(TEMPLATES[name].replace("{% break %}", "")).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    ids = frame.joined([tokenizer.encode(message["content"]) for message in kept])
    assert list(frame.around(ids)) == expected


def test_a_template_may_change_the_order_of_messages(tmp_path: Path) -> None:
    """As Mistral's, which puts the system's message before the last question."""
    last_first = "<s>{% for m in messages | reverse %}<|user|>{{ m.content }}{% endfor %}</s>"
    tokenizer = write(tmp_path, last_first)
    frame = ChatTemplate(tokenizer).of([("system", "user")])["system", "user"]
    assert isinstance(frame, Frame)
    ids = frame.around(frame.joined([tokenizer.encode("cat"), tokenizer.encode("the")]))
    assert ids == (*tokenizer.encode_with_special("<s><|user|>the<|user|>cat</s>"),)


def test_a_conversation_that_a_template_refuses_is_left_out(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}</s>"
    )
    chat = ChatTemplate(write(tmp_path, template))
    frames = chat.of([("system", "user"), ("user", "assistant", "user"), ("user", "user")])
    assert frames["system", "user"] == Refusal("cannot be rendered (TemplateError: no system)")
    assert frames["user", "assistant", "user"] == Refusal(
        "has the text of message 2 (assistant) 0 times unchanged, not once"
    )
    assert isinstance(frames["user", "user"], Frame)
    lines = [
        [("system", "a"), ("human", "b")],
        [("human", "c")],
        [("system", "d"), ("human", "e")],
    ]
    items = [
        {"conversations": [{"from": who, "value": what} for who, what in line]} for line in lines
    ]
    (tmp_path / "set.json").write_text(json.dumps(items))
    dataset = f"sharegpt:{tmp_path / 'set.json'}"
    with pytest.raises(ValueError) as caught:
        build(dataset, prefix_len=99, num_prompts=2, is_whole=True, chat=chat)
    assert str(caught.value).endswith(
        "holds 1 prompts of at most --prefix_len 99 tokens; 2 are needed (--B x --num_batches); 2 "
        "more are left out, because the chat template cannot be rendered (TemplateError: no system)"
    )
    seeds = [
        build(dataset, prefix_len=99, seed=seed, num_prompts=1, is_whole=True, chat=chat)
        for seed in range(9)
    ]
    assert {work.sources for work in seeds} == {((1, 0),)}
    refused = [(work.left_out or {}).get("refused", 0) for work in seeds]
    assert {*refused} == {0, 1, 2}  # those that came before it


HOSTILE = {
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    "huge": "{{ 'a' * 10000000000 }}",
    "long": "{% for i in range(99999) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
    "deep": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attribute": "{{ cycler.__init__.__globals__ }}",
    "includes": "{% include '/etc/passwd' %}",
}


@pytest.mark.narrow(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    monkeypatch.setattr(chat_template, "MOST_BYTES", 128 << 20)
    tokenizer = write(tmp_path, CONTENT + HOSTILE[name])
    with pytest.raises(ValueError, match="--prompt_format chat: the chat template in") as caught:
        ChatTemplate(tokenizer)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages | attr('__cla' ~ 'ss__') }}",
        "{{ messages['__class__'] }}",
        "{{ '%s' | format(namespace.__init__) }}",
    ],
)
def test_attributes_of_python_are_undefined_in_a_template(tmp_path: Path, escape: str) -> None:
    escaped = frame_of(tmp_path, CONTENT + escape + "</s>")
    assert escaped == frame_of(tmp_path / "b", CONTENT + "</s>")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    directory = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(demo_directory("demo"), directory)
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}Q: " + CONTENT + "\nA:</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def run_config(model: str, **workload: Any) -> RunConfig:
    return RunConfig(model=ModelSection(model), workload=WorkloadSection(**workload))


def test_a_run_has_the_template_around_its_prompts(chat_model: Path) -> None:
    sizes = {"batch_size": 2, "num_batches": 1, "prefix_len": 64, "gen_len": 4}
    config = run_config(str(chat_model), prompt_format=CHAT, **sizes)
    prepared = prepare(config, Launch())
    tokenizer = prepared.tokenizer
    before = [1, *tokenizer.encode("Q: ")]
    after = [*tokenizer.encode("\nA:"), 2]
    for prompt in prepared.workload.prompts:
        assert len(prompt) == 64
        assert [*prompt[: len(before)]] == before and [*prompt[-len(after) :]] == after
    assert prepared.config.to_dict()["workload"]["prompt_format"] == CHAT
    plain = prepare(run_config(str(chat_model), **sizes), Launch())
    assert plain.workload.sha256 != prepared.workload.sha256
    assert plain.config.to_dict()["workload"]["prompt_format"] == "plain"


def test_a_run_says_which_words_are_plain_text(
    chat_model: Path, tmp_path: Path, command: Command
) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    flags = ("--prefix_len", 64, "--gen_len", 4, "--out", tmp_path / "runs")
    words = ("run", "--model", model, "--prompt_format", "chat", "--B", 1, *flags)
    message = "--prompt_format chat: <|human|> of the template are no tokens of tokenizer."
    assert message not in command(*words).err
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "<|human|>"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    ended = command(*words)
    assert ended.code == 0 and message in ended.err, ended.err
    ended = command("serve", *words[1:5], *flags, "--num_requests", 2, "--modes", "sequential")
    assert ended.code == 0 and message in ended.err, ended.err


def test_tables_tell_the_formats_apart() -> None:
    plain = drawn()
    chat = with_fields(plain, config__workload__prompt_format=CHAT)
    assert (settings(plain)["dataset"], settings(chat)["dataset"]) == ("demo", "demo (chat)")
    assert (
        title_of([chat])
        == title_of([plain]).replace(", demo:", ", demo (chat):")
        != title_of([plain])
    )


def test_a_study_makes_the_prompts_of_each_format(chat_model: Path) -> None:
    cache = SetupCache()
    sizes = {"batch_size": 1, "num_batches": 1, "prefix_len": 64, "gen_len": 4}
    hashes = list[str]()
    for form in ("plain", CHAT, "plain", CHAT):
        run = find(run_config(str(chat_model), prompt_format=form, **sizes), Launch(), cache)
        hashes.append(complete(run, cache).workload.sha256)
    assert hashes[:2] == hashes[2:] and len({*hashes}) == 2


@pytest.mark.parametrize("model", ["demo", "random:llama-68m"])
def test_a_model_without_a_template_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"^--prompt_format chat: the tokenizer in .* has no chat"):
        prepare(run_config(model, prompt_format=CHAT, prefix_len=64), Launch())


def test_served_prompts_have_the_template(tmp_path: Path, chat_model: Path) -> None:
    chat = ("--model", str(chat_model), "--prompt_format", "chat")
    dataset = write_set(tmp_path / "set.jsonl", "the cat sat", "on the mat")
    for words in ((), ("--dataset", dataset, "--num_requests", "2", "--prefix_len", "60")):
        prepared = prepare_as("serve", tmp_path, *chat, *words, "--modes", "sequential")
        prompts = prepared.run.workload.prompts
        assert prompts and all((p[0], p[-1]) == (1, 2) for p in prompts)
        assert prepared.run.config.to_dict()["workload"]["prompt_format"] == CHAT


@pytest.mark.parametrize(
    "words", [("--prefix_len", "uniform:5:50"), ("--arrival", "trace:requests.jsonl")]
)
def test_requests_of_several_lengths_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--prompt_format chat: prompts that are cut to several"):
        parse_as("serve", tmp_path, "--prompt_format", "chat", *words)
