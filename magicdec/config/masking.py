"""URLs and commands without secrets (a user with password, a query), for messages and records."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
USER = re.compile(r"(\w+://)\S*@")  # up to the last @, which a password may contain
QUERY = re.compile(r"(\w+://[^\s?#]*)[?#]\S+")


def masked(text: str) -> str:
    """A text in which no URL has a user, a password, a query or a fragment."""
    return QUERY.sub(rf"\1?{HIDDEN}", USER.sub(rf"\1{HIDDEN}@", text))


def masked_words(words: Sequence[str]) -> list[str]:
    return [masked(word) for word in words]
