"""Choice: the resolved value of a flag that can be `auto`, and the reason for it. Imports nothing
of this package and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

INTERPRETED = "asked for; interpreted on a CPU, for checks and not for times"


class How(Enum):
    """Who chose."""

    ASKED = "the user"
    AUTO = "auto took what suits the machine best"
    SECOND_BEST = "auto could not take what it prefers"
    TO_BE_MEASURED = "auto chooses by a measurement in the run"
    MEASURED = "auto chose by a measurement"


@dataclass(frozen=True)
class Choice:
    """`why` is only for the record and for messages; code reads `how` and the properties.
    `is_interpreted` says that the kernels run in Triton's interpreter."""

    name: str
    why: str
    how: How = How.AUTO
    is_interpreted: bool = False

    @property
    def is_auto(self) -> bool:
        return self.how is not How.ASKED

    @property
    def is_to_be_measured(self) -> bool:
        return self.how is How.TO_BE_MEASURED

    @property
    def settled(self) -> str | None:
        """The name; None if a measurement will still choose it."""
        return None if self.is_to_be_measured else self.name


def asked_for(name: str, is_interpreted: bool = False) -> Choice:
    """The choice of a user who named it."""
    return Choice(name, INTERPRETED if is_interpreted else "asked for", How.ASKED, is_interpreted)
