"""Published prompt sets: the messages of an item, and its category. Tokenizers here encode plain
text, so that words name the speakers of a chat where no chat template does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from magicdec.output.files import parse_json

# What stands in SPEED-Bench's file on the hub where a text has to come from its own source.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
USER = "user"
ASSISTANT = "assistant"
# Of a chat's speakers; all others answer.
ROLES = {"human": USER, USER: USER, "system": "system", "developer": "system"}
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")  # OWNER/NAME or OWNER/NAME:CONFIG

Roles = tuple[str, ...]  # of the messages of a prompt, in order


@dataclass(frozen=True)
class ChatMessage:
    role: str  # system, user or assistant; of a trace any other speaker
    content: str


@dataclass(frozen=True)
class PromptItem:
    """An item of a prompt set. `messages` are what the model is given, none if nothing is asked;
    `later` the user's further questions, which need the model's own answers."""

    messages: tuple[ChatMessage, ...]
    category: str | None = None
    later: tuple[str, ...] = ()
    is_text: bool = False  # a text that the model goes on with, in which no speaker is named
    is_chat: bool = False  # a chat with somebody else, whose answers are among the messages

    @property
    def is_asked(self) -> bool:
        return any(message.content for message in self.messages)

    def in_turns(self) -> PromptItem:
        """The same questions one after the other, so that the model gives every answer of a chat
        itself."""
        roles = self.roles
        if not self.is_chat or USER not in roles or ASSISTANT not in roles[roles.index(USER) :]:
            return self
        end = roles.index(ASSISTANT, roles.index(USER))
        later = [message.content for message in self.messages[end:] if message.role == USER]
        return replace(self, messages=self.messages[:end], later=(*later, *self.later))

    @property
    def roles(self) -> Roles:
        return tuple(message.role for message in self.messages)

    @property
    def contents(self) -> list[str]:
        return [message.content for message in self.messages]

    @property
    def plain_text(self) -> str:
        """The messages with their speakers in words, then what begins the answer."""
        if self.is_text:
            return "".join(self.contents)
        return in_words(self.messages)


def sharegpt(item: Any, place: str) -> PromptItem:
    """A chat up to its last answer, which is to be written."""
    messages = _messages(list_at(item, "conversations", place), place, "from", "value")
    answers = [i for i, message in enumerate(messages) if message.role == ASSISTANT]
    return PromptItem(messages[: answers[-1]] if answers else messages, is_chat=True)


def requested(item: Any, place: str) -> PromptItem:
    """The messages of a request as servers take them, without an answer at their end."""
    messages = _messages(list_at(item, "messages", place), place, "role", "content")
    asked = [i for i, message in enumerate(messages, 1) if message.role == USER]
    return PromptItem(messages[: asked[-1]] if asked else (), is_chat=True)


def questions(item: Any, place: str) -> PromptItem:
    """The first of the questions that a user asks one after the other: `turns` of SPEED-Bench,
    MT-Bench and Spec-Bench, `messages` as SPEED-Bench's `prepare.py` writes them, or `prompt` of
    the copy of MT-Bench on the hub."""
    keys = item if isinstance(item, dict) else {}
    key = next((key for key in ("messages", "turns", "prompt") if key in keys), "turns")
    turns = [
        turn if key == "messages" else {"content": turn} for turn in list_at(item, key, place)
    ] or [""]
    names = ["first", *(f"turn {number}" for number in range(1, len(turns)))]
    first, *later = (
        string_at(turn, "content", f"{place}, {name} of {key!r}")
        for turn, name in zip(turns, names, strict=True)
    )
    if any(PLACEHOLDER in question for question in (first, *later)):
        raise ValueError(
            f"{place} is a placeholder of a text from another source; fill it in with NVIDIA's "
            "prepare.py, and give the file that it writes"
        )
    return PromptItem(_asked(first), category_at(item, "category", place), tuple(later))


def question(
    item: Any, place: str, keys: Sequence[str], category: str | None = None, is_text: bool = False
) -> PromptItem:
    """A single question, at the first of `keys` that the item has."""
    found = item if isinstance(item, dict) else {}
    key = next((key for key in keys if key in found), keys[0])
    asked = _asked(string_at(item, key, place))
    name = None if category is None else category_at(item, category, place)
    return PromptItem(asked, name, is_text=is_text)


def longbench(item: Any, place: str) -> PromptItem:
    """A document and a question about it. LongBench-v2 has a `question` with four choices."""
    document = string_at(item, "context", place)
    is_second = "question" in item
    asked = string_at(item, "question" if is_second else "input", place)
    for letter in "ABCD" if is_second else "":
        asked += f"\n({letter}) {string_at(item, f'choice_{letter}', place)}"
    text = f"{document}\n\n{f'Question: {asked}' if asked else ''}\nAnswer:"
    category = category_at(item, "domain" if is_second else "dataset", place)
    return PromptItem(_asked(text), category, is_text=True)


def mrcr(item: Any, place: str) -> PromptItem:
    """A chat in which several requests are alike, and which ends on the question for the answer to
    one of them (OpenAI MRCR, after arXiv 2409.12640, section 3). `prompt` is its JSON."""
    text = string_at(item, "prompt", place)
    try:
        turns = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: 'prompt' is not JSON ({error})") from error
    if not isinstance(turns, list):
        raise ValueError(f"{place}: 'prompt' is not the JSON of a list")
    messages = _messages(turns, f"{place}, 'prompt'", "role", "content")
    needles = item.get("n_needles")
    if not isinstance(needles, int):
        raise ValueError(f"{place} has no 'n_needles' that is a whole number")
    return PromptItem(messages, f"{needles} needles")


PROMPT_SETS: dict[str, Callable[[Any, str], PromptItem]] = {
    "sharegpt": sharegpt,
    "messages": requested,
    "speed_bench": questions,
    "mt_bench": questions,
    "spec_bench": questions,
    "gsm8k": partial(question, keys=("question",)),
    "math500": partial(question, keys=("problem",), category="subject"),
    "humaneval": partial(question, keys=("prompt",), is_text=True),
    "mbpp": partial(question, keys=("text", "prompt")),
    "longbench": longbench,
    "mrcr": mrcr,
}
BETWEEN_SETS = re.compile(rf",(?=(?:{'|'.join(PROMPT_SETS)}):)")


def is_prompt_set(dataset: str) -> bool:
    """Whether a dataset is made of prompt sets, such as `sharegpt:FILE`."""
    kind, colon, _ = dataset.partition(":")
    return bool(colon) and kind in PROMPT_SETS


def sets_of(dataset: str) -> list[tuple[str, str]]:
    """The kind and the name of each prompt set of a dataset, in which commas join them."""
    parts = (name.partition(":") for name in BETWEEN_SETS.split(dataset))
    return [(kind, name) for kind, _, name in parts]


def category_in(kind: str, category: str | None, is_one_of_several: bool) -> str | None:
    """The category of an item, which begins with the kind of its set where there are several."""
    return " ".join(filter(None, (kind, category))) if is_one_of_several else category


def cut_middle(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """`length` tokens of a prompt: its beginning, and as much of its end, where the question is."""
    end = length // 2
    return (*ids[: length - end], *ids[len(ids) - end :])


def later_texts(questions: Sequence[str], is_chat: bool) -> list[str]:
    """What follows on an answer: the next question, or where no template names the speakers, that
    in words and what begins the next answer."""
    if is_chat:
        return list(questions)
    return [f"\n\n{in_words(_asked(question))}" for question in questions]


def list_at(item: Any, key: str, place: str) -> list[Any]:
    """The list at `key`. Raises ValueError, naming the place and the key, for another value."""
    values = item.get(key) if isinstance(item, dict) else None
    if not isinstance(values, list):
        raise ValueError(f"{place} has no {key!r} that is a list")
    return values


def string_at(item: Any, key: str, place: str) -> str:
    """The text at `key`. Raises ValueError, naming the place and the key, for another value."""
    text = item.get(key) if isinstance(item, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place} has no {key!r} that is a string")
    try:
        text.encode("utf-8")  # a lone surrogate, valid in JSON, cannot be tokenized
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {key!r} is not valid Unicode ({error.reason})") from error
    return text


def category_at(item: Any, key: str, place: str) -> str | None:
    """The name of a category, in one line. None if the item has none."""
    if item.get(key) is None:
        return None
    return " ".join(string_at(item, key, place).split()) or None


def in_words(messages: Sequence[ChatMessage]) -> str:
    """The messages with their speakers in words, and what begins the answer."""
    lines = [f"{message.role.capitalize()}: {message.content}\n\n" for message in messages]
    return "".join([*lines, f"{ASSISTANT.capitalize()}:"])


def _asked(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(USER, text),)


def _messages(
    turns: Iterable[Any], place: str, role_key: str, content_key: str
) -> tuple[ChatMessage, ...]:
    messages = list[ChatMessage]()
    for number, turn in enumerate(turns):
        where = f"{place}, turn {number}"
        role = ROLES.get(string_at(turn, role_key, where), ASSISTANT)
        messages.append(ChatMessage(role, string_at(turn, content_key, where)))
    return tuple(messages)
