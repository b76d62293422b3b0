"""Choice: the resolved value of a flag that can be `auto`. Imports nothing of this package and no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

INTERPRETED = "asked for; interpreted on a CPU, for checks and not for times"


class How(Enum):
    ASKED = "the user"
    INTERPRETED = "the user, though the kernels then run in Triton's interpreter"
    AUTO = "auto took what suits the machine best"
    SECOND_BEST = "auto could not take what it prefers"


class Choice(str):
    """A chosen name, with its reason for records and messages (`why`) and for code (`how`)."""

    why: str
    how: How

    def __new__(cls, name: str, why: str = "", how: How = How.AUTO) -> Choice:
        choice = super().__new__(cls, name)
        choice.why = why
        choice.how = how
        return choice

    @property
    def is_auto(self) -> bool:
        return self.how not in (How.ASKED, How.INTERPRETED)


def first_obstacle(obstacles: Mapping[str, bool]) -> str | None:
    return next((reason for reason, applies in obstacles.items() if applies), None)


def asked_for(
    flag: str, name: str, obstacle: str | None, others: str, is_interpreted: bool = False
) -> Choice:
    """The user's own choice. Raises ValueError, naming `others`, for an obstacle."""
    if obstacle:
        raise ValueError(f"{flag} {name}: {obstacle}; choose from {others}")
    if is_interpreted:
        return Choice(name, INTERPRETED, How.INTERPRETED)
    return Choice(name, "asked for", How.ASKED)
