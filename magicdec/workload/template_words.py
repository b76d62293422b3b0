"""The words that a chat template puts around texts, against the tokens that the tokenizer's files
state. A word that a file calls a token, or that the vocabulary has, must be encoded as that token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from magicdec.model.tokenizer import Tokenizer

NAMES_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
LISTS = ("additional_special_tokens", "extra_special_tokens")
# Words of the form that special tokens have. In some models such a word is plain text.
SPECIAL = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,60}\]")


def named_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The special tokens by the names that templates have for them, such as `bos_token`."""
    tokens = dict[str, str | None]()
    for name, value in config.items():
        content = content_of(value)
        if name.endswith("_token") and (content is None or isinstance(content, str)):
            tokens[name] = content
    return tokens


def content_of(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def stated_tokens(
    config: Mapping[str, Any], names: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[str, str | None]:
    """What tokenizer_config.json, special_tokens_map.json and added_tokens.json call tokens, with
    the id that they say, if any."""
    listed = [word for file in (config, names) for word in _listed(file)]
    found = {str(word): None for word in listed if isinstance(word, str) and word}
    numbered = {name: str(number) for name, number in added.items()}
    decoder = config.get("added_tokens_decoder")
    for number, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(content_of(entry), str):
            numbered[content_of(entry)] = str(number)
    return {name: number for name, number in (found | numbered).items() if name}


def _listed(file: Mapping[str, Any]) -> Iterator[Any]:
    yield from named_tokens(file).values()
    for name in LISTS:
        value = file.get(name)
        entries = value.values() if isinstance(value, dict) else value
        yield from map(content_of, entries if isinstance(entries, Collection) else ())


def check_words(tokenizer: Tokenizer, stated: Mapping[str, str | None], words: str) -> list[str]:
    """The words of a special token's form that are plain text for this tokenizer. Raises ValueError
    for one that is stated, or in the vocabulary, and is not encoded as that token."""
    for name, number in stated.items():
        if name not in words:
            continue
        ids = tokenizer.encode_with_special(name)
        if len(ids) != 1 or (number is not None and str(ids[0]) != number):
            as_id = "" if number is None else f" of id {number}"
            raise ValueError(
                f"names the token {name}, but {tokenizer.path.name} has no such one{as_id}"
            )
    plain = list[str]()
    for word in dict.fromkeys(SPECIAL.findall(words)):
        ids = tokenizer.encode_with_special(word)
        known = tokenizer.ids.get(word)
        if known is not None and known not in ids:
            raise ValueError(
                f"has the word {word}, which is the token {known} of {tokenizer.path.name}, but "
                f"is encoded as {len(ids)} others: the file does not call it a special token"
            )
        if known is None and len(ids) > 1:
            plain.append(word)
    return plain
