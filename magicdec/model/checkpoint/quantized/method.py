"""QuantizationMethod: what a `quantization_config` says, by its `quant_method`. A format is a
subclass in a file of its own, and a line of the table QUANTIZATIONS (`magicdec/names.py`)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix
from magicdec.model.families.fields import ConfigFields, shown


class QuantizationMethod(ABC):
    """The settings of a `quantization_config`. Its constructor raises ValueError, which begins with
    the key, for any that would be computed otherwise."""

    def __init__(self, table: ConfigFields) -> None:
        self.method = table["quant_method"]

    @abstractmethod
    def is_marked(self, parts: Parts) -> bool:
        """Whether the tensors of a module are those of a quantised one."""

    @abstractmethod
    def quantizes(self, module: str, is_head: bool) -> bool:
        """Whether the config says that the linear layer, or the head, is quantised."""

    def leaves_out(self, module: str, is_head: bool) -> bool:
        """Whether it says that the layer is plain. Both may be so where programs read a list
        differently; the tensors then decide."""
        return not self.quantizes(module, is_head)

    @abstractmethod
    def matrix(self, parts: Parts, module: str) -> QuantizedMatrix:
        """Raises ValueError for tensors that do not fit the config."""


def choose(table: ConfigFields, field: str, choices: Collection[object], default: object) -> None:
    """Raise ValueError unless the value of the field, or its default, is one of `choices`."""
    value = table.get(field)
    value = default if value is None else value
    # 1 equals True and [] equals nothing else: compare as they are written.
    if repr(value) not in {repr(choice) for choice in choices}:
        listed = ", ".join("null" if choice is None else str(choice) for choice in choices)
        raise ValueError(f"{field} {shown(value)} is not read; those that are: {listed}")


def absent(table: ConfigFields, *fields: str) -> None:
    """Raise ValueError if one of the fields has a value; null, false and empty ones have none."""
    for field in fields:
        value = table.get(field)
        if value:
            raise ValueError(f"{field} {shown(value)} is not read; only its absence is")


def check_rest(table: ConfigFields, irrelevant: Collection[str]) -> None:
    """Raise ValueError for a field that nobody has read, unless it is irrelevant."""
    for field, value in table.unread().items():
        if field not in irrelevant:
            raise ValueError(
                f"{field} {shown(value)} is not known, and might change what is computed; remove "
                "the field if it does not"
            )


def names_of(table: ConfigFields, field: str) -> list[str]:
    """A list of texts; an absent one is empty."""
    value = table.get(field)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{field} {shown(value)} is not a list of names")
    return value


def listed_modules(table: ConfigFields, field: str) -> list[str]:
    """A list of modules that are not converted. transformers reads each as a pattern."""
    names = names_of(table, field)
    for name in names:
        compiled(name)
    return names


def is_listed(module: str, names: list[str]) -> bool:
    """As transformers: a name is the beginning of the module's, up to a dot, or its end."""
    return any(
        re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(name)
        for name in names
    )


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression ({error})") from None
