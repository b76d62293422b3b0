"""Detokenizer: the text of successive tokens, in pieces that are never taken back.

A token may be part of a character, or a blank only after other text. So a piece is the difference
between the texts of a few tokens with and without the newest, as in vLLM and Hugging Face's
`DecodeStream`, in linear time.
"""

from __future__ import annotations

import re

from magicdec.model.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not yet
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""The piece of a token that is one byte of a character. One byte that does not fit makes its whole
run of bytes unreadable."""


class Detokenizer:
    """The text pieces of a request: joined, they are `Tokenizer.show` of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin()

    def _begin(self) -> None:
        self._ids: list[int] = []
        self._num_chars = 0  # of the text of `_ids`, returned so far
        self._num_done = 0  # tokens whose text was returned
        self._first = 0  # of the tokens that are decoded again
        self._has_open_bytes = False  # of a run of bytes that may go on
        self._before = ""  # the text of the tokens from `_first` to `_num_done`

    def add(self, token: int) -> str:
        """The text that is certain only with this token; often none."""
        if token not in self._tokenizer.pieces:
            rest = self.finish()
            return f"{rest}<id {token}>"
        self._ids.append(token)
        if self._is_within_bytes(token):
            return ""
        text = self._decode(self._first)
        is_readable = text.startswith(self._before) and not text.endswith(REPLACEMENT)
        piece = text[len(self._before) :] if is_readable else ""
        if piece:
            self._advance(text)
        self._num_chars += len(piece)
        return piece

    def finish(self) -> str:
        """The rest of the text, which may end within a character."""
        text = self._decode(0)
        rest = text[self._num_chars :]
        self._begin()
        return rest

    def _is_within_bytes(self, token: int) -> bool:
        """Whether a byte may follow the newest ones: only text ends their run, special tokens do
        not."""
        if BYTE.fullmatch(self._tokenizer.pieces[token]):
            self._has_open_bytes = True
        elif self._has_open_bytes:
            self._has_open_bytes = self._tokenizer.decode_known([token]) == ""
        return self._has_open_bytes

    def _advance(self, text: str) -> None:
        """Take `text` as given. The newest tokens alone are decoded before the next, unless they
        have no text: a decoder drops a text's first blank."""
        newest = self._decode(self._num_done)
        if newest:
            self._first = self._num_done
        self._before = newest or text
        self._num_done = len(self._ids)

    def _decode(self, first: int) -> str:
        ids = self._ids[first:]
        return self._tokenizer.decode_known(ids) if ids else ""
