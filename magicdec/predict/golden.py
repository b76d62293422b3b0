"""Reads the golden acceptance lengths of [InferenceX](https://github.com/SemiAnalysisAI/InferenceX)
(`golden_al_distribution/*.yaml`): for a model and a thinking mode, the mean acceptance length by
draft tokens of a step (`num_speculative_tokens`), which its benchmark prescribes; and the same with
a context axis, as `bench/export/golden.py` writes it. Imports no torch.

    minimax-m3:                                  smollm2-135m:
      thinking_on: {1: 1.79, 2: 2.39, 3: 2.78}     self_streaming_llm_65:
                                                     1024: {1: 1.84, 2: 2.52}
                                                     4096: {1: 1.81, 2: 2.43}

A length is 1 + accepted draft tokens / verifications, as `mean_acceptance_length` of a record is;
those of InferenceX were measured on the category `coding` of SPEED-Bench. Lengths that were not
measured are absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magicdec.bench.export.golden import SUFFIXES
from magicdec.output.files import read_text
from magicdec.predict.lengths import EVERYWHERE, AcceptanceLengths

MOST_BYTES = 1 << 20
ABOUT = "_metadata"  # a key that is no model


def is_golden(text: str) -> bool:
    return Path(text).suffix in SUFFIXES


def load_golden(path: Path, mode: str | None) -> tuple[AcceptanceLengths, str]:
    """The acceptance lengths of a curve, and the model with the curve's name, such as a thinking
    mode. `mode` None stands for the only one. Raises ValueError, one line, if the file cannot be
    read or has no such mode."""
    try:
        modes, model = _modes(_parsed(path))
        names = ", ".join(modes)
        if mode is None and len(modes) > 1:
            raise ValueError(f"it has several curves; choose one by --acceptance_curve: {names}")
        chosen = next(iter(modes)) if mode is None else mode
        if chosen not in modes:
            raise ValueError(f"it has no --acceptance_curve {chosen}; choose from {names}")
        return _by_context(chosen, modes[chosen]), f"{model}, {chosen}"
    except OSError as error:
        raise ValueError(f"--acceptance {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--acceptance {path}: {error}") from None


def _parsed(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(read_text(path, MOST_BYTES))
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"it is no YAML ({error.problem}{at})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is no YAML ({type(error).__name__})") from None


def _modes(raw: Any) -> tuple[dict[str, Any], str]:
    """The curves by thinking mode of the one model of a file."""
    models = dict(raw) if _is_map(raw) else {}
    models.pop(ABOUT, None)
    if len(models) != 1:
        raise ValueError("it is no golden acceptance file of InferenceX, which has one model")
    ((model, modes),) = models.items()
    if not _is_map(modes) or not modes:
        raise ValueError(f"{model} has no thinking modes")
    return {str(mode): lengths for mode, lengths in modes.items()}, str(model)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _by_context(mode: str, raw: Any) -> AcceptanceLengths:
    """The lengths of a mode; of one without contexts they hold everywhere. Raises ValueError as
    `_lengths` does, and for a context that cannot be."""
    contexts = raw if _is_map(raw) and any(map(_is_map, raw.values())) else {EVERYWHERE: raw}
    found = {}
    for context, lengths in contexts.items():
        is_known = contexts is raw
        if is_known and (type(context) is not int or context < 1):
            raise ValueError(
                f"{mode} has a context of {context}; a whole number of tokens from 1 on is needed"
            )
        where = f"{mode} at {context} tokens" if is_known else mode
        gamma_lengths = _lengths(where, lengths)
        found[context] = {gamma: (length,) for gamma, length in gamma_lengths.items()}
    return AcceptanceLengths(dict(sorted(found.items())))


def _lengths(mode: str, raw: Any) -> dict[int, float]:
    """The lengths of a mode. Raises ValueError, naming the number of draft tokens, for one that
    cannot be."""
    if not _is_map(raw) or not raw:
        raise ValueError(f"{mode} has no acceptance lengths")
    lengths = {}
    for count, value in raw.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{mode} has {count} draft tokens; a whole number from 1 on is needed")
        try:
            length = float(value)
        except (TypeError, ValueError):
            length = math.nan
        if not 1 <= length <= count + 1:
            raise ValueError(
                f"{mode} has an acceptance length of {value} for {count} draft tokens; it is from "
                f"1 to {count + 1}"
            )
        lengths[count] = length
    return dict(sorted(lengths.items()))
