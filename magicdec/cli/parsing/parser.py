"""Parser: argparse from sections of settings, with help in two levels and flags from a TOML file
too. It raises errors instead of exiting. Imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from magicdec.config.setting import Declared, declared, setting
from magicdec.config.toml_file import TomlFile
from magicdec.distributed.groups import read_launch
from magicdec.names import most_like

SectionType = TypeVar("SectionType")


@dataclass(frozen=True)
class ConfigFile:
    config: Path | None = setting(
        None,
        "Take flags from this TOML file, whose keys are their names. Flags on the command line "
        "win.",
    )


@dataclass(frozen=True)
class ParsedValues:
    """The read sections by name. Settings are named by section and field, such as `kv.budget`; the
    user gave `typed` ones on the command line, and `filed` ones in the file of `--config`. A
    setting that several sections declare has the name of the first of them, and `owners` names all
    of them."""

    sections: Mapping[str, Any]
    typed: frozenset[str]
    filed: frozenset[str]
    settings: Mapping[str, Declared]
    owners: Mapping[str, Sequence[str]]

    def __getitem__(self, kind: type[SectionType]) -> SectionType:
        return next(section for section in self.sections.values() if type(section) is kind)

    @property
    def given(self) -> frozenset[str]:
        return self.typed | self.filed

    def flag_of(self, name: str) -> str:
        return self.settings[name].flag

    def with_given(self, texts: Mapping[str, str]) -> ParsedValues:
        """These values, but for the settings of `texts` by name, which are the only given ones.
        Several values of a list have spaces between them. Raises ValueError as `Declared.read`."""
        sections = dict(self.sections)
        for name, text in texts.items():
            setting = self.settings[name]
            value = setting.read(text.split() if setting.is_list else text)
            for owner in self.owners[name]:
                sections[owner] = replace(sections[owner], **{name.partition(".")[2]: value})
        return replace(self, sections=sections, typed=frozenset(texts), filed=frozenset())

    def refuse_given(self, names: Iterable[str], reason: str) -> None:
        """Raises ValueError for settings that the user gave in vain."""
        for name in names:
            if name in self.given:
                raise ValueError(f"{self.flag_of(name)} does nothing here: {reason}; leave it out")

    def refuse_typed(self, names: Iterable[str], reason: str) -> None:
        """`refuse_given` for settings on the command line alone."""
        self.refuse_given([name for name in names if name in self.typed], reason)


class Parser(argparse.ArgumentParser):
    """A parser of `sections`, given by name with their defaults, or as types where settings have
    none. `only` names the fields of a section that have a flag here, `aliases` further spellings,
    and `everyday` the flags that `--help` shows, where `--help_all` shows all. `gone` are flags of
    earlier versions, each with what took its place. A setting that several sections declare is one
    flag, whose value each of them gets."""

    def __init__(
        self,
        description: str,
        sections: Mapping[str, Any],
        only: Mapping[str, Sequence[str]] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
        everyday: Sequence[str] = (),
        gone: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(description=description, allow_abbrev=False, **options)
        self.everyday = tuple(everyday)
        self.gone = dict(gone or {})
        self.sections = dict(sections)
        self.settings: dict[str, Declared] = {}
        self.owners: dict[str, list[str]] = {}  # the sections that declare a setting
        declared_flags = dict[str, str]()  # the name of the setting that was the first with a flag
        if everyday:
            self.add_argument(
                "--help_all",
                action=_HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show every flag and exit",
            )
        for name, section in sections.items():
            group = self.add_argument_group(name)
            kind = section if isinstance(section, type) else type(section)
            for field, declaration in declared(kind).items():
                if only is None or field in only.get(name, (field,)):
                    default = getattr(section, field, MISSING)
                    more = (aliases or {}).get(f"{name}.{field}", ())
                    own = f"{name}.{field}"
                    is_flag = declaration.flag.startswith("-")
                    first = declared_flags.setdefault(declaration.flag, own) if is_flag else own
                    self.owners.setdefault(first, []).append(name)
                    if first == own:
                        self._add_setting(group, own, declaration, default, more)

    def _add_setting(
        self, group: Any, name: str, declaration: Declared, default: Any, aliases: Sequence[str]
    ) -> None:
        flags = list(dict.fromkeys([*declaration.flags, *aliases]))
        spelt = replace(declaration.setting, flags=tuple(flags))
        self.settings[name] = replace(declaration, default=default, setting=spelt)
        options: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": help_text(self.settings[name]),
        }
        if declaration.flag.startswith("-"):
            options |= {"dest": name, "required": default is MISSING}
        elif default is not MISSING and not declaration.is_list:
            options["nargs"] = "?"
        if declaration.kind is bool:
            options |= {"action": "store_const", "const": not default}
        else:
            options["metavar"] = declaration.metavar
            if declaration.takes_several:
                options["nargs"] = "*" if declaration.setting.can_be_empty else "+"
            if declaration.setting.choices:
                options["choices"] = declaration.setting.choices
                is_listed = declaration.flag.startswith("-") and not declaration.setting.metavar
                options["metavar"] = None if is_listed else declaration.metavar
        group.add_argument(*flags, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Leaves the check of values to their settings, for their wording."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def print_help(self, file: Any = None) -> None:
        """Prints the help on one rank, so that it appears once under torchrun."""
        if read_launch().rank == 0:
            super().print_help(file)

    def format_help(self) -> str:
        shown = {"-h", "--help_all", *self.everyday}
        hidden = {
            action: action.help
            for action in self._actions
            if not shown & set(action.option_strings)
        }
        if not self.everyday or not hidden:
            return super().format_help()
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, help_of_action in hidden.items():
            action.help = help_of_action
        return f"{text}\n--help_all shows {len(hidden)} more flags.\n"

    def format_help_all(self) -> str:
        return super().format_help()

    def read(self, words: Sequence[str], defaults: Mapping[str, Any] | None = None) -> ParsedValues:
        """The sections with the values of the command line, the file of `--config`, and `defaults`,
        which the user wrote elsewhere, by spellings of flags without dashes. Raises ValueError, one
        line, for an unknown flag, with the name most like it, and for an impossible value."""
        texts = self._parse(words)
        typed = {name: self.settings[name].read(text) for name, text in texts.items()}
        path = typed.get("file.config")
        filed = {} if path is None else self.read_file(TomlFile("--config", path))
        others = self._read_keys(defaults or {})
        values = others | filed | typed
        sections = {}
        for name, section in self.sections.items():
            own = {
                key.partition(".")[2]: value
                for key, value in values.items()
                if name in self.owners[key]
            }
            sections[name] = (
                section(**own) if isinstance(section, type) else replace(section, **own)
            )
        given = frozenset(filed) | frozenset(others)
        return ParsedValues(sections, frozenset(typed), given, self.settings, self.owners)

    def _parse(self, words: Sequence[str]) -> dict[str, Any]:
        for word in words:
            self.refuse_gone(word)
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]}; {self._meant(unknown[0])}")
        names = {
            declaration.flag: name for name, declaration in self.settings.items() if "." in name
        }
        return {names.get(name, name): text for name, text in vars(parsed).items()}

    def refuse_gone(self, word: str) -> None:
        """Raises ValueError for a flag of earlier versions."""
        flag = word.partition("=")[0]
        if flag in self.gone:
            raise ValueError(f"{flag} is gone: {self.gone[flag]}")

    def _meant(self, word: str) -> str:
        """A hint at the flag that an unknown word means, by its name here or in other programs."""
        flag = word.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        for placed in self.settings.values():
            if placed.flag.startswith("-") and name in (placed.name, *placed.setting.synonyms):
                return f"did you mean {placed.flag}?"
        return most_like(flag, [flag for action in self._actions for flag in action.option_strings])

    def read_file(self, file: TomlFile) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in file.values.items():
            try:
                values |= self._read_keys({key: value})
            except ValueError as error:
                raise ValueError(f"{file.place_of(key)}: {error}") from None
        return values

    @property
    def names(self) -> dict[str, str]:
        """The names of settings by their flags' spellings without dashes."""
        return {
            flag.lstrip("-"): name
            for name, declaration in self.settings.items()
            for flag in declaration.flags
        }

    def _read_keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = self.names
        result = {}
        for key, value in values.items():
            self.refuse_gone(f"--{key}")
            if key not in names or key == "config":
                raise ValueError(f"{key!r} is not the name of a flag; {most_like(key, names)}")
            if names[key] in result:
                raise ValueError(f"{key} is a second spelling of another flag there")
            declaration = self.settings[names[key]]
            if declaration.kind is not bool:
                result[names[key]] = declaration.read(value)
            elif not isinstance(value, bool):
                raise ValueError(f"{key} is a switch; give true or false")
            elif value:
                result[names[key]] = not declaration.default
        return result


def help_text(declaration: Declared) -> str:
    """The help of a setting with its default in this command."""
    default = declaration.default
    text = declaration.setting.help
    if default is None or default is MISSING or default == () or declaration.kind is bool:
        shown = "" if "Default: " in text else declaration.setting.other_defaults
    else:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return (f"{text} [{shown}]" if shown else text).replace("%", "%%")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser), "only it adds this flag"
        if read_launch().rank == 0:
            print(parser.format_help_all(), end="")
        parser.exit()
