"""Settings, declared once as dataclass fields, from which flag, key of a TOML or study file,
refusal, and page of flags follow. Imports no torch. pydantic, imported late, checks values; this
module words its messages."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from magicdec.names import most_like
from magicdec.output.files import MOST_INTEGER, is_utf8

KEY = "setting"
MANY_CHOICES = 24  # more are named only where none is like what the user wrote
MOST_SHOWN = 200  # characters of a value in a message
METAVARS = {int: "N", float: "X", Path: "FILE", str: "NAME"}
REASONS = {  # by pydantic's kinds of errors, with what it says of them
    "greater_than_equal": "is too small; it must be at least {ge:g}",
    "greater_than": "is too small; it must be more than {gt:g}",
    "less_than_equal": "is too large; it must be at most {le:g}",
    "less_than": "is too large; it must be less than {lt:g}",
    "too_short": "needs a value",
    "missing": "needs a value",
    "string_type": "is not a text",
    "finite_number": "is not a finite number",
}


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, without the type and default of its field.

    `flags` are its spellings (default: `--` and the field's name; without dashes, an argument).
    `choices` are all values of a text, `words` texts beside a number, such as auto. `least`,
    `above`, `most` and `below` bound numbers. `parse` makes a value of a text and raises
    ValueError.

    `other_defaults` names commands with another default, `synonyms` other programs' names, answered
    with the flag. A list that `can_be_empty` needs no value; one that `is_set` or has choices has
    none twice, unless it `can_repeat` them. Several texts of one that `is_joined` are joined by
    commas.
    """

    help: str
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    parse: Callable[[Any], Any] | None = None
    metavar: str = ""
    other_defaults: str = ""
    synonyms: tuple[str, ...] = ()
    can_be_empty: bool = False
    is_set: bool = False
    can_repeat: bool = False
    is_joined: bool = False


def setting(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A dataclass field that declares a setting; `more` are fields of `Setting`. The default `...`
    means required."""
    return _field(default, Setting(help, flags, **more))


def same(
    section: type, name: str, default: Any = None, is_default: bool = False, **more: Any
) -> Any:
    """A field with another section's setting, in another type or with another `default`."""
    field = next(found for found in dataclasses.fields(section) if found.name == name)
    declared = dataclasses.replace(field.metadata[KEY], **more)
    return _field(field.default if default is None and not is_default else default, declared)


def _field(default: Any, declared: Setting) -> Any:
    if default is ...:
        return dataclasses.field(kw_only=True, metadata={KEY: declared})
    return dataclasses.field(default=default, metadata={KEY: declared})


@dataclass(frozen=True)
class Declared:
    """A setting as a field of one section. `kind` is its type without `| None`."""

    name: str
    kind: Any
    default: Any
    setting: Setting

    @property
    def flags(self) -> tuple[str, ...]:
        return self.setting.flags or (f"--{self.name}",)

    @property
    def flag(self) -> str:
        """The first spelling, for messages."""
        return self.flags[0]

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) in (tuple, dict)

    @property
    def takes_several(self) -> bool:
        """Whether the user may give several values on the command line."""
        return self.is_list or self.setting.is_joined

    @property
    def metavar(self) -> str:
        if self.setting.metavar:
            return self.setting.metavar
        kind = typing.get_args(self.kind)[0] if self.is_list else self.kind
        return "|".join([METAVARS.get(kind, "N"), *self.setting.words])

    def read(self, value: Any) -> Any:
        """The value of a text, a list of texts or a TOML value. Raises ValueError, one line."""
        from pydantic import ValidationError

        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_utf8(text):
                self._refuse(text, "is not UTF-8, and no record could hold it; rename it")
        if isinstance(value, bool) != (self.kind is bool):
            self._refuse(value, "give true or false" if self.kind is bool else "give a value")
        if self.setting.is_joined and isinstance(value, list):
            value = self._joined(value)
        if self.is_list and not isinstance(value, list | tuple | dict):
            value = [value]
        if self.is_list and not value and not self.setting.can_be_empty:
            self._refuse("", "give at least one value")
        try:
            if self.setting.parse is not None and isinstance(value, str | list):
                value = self.setting.parse(value)
            value = _adapter(self.kind, self.setting).validate_python(value)
            declared = self.setting
            is_set = declared.is_set or (bool(declared.choices) and not declared.can_repeat)
            if self.is_list and is_set and len(set(value)) < len(value):
                twice = next(item for item in value if value.count(item) > 1)
                raise ValueError(f"names {twice} twice; name each once")
            return value
        except ValidationError as error:
            first = error.errors()[0]
            self._refuse(first["input"], self._reason(first))
        except ValueError as error:
            raise ValueError(f"{self.flag} {error}") from None

    def _joined(self, values: list[Any]) -> str:
        texts = [str(value) for value in values]
        if with_comma := next((text for text in texts if "," in text and len(texts) > 1), None):
            self._refuse(with_comma, "has a comma, with which several are joined; give it alone")
        return ",".join(texts)

    def _refuse(self, value: Any, reason: str) -> NoReturn:
        """Raises ValueError, showing bytes that are not UTF-8 in hexadecimal digits."""
        shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if len(shown) > MOST_SHOWN:
            shown = f"{shown[:MOST_SHOWN]}..."
        if not is_utf8(shown):
            shown = shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        joint = ": " if reason.startswith("give") else " "
        raise ValueError(f"{self.flag} {shown}".rstrip() + f"{joint}{reason}")

    def _reason(self, error: Any) -> str:
        kind = error["type"]
        if len(self.setting.choices) > MANY_CHOICES:
            return f"is not known; {most_like(str(error['input']), self.setting.choices)}"
        if self.setting.choices:
            return f"is not known; choose from {', '.join(self.setting.choices)}"
        if kind in REASONS:
            return REASONS[kind].format(**error.get("ctx", {}))
        number = "a whole number" if kind.startswith("int") else "a number"
        if self.setting.words:
            return f"is not known; choose {number} or {' or '.join(self.setting.words)}"
        return f"is not {number}"


