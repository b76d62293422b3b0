"""The token ids of the chats of a trace: as the chat template of the model writes them, or with
speakers in words. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from magicdec.model.tokenizer import Tokenizer
from magicdec.workload.chat_template import FLAG, WAY_OUT, Chat, ChatTemplate, Rendered
from magicdec.workload.prompt_sets import ChatMessage, in_words
from magicdec.workload.traces.seen_texts import num_in_common
from magicdec.workload.traces.sessions import ChatPrompt, MessageFields


@dataclass(frozen=True)
class ChatText:
    """The token ids of a prompt, and how many tokens its recorded answer has, if there is one."""

    ids: tuple[int, ...]
    answer_len: int | None


class ChatTexts:
    """Makes the texts of chats by a tokenizer, and by a chat template, or in words that follow on
    `bos`, if any."""

    def __init__(
        self, tokenizer: Tokenizer, bos: int | None, template: ChatTemplate | None
    ) -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        self.template = template
        self._shared = dict[int, int]()  # an id is one object in all texts

    def of(self, places: Sequence[str], prompts: Sequence[ChatPrompt]) -> Iterator[ChatText]:
        """The texts of the prompts that stand at `places` of a file, rendered together. Raises
        ValueError, one line that names the place."""
        make = self._worded if self.template is None else self._written
        share = self._shared.setdefault
        for place, (ids, answer_len) in zip(places, make(places, prompts), strict=True):
            if not ids:
                raise ValueError(f"{place}: the prompt has no tokens")
            yield ChatText(tuple(share(token, token) for token in ids), answer_len)

    def _worded(
        self, places: Sequence[str], prompts: Sequence[ChatPrompt]
    ) -> Iterator[tuple[list[int], int | None]]:
        start = [] if self.bos is None else [self.bos]
        encode = self.tokenizer.encode
        for prompt in prompts:
            answer = prompt.answer
            answer_len = None if answer is None else len(encode(f" {text_of(answer)}"))
            yield [*start, *encode(worded(prompt))], answer_len

    def _written(
        self, places: Sequence[str], prompts: Sequence[ChatPrompt]
    ) -> Iterator[tuple[list[int], int | None]]:
        """An answer has the tokens that the template adds with it, its end token among them."""
        assert self.template is not None, "it has one"
        asked = [Chat(prompt.messages, prompt.tools) for prompt in prompts]
        answered = [
            Chat((*prompt.messages, prompt.answer), prompt.tools, is_open=False)
            for prompt in prompts
            if prompt.answer is not None
        ]
        rendered = self.template.written([*asked, *answered])
        behind = iter(rendered[len(asked) :])
        for place, prompt, before in zip(places, prompts, rendered, strict=False):
            text = self._text(place, before)
            for message in prompt.messages:
                self._check_calls(place, message, text)
            ids = self.tokenizer.encode_with_special(text)
            if prompt.answer is None:
                yield ids, None
                continue
            whole = self._text(place, next(behind))
            self._check_calls(place, prompt.answer, whole[num_in_common(text, whole) :])
            yield ids, self._num_added(text, ids, whole)

    def _check_calls(self, place: str, message: MessageFields, text: str) -> None:
        """Raises ValueError if the text that has a message does not name what it calls: the
        template knows no tools."""
        for call in message.get("tool_calls") or ():
            if (name := call["function"]["name"]) not in text:
                self._refuse(place, f"writes no call of {name}")

    def _text(self, place: str, rendered: Rendered) -> str:
        if rendered.error is not None:
            self._refuse(place, f"cannot be rendered ({rendered.error})")
        return rendered.text

    def _refuse(self, place: str, what: str) -> NoReturn:
        assert self.template is not None, "it has one"
        path = self.template.path
        raise ValueError(f"{FLAG}: {place}: the chat template in {path} {what}; {WAY_OUT}")

    def _num_added(self, before: str, ids: Sequence[int], whole: str) -> int:
        """The tokens that a template adds with an answer to a prompt. It may write what begins an
        answer otherwise once there is one."""
        encode = self.tokenizer.encode_with_special
        if whole.startswith(before):
            return len(encode(whole[len(before) :]))
        whole_ids = encode(whole)
        return len(whole_ids) - num_in_common(ids, whole_ids)


def worded(prompt: ChatPrompt) -> str:
    """The text of a prompt where no template is: its speakers in words, and tools as JSON."""
    if prompt.is_text:
        return "".join(text_of(message) for message in prompt.messages)
    tools = () if prompt.tools is None else (ChatMessage("tools", _json(prompt.tools)),)
    messages = (ChatMessage(str(m["role"]), text_of(m)) for m in prompt.messages)
    return in_words((*tools, *messages))


def text_of(message: MessageFields) -> str:
    """What a speaker says: thoughts, text and calls."""
    calls = [_json(call["function"]) for call in message.get("tool_calls") or ()]
    parts = (message.get("reasoning_content"), message["content"], *calls)
    return "\n".join(part for part in parts if part)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
