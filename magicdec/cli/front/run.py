"""`magicdec run`: one run, in which `--draft` says what drafts.

    magicdec run --model checkpoints/Llama-3.2-1B --prefix_len 8192
    magicdec run --model meta-llama/Llama-3.1-8B --draft model:meta-llama/Llama-3.2-1B --nproc 2

`baseline`, `selfspec` and `longspec` (`cli/drivers.py`) are the same in the spelling of the
original suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from magicdec.cli.flags import EVERYDAY, config_of, sections_of, start
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, Parser, Values
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftChoice, DraftSection
from magicdec.config.setting import declared

DESCRIPTION = (
    "Decode long prompts, and compare every token with autoregressive decoding in the same run. "
    "--draft says what drafts."
)
BASE = RunConfig(draft=DraftSection())
# Settings that `--draft` sets.
DRAFTED = {"decoding": (DecodingSection, "drafter"), "draft": (DraftSection, "model")}


def main() -> NoReturn:
    """`magicdec run`"""
    start(read)


def build_parser() -> Parser:
    only = {
        section: [name for name in declared(kind) if name != drafted]
        for section, (kind, drafted) in DRAFTED.items()
    }
    sections = {"file": ConfigFile(), "drafts": DraftChoice(), **sections_of(BASE)}
    return Parser(DESCRIPTION, sections, only, everyday=EVERYDAY)


def read(words: Sequence[str]) -> RunConfig:
    """The config that the command line asks for. Raises ValueError, one line naming the flag, for
    what cannot be."""
    values = build_parser().read(words)
    config = drafted_config(values)
    refuse_ignored(config, values)
    return config


def drafted_config(values: Values) -> RunConfig:
    """The config of a run with what `--draft` names."""
    return config_of(values, BASE).with_draft(values[DraftChoice].draft)
