"""What a GGUF file says twice of its tokens, by keys and by types, and a chat template whose words
have other types than special tokens: each contradiction is refused in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf

from magicdec.model.tokenizer import load_tokenizer
from magicdec.workload.chat_template import ChatTemplate

BYTES = [f"<0x{i:02X}>" for i in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "<|im|>"]
TYPES = [2, 3, 3, *[6] * 256, 1, 1, 3]
FILE: dict[str, Any] = {
    "model": "llama",
    "tokens": TOKENS,
    "token_type": TYPES,
    "scores": [0.0] * len(TOKENS),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def with_type(index: int, kind: int) -> list[int]:
    return [kind if i == index else other for i, other in enumerate(TYPES)]


def write(path: Path, template: str | None = None, **changes: Any) -> Path:
    strings = {f"tokenizer.ggml.{key}": value for key, value in (FILE | changes).items()}
    strings |= {} if template is None else {"tokenizer.chat_template": template}
    write_gguf(path / "model.gguf", "llama", {}, {}, strings)
    return path / "model.gguf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"bos_token_id": 262}, "bos_token_id 262 is none of its 262 tokens"),
        ({"eos_token_id": 4294967295}, "eos_token_id 4294967295 is none of its 262 tokens"),
        ({"eot_token_id": 900}, "eot_token_id 900 is none of its 262 tokens"),
        ({"padding_token_id": 900}, None),  # which nothing reads
        ({"token_type": with_type(260, 9)}, "token_type has 9, which is no type"),
        ({"token_type": with_type(260, 2)}, "token_type calls '<unk>' and 'a' unknown"),
        ({"unknown_token_id": 1}, "unknown_token_id is '<s>', and token_type calls '<unk>' so"),
        ({"token_type": with_type(260, 6)}, "token_type calls 'a' a byte, which would be named"),
    ],
)
def test_special_tokens_and_types_agree(
    changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    if message is None:
        assert load_tokenizer(path).encode_with_special("<|im|>") == [261]
        return
    with pytest.raises(ValueError, match=re.escape(f"{path}: tokenizer.ggml.{message}")) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_template_needs_special_tokens_that_are_called_so(tmp_path: Path) -> None:
    """llama.cpp looks for control and user-defined tokens in a template's words, and for no
    others."""
    template = "<|im|>{{ messages[0].content }}</s>"
    assert ChatTemplate(load_tokenizer(write(tmp_path, template))).frame.before == (261,)
    path = write(tmp_path, template, token_type=with_type(261, 1))
    message = "has the word <|im|>, which is the token 261 of model.gguf, but is encoded as "
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatTemplate(load_tokenizer(path))
