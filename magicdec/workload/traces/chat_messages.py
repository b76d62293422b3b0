"""What the forms of real text share: the calls of tools in messages of OpenAI's interface."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import ConfigDict, Field

from magicdec.workload.traces.reading import STRICT
from magicdec.workload.traces.sessions import MessageFields

TOOL = "tool"
Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class CalledFunction:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: Name
    arguments: str | dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    id: Name
    type: Literal["function"]
    function: CalledFunction

    @property
    def message(self) -> MessageFields:
        """As servers give it to a template: arguments that are the JSON of an object as that."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                parsed = json.loads(arguments)
                json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate has no tokens
                arguments = parsed if isinstance(parsed, dict) else arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def refuse(place: str, key: str, value: object, reason: str) -> NoReturn:
    """Raises ValueError, one line."""
    raise ValueError(f"{place}: {key} is {json.dumps(value)[:40]}; {reason}")
