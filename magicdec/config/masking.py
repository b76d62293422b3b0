"""URLs and commands without secrets (a user with password, a query, a key), for messages and
records."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
USER = re.compile(r"(\w+://)\S*@")  # up to the last @, which a password may contain
KEY = re.compile(r"(--(?:[\w-]*[-_])?(?:api[-_]?key|hf[-_]token|password)(?:=|\s+))\S+")
QUERY = re.compile(r"(\w+://[^\s?#]*)[?#]\S+")


def masked(text: str) -> str:
    """A text in which no URL has a user, a password, a query or a fragment, and no flag a key."""
    without_users = USER.sub(rf"\1{HIDDEN}@", text)
    return KEY.sub(rf"\1{HIDDEN}", QUERY.sub(rf"\1?{HIDDEN}", without_users))


def masked_words(words: Sequence[str]) -> list[str]:
    return [masked(word) for word in words]
