"""What a checkpoint's files state of how its weights are quantised: the `quantization_config` of
`config.json`, and files beside it, in which a program keeps the same settings or has them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.model.checkpoint.quantized.method import QuantizationMethod
from magicdec.model.families.config_keys import FOREIGN, QUANTIZATION_FILES, WAY_OUT
from magicdec.model.families.fields import ConfigFields, shown
from magicdec.names import QUANTIZATIONS, load_named
from magicdec.output.files import load_object

CONFIG = "config.json"
METHOD = "quant_method"
INNER = "quantization"  # of ModelOpt's file: the table of settings, beside the name of the program


@dataclass(frozen=True)
class StatedMethod:
    """A method, and the file that states it."""

    path: Path
    method: QuantizationMethod

    @property
    def by(self) -> str:
        """The place, in a sentence."""
        return f"the {FOREIGN} of {self.path}" if self.path.name == CONFIG else str(self.path)


def stated_tables(directory: Path) -> dict[Path, dict[str, Any]]:
    """The settings by file, those of `config.json` first. Raises ValueError for a file that is no
    JSON object."""
    found = {}
    for name in (CONFIG, *QUANTIZATION_FILES):
        path = directory / name
        if name != CONFIG and not path.is_file():
            continue
        content = load_object(path)
        if name == CONFIG:
            table = content.get(FOREIGN)
        else:
            table = {METHOD: QUANTIZATION_FILES[name]} | content.get(INNER, content)
        if table:
            found[path] = table
    return found


def read_method(directory: Path) -> StatedMethod | None:
    """The method that a directory states; None if its weights are plain. Raises ValueError, which
    names the file and the key, for anything that would be computed otherwise, or that two files
    state differently."""
    tables = stated_tables(directory)
    if not tables:
        return None
    path, table = next(iter(tables.items()))
    stated = StatedMethod(path, parsed(path, table))
    for other, settings in list(tables.items())[1:]:
        check_agrees(stated, table, other, settings)
    return stated


def parsed(path: Path, table: Mapping[str, Any]) -> QuantizationMethod:
    place = f"{path}: {FOREIGN}" if path.name == CONFIG else str(path)
    try:
        name = table[METHOD]
        if name not in QUANTIZATIONS:
            raise ValueError(f"{METHOD} {shown(name)} is not read")
        method: QuantizationMethod = load_named(QUANTIZATIONS, name)(ConfigFields(table))
    except KeyError as error:
        raise ValueError(f"{place}: field {error} is missing; {WAY_OUT}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}; {WAY_OUT}") from None
    return method


def check_agrees(
    stated: StatedMethod, table: Mapping[str, Any], other: Path, settings: Mapping[str, Any]
) -> None:
    """Raise ValueError unless each of `settings`, the table of `other`, leaves the method as it is
    when it replaces the same one of `table`."""
    for field, value in settings.items():
        if value is None:
            continue
        try:
            is_same = vars(parsed(other, {**table, field: value})) == vars(stated.method)
        except ValueError:
            if table.get(field) is None:
                raise
            is_same = False
        if not is_same:
            theirs = f", which says {shown(table[field])}" if field in table else ""
            raise ValueError(
                f"{other}: {field} {shown(value)} contradicts {stated.by}{theirs}; correct the one "
                "or the other"
            )
