"""Drafts with settings of their own: a value of `--draft` such as self,kv_policy=snapkv,budget=257,
whose settings are named as flags are and take the place of the command's. Asking
a KV policy imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.config.run_config import RunConfig
from magicdec.names import most_like

# What a run calls settings that a command takes as lists.
NAMES_IN_RUNS = {"flags.kv_policy": "kv.policy", "flags.budget": "kv.budget"}


@dataclass(frozen=True)
class OwnSettings:
    """A value of `--draft`: its drafter, and the values of the command for it, of which it has
    those that are given itself."""

    text: str
    drafter: str
    values: ParsedValues

    @classmethod
    def of(cls, text: str, command: ParsedValues, names: Sequence[str]) -> OwnSettings:
        """`names`: the settings that a draft may have. Raises ValueError, one line, for another,
        and for a value that cannot be."""
        drafter, *words = re.split(r",(?=\w+=)", text)
        known = {command.flag_of(name).lstrip("-"): name for name in names}
        own: dict[str, str] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key not in known:
                hint = most_like(key, known)
                raise ValueError(f"--draft {text}: {key} is no setting of a draft; {hint}")
            if known[key] in own:
                raise ValueError(f"--draft {text} names {key} twice; name each once")
            own[known[key]] = value
        try:
            return cls(text, drafter, command.with_given(own))
        except ValueError as error:
            raise ValueError(f"--draft {text}: {error}") from None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Its errors begin with its text, if it has settings of its own."""
        try:
            yield
        except ValueError as error:
            if not self.values.given:
                raise
            raise ValueError(f"--draft {self.text}: {error}") from None

    def refuse_idle(self, configs: Sequence[RunConfig]) -> None:
        """Raises ValueError for a setting of its own that does nothing in its runs."""
        with self.named():
            for name in sorted(self.values.given):
                if (reason := why_idle(name, configs)) is not None:
                    self.values.refuse_given([name], reason)


def why_idle(name: str, configs: Sequence[RunConfig]) -> str | None:
    """The reason why all of these runs ignore a setting, if they do."""
    reasons = [why_ignored(config, NAMES_IN_RUNS.get(name, name)) for config in configs]
    return None if None in reasons else reasons[0]


def refuse_idle(
    command: ParsedValues, drafts: Sequence[tuple[OwnSettings, list[RunConfig]]]
) -> None:
    """Raises ValueError for flags that do nothing with any of the drafts."""
    for name in sorted(command.given):
        reasons: dict[str | None, None] = {}
        for draft, configs in drafts:
            is_own = name in draft.values.given
            reasons[f"{draft.text} has its own" if is_own else why_idle(name, configs)] = None
        if None not in reasons:
            command.refuse_given([name], "; ".join(map(str, reasons)))
