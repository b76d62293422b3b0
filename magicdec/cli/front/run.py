"""`magicdec run`: one run, in which `--draft` says what drafts.

    magicdec run --model checkpoints/Llama-3.2-1B --prefix_len 8192
    magicdec run --model meta-llama/Llama-3.1-8B --draft model:meta-llama/Llama-3.2-1B --nproc 2

Owns the flag `--draft`. `cli/flags.py` has all other flags and starts the run; `baseline`,
`selfspec` and `longspec` are the same with the flags of the original suite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import EVERYDAY, add_config_flag, add_section, read_flags, start
from magicdec.cli.parsing.config_file import read_config_file
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, option
from magicdec.names import BASELINE

DESCRIPTION = (
    "Decode long prompts, and compare every token with autoregressive decoding in the same run. "
    "--draft says what drafts."
)
MODEL_PREFIX = "model:"
SELF, NGRAM, NONE = "self", "ngram", "none"
CHOICES = f"{SELF}, {MODEL_PREFIX}NAME, {NGRAM}, {NONE}"


@dataclass(frozen=True)
class NamedDraft(DraftSection):
    """The draft that `--draft model:NAME` names."""

    model: str = option("demo-draft", "The draft.", "--draft")


def main() -> NoReturn:
    """`magicdec run`"""
    start(read)


def read(argv: Sequence[str]) -> RunConfig:
    """The config that the command line asks for. Raises ValueError, one line naming the flag, for
    what cannot be."""
    base = config_of_draft(find_draft(argv))
    parser = build_parser(base)
    found = read_flags(parser, base, argv)
    if found.decoding.drafter != "model":
        found = dataclasses.replace(found, draft=None)
    return found


def find_draft(argv: Sequence[str]) -> str:
    """The value of `--draft` on the command line or, if it has none, in the `--config` file."""
    draft, file = last_value(argv, "--draft"), last_value(argv, "--config")
    if draft is None and file is not None:
        draft = read_config_file(Path(file)).get("draft")
    return SELF if draft is None else str(draft)


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """What `flag` is given last, as `--flag VALUE` or `--flag=VALUE`; None if it is not given."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        if word == flag and following is not None:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def config_of_draft(draft: str) -> RunConfig:
    """The default config of a run with this draft."""
    if draft == NONE:
        return RunConfig(draft=NamedDraft(), decoding=DecodingSection(strategy=BASELINE))
    name = draft.removeprefix(MODEL_PREFIX)
    drafter = "model" if name != draft else draft
    if drafter not in (SELF, NGRAM, "model") or not name:
        raise ValueError(f"--draft {draft} is not known; choose from {CHOICES}")
    named = NamedDraft(model=name) if drafter == "model" else NamedDraft()
    return RunConfig(draft=named, decoding=DecodingSection("speculative", drafter))


def build_parser(base: RunConfig) -> Parser:
    """All flags of a run. `--draft` stands for the drafter and for the name of a draft model."""
    parser = Parser(description=DESCRIPTION, everyday=EVERYDAY)
    add_config_flag(parser)
    parser.add_argument("--draft", default=SELF, metavar="DRAFT",
        help="what proposes draft tokens: self (the model itself, with a small part of its KV "
        "cache), model:NAME (a smaller model, named as --model is), ngram (text of the prompt), or "
        f"none (autoregressive decoding) [{SELF}]")  # fmt: skip
    for section in dataclasses.fields(base):
        values = getattr(base, section.name)
        chosen_by_draft = {"draft": ("model",), "decoding": ("drafter",)}.get(section.name, ())
        names = [f.name for f in dataclasses.fields(values) if f.name not in chosen_by_draft]
        add_section(parser, section.name, values, only=names)
    return parser
