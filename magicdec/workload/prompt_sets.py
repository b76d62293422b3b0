"""Published prompt sets: the prompt text of an item. Tokenizers here encode plain text, so words
name the speakers of a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

# What stands in SPEED-Bench's file on the hub where a text has to come from its own source.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
SPEAKERS = {"human": "User", "user": "User", "system": "System"}  # all others answer
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")  # OWNER/NAME or OWNER/NAME:CONFIG


def sharegpt(item: Any, place: str, is_chat: bool = False) -> str:
    """A chat up to its last answer, which is to be written; empty without a question."""
    turns = list[tuple[str, str]]()
    for number, turn in enumerate(list_at(item, "conversations", place)):
        where = f"{place}, turn {number}"
        turns.append((string_at(turn, "from", where), string_at(turn, "value", where)))
    answers = [i for i, (speaker, _) in enumerate(turns) if speaker not in SPEAKERS]
    return _chat(turns[: answers[-1]] if answers else turns, is_chat)


def speed_bench(item: Any, place: str, is_chat: bool = False) -> str:
    """The first question of an item: of `turns` in NVIDIA's own file, or of `messages` by its
    `prepare.py`."""
    key = "messages" if isinstance(item, dict) and "messages" in item else "turns"
    first = [*list_at(item, key, place), ""][0]
    turn = first if key == "messages" else {"content": first}
    question = string_at(turn, "content", f"{place}, first of {key!r}")
    if PLACEHOLDER in question:
        raise ValueError(
            f"{place} is a placeholder of a text from another source; fill it in with NVIDIA's "
            "prepare.py, and give the file that it writes"
        )
    return _chat([("user", question)], is_chat)


def longbench(item: Any, place: str, is_chat: bool = False) -> str:
    """A document and a question about it. LongBench-v2 has a `question` with four choices."""
    document = string_at(item, "context", place)
    is_second = "question" in item
    question = string_at(item, "question" if is_second else "input", place)
    for letter in "ABCD" if is_second else "":
        question += f"\n({letter}) {string_at(item, f'choice_{letter}', place)}"
    return f"{document}\n\n{f'Question: {question}' if question else ''}\nAnswer:"


PROMPT_SETS: dict[str, Callable[..., str]] = {
    "sharegpt": sharegpt,
    "speed_bench": speed_bench,
    "longbench": longbench,
}


def is_prompt_set(dataset: str) -> bool:
    """Whether a dataset is a prompt set, such as `sharegpt:FILE`."""
    kind, colon, _ = dataset.partition(":")
    return bool(colon) and kind in PROMPT_SETS


def cut_middle(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """`length` tokens of a prompt: its beginning, and as much of its end, where the question is."""
    end = length // 2
    return (*ids[: length - end], *ids[len(ids) - end :])


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


def _chat(turns: Sequence[tuple[str, str]], is_chat: bool) -> str:
    """The turns, then what begins the answer. A single question for a chat template is only its
    text."""
    if is_chat and len(turns) == 1 and SPEAKERS.get(turns[0][0]) == "User":
        return turns[0][1]
    lines = [f"{SPEAKERS.get(speaker, 'Assistant')}: {text}\n\n" for speaker, text in turns]
    return "".join([*lines, "Assistant:"]) if lines else ""
