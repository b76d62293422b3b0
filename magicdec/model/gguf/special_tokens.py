"""Checks of what a GGUF file says twice of its tokens: by keys of its metadata, and by the types of
the tokens. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

from magicdec.model.gguf.file import GgufFile
from magicdec.output.files import AGAIN

# The keys whose tokens are used, as tokenizer.ggml.bos_token_id.
USED = ("bos", "eos", "eot", "eom", "unknown")
UNKNOWN = 2
BYTE = 6
BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")


def check_special_tokens(file: GgufFile) -> None:
    """Raise ValueError, one line with the file and the key, for special tokens that are none of the
    vocabulary, and for types that other entries contradict."""

    def get(name: str) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{name}")

    tokens = get("tokens") or []
    types = get("token_type") or []
    ids = {name: get(f"{name}_token_id") for name in USED}
    for name, number in ids.items():
        if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
            refuse(file, f"{name}_token_id {number} is none of its {len(tokens)} tokens")
    if odd := next((kind for kind in types if not 0 <= kind <= BYTE), None):
        refuse(file, f"token_type has {odd}, which is no type")
    unknown = [i for i, kind in enumerate(types) if kind == UNKNOWN]
    if len(unknown) > 1:
        refuse(file, f"token_type calls {tokens[unknown[0]]!r} and {tokens[unknown[1]]!r} unknown")
    if unknown and ids["unknown"] not in (None, *unknown):
        stated = tokens[ids["unknown"]]
        refuse(
            file, f"unknown_token_id is {stated!r}, and token_type calls {tokens[unknown[0]]!r} so"
        )
    for token, kind in zip(tokens, types, strict=False):  # other lengths are refused elsewhere
        if kind == BYTE and not BYTE_NAME.fullmatch(token):
            refuse(file, f"token_type calls {token!r} a byte, which would be named like <0x41>")


def refuse(file: GgufFile, what: str) -> None:
    raise ValueError(f"{file.path}: tokenizer.ggml.{what}; {AGAIN}")
