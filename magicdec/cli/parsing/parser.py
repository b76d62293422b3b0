"""Parser: the argparse parser of every command. It raises errors instead of exiting, has help in
two levels, and tells which flags the user gave.

Must not know any flag but those of the help. Imports no torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from magicdec.distributed.groups import read_launch

UNSET = object()  # the value of a flag that was not given, while arguments are read


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError with one line instead of exiting.

    `everyday` names the flags that `--help` shows; `--help_all` shows them all. Without it,
    `--help` shows them all."""

    def __init__(self, *args: Any, everyday: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.everyday = tuple(everyday)
        if everyday:
            self.add_argument(
                "--help_all", action=_HelpAll, nargs=0, help="show every flag and exit"
            )

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def print_help(self, file: Any = None) -> None:
        """Only one rank prints, so that the help appears once under torchrun."""
        if read_launch().rank == 0:
            super().print_help(file)

    def format_help(self) -> str:
        shown = {"-h", "--help_all", *self.everyday}
        hidden = [
            action
            for action in self._actions
            if action.help != argparse.SUPPRESS and not shown & set(action.option_strings)
        ]
        if not self.everyday or not hidden:
            return super().format_help()
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, kept in zip(hidden, texts, strict=True):
                action.help = kept
        return f"{text}\n--help_all shows {len(hidden)} more flags.\n"

    def format_help_all(self) -> str:
        return super().format_help()

    def hide(self, is_hidden: Callable[[str], bool]) -> None:
        """Leave the flags whose `dest` is hidden out of every help text."""
        for action in self._actions:
            if is_hidden(action.dest):
                action.help = argparse.SUPPRESS

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse's, with a hint. Raises ValueError for a flag that does not exist, with the
        name that is most like it."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = self.options()
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {' '.join(known)}"
            raise ValueError(f"unknown argument {unknown[0]}; {hint}")
        return parsed

    def options(self) -> list[str]:
        """Every spelling of every flag, those of its actions (`gate save`) included."""
        found = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [option for inner in action.choices.values() for option in inner.options()]
        return list(dict.fromkeys(found))

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        """The values of all flags, and the `dest` of those that were given. Raises ValueError for a
        flag that does not exist, with the name that is most like it."""
        unset = argparse.Namespace(**{a.dest: UNSET for a in self._actions if a.dest != "help"})
        parsed = self.parse_args(words, unset)
        given = {dest for dest, value in vars(parsed).items() if value is not UNSET}
        for action in self._actions:
            if action.dest in vars(parsed) and action.dest not in given:
                setattr(parsed, action.dest, action.default)
        return parsed, given

    def flag_of(self, dest: str) -> str:
        """The first spelling of the flag with that `dest`."""
        return next(a.option_strings[0] for a in self._actions if a.dest == dest)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser), "only it adds this flag"
        if read_launch().rank == 0:
            print(parser.format_help_all(), end="")
        parser.exit()
