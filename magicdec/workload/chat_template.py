"""Chat template: the tokens that a tokenizer's own template puts around the texts of the messages
of a prompt, up to where the answer begins.

The texts stay plain text. Only the template's own words can be special tokens. What a template does
with some messages follows from their roles alone here, because it is rendered with stand-ins for
their texts (`template_child.py`). Whole chats of a trace, with tools and their calls, are written
as servers write them (`ChatTemplate.written`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, Protocol

from magicdec.config.sections import CHAT, PLAIN
from magicdec.model.gguf.file import read_gguf
from magicdec.model.gguf.named import is_gguf
from magicdec.model.gguf.vocabulary import tokenizer_config
from magicdec.model.tokenizer import CONFIG_FILE, Tokenizer
from magicdec.output.files import exists, load_object, read_text
from magicdec.workload.prompt_sets import USER, Roles
from magicdec.workload.template_words import (
    ADDED_FILE,
    NAMES_FILE,
    check_words,
    named_tokens,
    stated_tokens,
)

TEMPLATE_FILE = "chat_template.jinja"
# The names of templates among several.
DEFAULT = "default"
TOOL_USE = "tool_use"  # for conversations with tools
ADDITIONAL = "additional_chat_templates"  # the folder of those that have a file each
FLAG = f"--prompt_format {CHAT}"
WAY_OUT = f"use --prompt_format {PLAIN}"
# Stands for a text while the template is rendered. A template has no reason to change it.
STAND_IN = "TheTextOfThePrompt5f1d7c0e9bNumber{}End"
STAND_INS = re.compile(STAND_IN.replace("{}", r"(\d+)"))
ONE_MESSAGE: Roles = (USER,)
# The process that renders a template, and its limits.
CHILD = Path(__file__).with_name("template_child.py")
CPU_S = 10
WAIT_S = 60
MOST_BYTES = 512 << 20
MOST_CHARACTERS = 64_000_000  # written for all conversations together
MOST_CHATS = 128  # of a trace that one process renders
PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")


@dataclass(frozen=True)
class Frame:
    """The token ids before, between and after the texts of a prompt's messages. `order` are the
    numbers of the messages as the template places them."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    between: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = (0,)

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.after)

    def joined(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """The texts as the template places them, with what stands between them."""
        ids = [*texts[self.order[0]]]
        for seam, number in zip(self.between, self.order[1:], strict=True):
            ids += [*seam, *texts[number]]
        return ids

    def around(self, ids: Sequence[int]) -> tuple[int, ...]:
        return (*self.before, *ids, *self.after)

    def pieces(self, texts: Sequence[Sequence[int] | None]) -> tuple[tuple[int, ...], ...]:
        """The whole prompt in the pieces between texts that are None, which are not known."""
        pieces = [[*self.before]]
        for seam, number in zip((*self.between, self.after), self.order, strict=True):
            text = texts[number]
            if text is None:
                pieces.append([])
            pieces[-1] += [*(text or ()), *seam]
        return tuple(map(tuple, pieces))

    def room(self, prefix_len: int) -> int:
        """The tokens of the text in a prompt of `prefix_len`. Raises ValueError if there are
        none."""
        if prefix_len <= self.num_tokens:
            raise ValueError(
                f"--prefix_len {prefix_len} is too short for {FLAG}, whose template has "
                f"{self.num_tokens} tokens; it must be at least {self.num_tokens + 1}"
            )
        return prefix_len - self.num_tokens


@dataclass(frozen=True)
class Refusal:
    """Why a template makes no prompt of some messages."""

    reason: str


class Frames(Protocol):
    """The frames of a chat template: of one message of the user, and of whole conversations."""

    @property
    def frame(self) -> Frame: ...

    def of(self, conversations: Collection[Roles]) -> dict[Roles, Frame | Refusal]: ...


@dataclass(frozen=True)
class Chat:
    """Messages as OpenAI's interface has them, with the tools on offer. An answer begins behind
    them if it `is_open`; otherwise it is the last message."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    is_open: bool = True

    def described(self) -> dict[str, Any]:
        """The variables of a template, as `transformers` names them."""
        return {
            "messages": self.messages,
            "tools": self.tools,
            "add_generation_prompt": self.is_open,
        }


class ChatTemplate:
    """The chat template beside a tokenizer's file. Raises ValueError, in one line, if there is
    none, or if it does not leave the text of a single message as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        path = tokenizer.path
        is_of_gguf = is_gguf(path)
        self.config = tokenizer_config(read_gguf(path)) if is_of_gguf else _load_config(path.parent)
        self.path, templates = _find_templates(path if is_of_gguf else path.parent, self.config)
        self.template = templates[DEFAULT]
        self.tool_template = templates.get(TOOL_USE, self.template)
        self.tokens = named_tokens(self.config)
        self.names = {} if is_of_gguf else _load_config(path.parent, NAMES_FILE)
        added = {} if is_of_gguf else _load_config(path.parent, ADDED_FILE)
        self._stated = stated_tokens(self.config, self.names, added)
        self._plain = dict[str, None]()
        self._known = dict[Roles, Frame | Refusal]()
        self._encoded = dict[str, tuple[int, ...]]()
        found = self.of([ONE_MESSAGE])[ONE_MESSAGE]
        if isinstance(found, Refusal):
            _refuse(self.path, found.reason)
        self.frame = found

    @property
    def plain_words(self) -> tuple[str, ...]:
        """Words of a special token's form that are plain text for this tokenizer, as they are for
        transformers."""
        return tuple(self._plain)

    def of(self, conversations: Collection[Roles]) -> dict[Roles, Frame | Refusal]:
        """The frame of each conversation, by the roles of its messages, or why the template makes
        none, as one that wants a question before each answer does. Raises ValueError, in one line,
        if it can make none at all."""
        unknown = [roles for roles in dict.fromkeys(conversations) if roles not in self._known]
        if unknown:
            try:
                chats = [Chat([*_stand_ins(roles)]) for roles in unknown]
                used, rendered = render(self.template, self.tokens, chats)
            except ValueError as error:
                _refuse(self.path, str(error))
            self._check_names(used)
            for roles, text in zip(unknown, rendered, strict=True):
                self._known[roles] = self._frame_of(roles, text)
        return {roles: self._known[roles] for roles in conversations}

    def written(self, chats: Sequence[Chat]) -> list[Rendered]:
        """The whole text of each chat, as `transformers` and servers write it; names of special
        tokens in messages are as good as the template's own. Raises ValueError, in one line, if it
        goes beyond a limit."""
        written = list[Rendered]()
        for has_tools, group in groupby(chats, key=lambda chat: bool(chat.tools)):
            template = self.tool_template if has_tools else self.template
            alike = [*group]
            for first in range(0, len(alike), MOST_CHATS):
                try:
                    used, rendered = render(
                        template, self.tokens, alike[first : first + MOST_CHATS]
                    )
                except ValueError as error:
                    _refuse(self.path, str(error))
                self._check_names(used)
                written += rendered
        return written

    def _check_names(self, used: Collection[str]) -> None:
        for name in sorted(used):
            if name.endswith("_token") and name not in self.tokens:
                _refuse(self.path, f"uses {name}, which {CONFIG_FILE} does not name (null: none)")
            other = named_tokens(self.names).get(name)
            if None not in (other, self.tokens.get(name)) and other != self.tokens[name]:
                _refuse(
                    self.path,
                    f"uses {name}, which is {self.tokens[name]} in {CONFIG_FILE} and {other} in "
                    f"{NAMES_FILE}",
                )

    def _frame_of(self, roles: Roles, rendered: Rendered) -> Frame | Refusal:
        if rendered.error is not None:
            return Refusal(f"cannot be rendered ({rendered.error})")
        before, *rest = STAND_INS.split(rendered.text)
        order = tuple(int(number) for number in rest[::2])
        for number in range(len(roles)):
            if (count := order.count(number)) != 1:
                which = f" of message {number + 1} ({roles[number]})" if len(roles) > 1 else ""
                return Refusal(f"has the text{which} {count} times unchanged, not once")
        if len(order) != len(roles):
            return Refusal(f"has {len(order)} texts where there are {len(roles)}")
        first, *between, last = map(self._encode, (before, *rest[1::2]))
        return Frame(first, last, tuple(between), order)

    def _encode(self, words: str) -> tuple[int, ...]:
        """The ids of words of the template, which come again in conversations of any length."""
        if words not in self._encoded:
            try:
                self._plain |= dict.fromkeys(check_words(self.tokenizer, self._stated, words))
            except ValueError as error:
                _refuse(self.path, str(error))
            self._encoded[words] = tuple(self.tokenizer.encode_with_special(words))
        return self._encoded[words]


def _refuse(path: Path, what: str) -> NoReturn:
    raise ValueError(f"{FLAG}: the chat template in {path} {what}; {WAY_OUT}")


def _load_config(directory: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    path = directory / name
    if not exists(path):
        return {}
    try:
        return load_object(path)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0]
        raise ValueError(f"{FLAG}: {path} cannot be read ({reason}); {WAY_OUT}") from error


def _find_templates(directory: Path, config: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """The templates by their names, one of which is DEFAULT, and the file of that. As in
    `transformers`, files of their own come first."""
    path = directory / TEMPLATE_FILE
    if not is_gguf(directory) and exists(path):
        templates = {DEFAULT: _read_template(path)}
        for_tools = directory / ADDITIONAL / f"{TOOL_USE}.jinja"
        if exists(for_tools):
            templates[TOOL_USE] = _read_template(for_tools)
        return path, templates
    path = directory if is_gguf(directory) else directory / CONFIG_FILE
    template = config.get("chat_template")
    if template is None and is_gguf(directory):
        raise ValueError(
            f"{FLAG}: {path} has no tokenizer.chat_template; {WAY_OUT}, or a model that is made "
            "for chats"
        )
    if template is None:
        raise ValueError(
            f"{FLAG}: the tokenizer in {directory} has no chat template, neither {TEMPLATE_FILE} "
            f"nor a chat_template in {CONFIG_FILE}; {WAY_OUT}, or a model that is made for chats"
        )
    named = {DEFAULT: template}
    if isinstance(template, list):  # several, each with a name
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {
            name: entry["template"]
            for name in (DEFAULT, TOOL_USE)
            for entry in reversed(entries)
            if entry.get("name") == name and entry.get("template") is not None
        }
        if DEFAULT not in named:
            _refuse(path, f"is a list without one that is named {DEFAULT!r}")
    if not all(isinstance(text, str) for text in named.values()):
        _refuse(path, "is not a text")
    return path, named


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0]
        raise ValueError(f"{FLAG}: {path} cannot be read ({reason}); {WAY_OUT}") from error


@dataclass(frozen=True)
class Rendered:
    """What a template has made of one conversation, or the error that it raised."""

    text: str
    error: str | None


def render(
    template: str, tokens: Mapping[str, str | None], chats: Sequence[Chat]
) -> tuple[list[str], list[Rendered]]:
    """The names that a template uses, and what it makes of each chat, as `transformers` renders it:
    a token that is null is not defined. Raises ValueError if it cannot be compiled or goes beyond a
    limit."""
    request = {
        "template": template,
        "tokens": {name: token for name, token in tokens.items() if token is not None},
        "conversations": [chat.described() for chat in chats],
        "cpu_s": CPU_S,
        "most_bytes": MOST_BYTES,
        "most_characters": MOST_CHARACTERS,
    }
    command = [sys.executable, "-P", str(CHILD)]
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=WAIT_S,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"takes more than {WAIT_S} s") from None
    if -ended.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise ValueError(f"takes more than {CPU_S} s or {MOST_BYTES >> 20} MB")
    if ended.returncode:
        raise ValueError(f"ended the process that renders it (exit code {ended.returncode})")
    answer = json.loads(ended.stdout)
    if "error" in answer:
        raise ValueError(f"cannot be rendered ({answer['error']})")
    return answer["used"], [
        Rendered(rendered.get("text", ""), rendered.get("error")) for rendered in answer["rendered"]
    ]


def _stand_ins(roles: Roles) -> Iterator[dict[str, str]]:
    for number, role in enumerate(roles):
        yield {"role": role, "content": STAND_IN.format(number)}