@cache
def declared(section: type) -> dict[str, Declared]:
    """The settings of a section by field name, in order."""
    hints = typing.get_type_hints(section)
    return {
        field.name: Declared(
            field.name, _without_none(hints[field.name]), field.default, field.metadata[KEY]
        )
        for field in dataclasses.fields(section)
        if KEY in field.metadata
    }


def flag_of(section: Any, name: str) -> str:
    """The first spelling of a section field's flag, for messages."""
    kind: type = type(section)
    return declared(kind)[name].flag


def check_values(values: Any, section: type | None = None) -> None:
    """Raises ValueError, as `Declared.read`, for numbers that a program set wrongly. `section`
    declares the fields. Choices are left to their resolution."""
    kind: type = section or type(values)
    for name, declaration in declared(kind).items():
        value = getattr(values, name)
        is_free = bool(declaration.setting.choices) or (declaration.is_list and not value)
        if value is not None and value != declaration.default and not is_free:
            declaration.read(value)


def _without_none(hint: Any) -> Any:
    parts = [part for part in typing.get_args(hint) if part is not NoneType]
    if len(parts) == len(typing.get_args(hint)):
        return hint
    return typing.Union[tuple(parts)]  # noqa: UP007


@cache
def _adapter(kind: Any, declared: Setting) -> Any:
    from annotated_types import Ge, Gt, Le, Lt
    from pydantic import ConfigDict, TypeAdapter

    limits = ((Ge, declared.least), (Gt, declared.above), (Le, declared.most), (Lt, declared.below))
    bounds = [limit(value) for limit, value in limits if value is not None]
    is_open = declared.most is None and declared.below is None

    def bounded(part: Any) -> Any:
        if part is int and is_open:
            part = typing.Annotated[(part, *bounds, Lt(MOST_INTEGER))]
        elif part in (int, float):
            part = typing.Annotated[(part, *bounds)] if bounds else part
        if part is str and declared.choices:
            part = typing.Literal[declared.choices]
        return part

    if typing.get_origin(kind) is tuple:
        item = bounded(typing.get_args(kind)[0])
        kind = tuple.__class_getitem__((item, ...))
    elif declared.words:
        kind = typing.Union[bounded(int), typing.Literal[declared.words]]  # noqa: UP007
    else:
        kind = bounded(kind)
    # A text with a bound is a number or a distribution of numbers, such as --prefix_len.
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=bool(bounds))
    return TypeAdapter(kind, config=config)
