"""`--draft` of `magicdec pipeline`: what it stands for in a run's config.

A draft model and self-speculation are the same to the ranks: a whole model on the draft's ranks,
with a KV cache of its own. Must not know how anything is drafted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from magicdec.cli.front.run import MODEL_PREFIX, NGRAM, SELF
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, option
from magicdec.names import BASELINE

DRAFTERS = f"{MODEL_PREFIX}NAME, {SELF}, {NGRAM}"
DEFAULT_DRAFTER = f"{MODEL_PREFIX}demo-draft"


@dataclass(frozen=True)
class NamedDrafter(DraftSection):
    """The draft that `--draft model:NAME` names."""

    model: str = option("demo-draft", "The draft.", "--draft")


def config_of_drafter(drafter: str) -> RunConfig:
    """The default config with this drafter. Raises ValueError if there is no such drafter."""
    name = drafter.removeprefix(MODEL_PREFIX)
    is_named = name != drafter
    if not name or not (is_named or name in (SELF, NGRAM)):
        raise ValueError(f"--draft {drafter} is not known; choose from {DRAFTERS}")
    draft = NamedDrafter(name) if is_named else NamedDrafter()
    kind = NGRAM if drafter == NGRAM else "model"
    return RunConfig(draft=draft, decoding=DecodingSection("speculative", kind))


def settle_draft(config: RunConfig, drafter: str) -> RunConfig:
    """`config` with the draft model that runs. `self` is the target, with its dtype."""
    draft, target = config.draft, config.model
    if draft is None or config.decoding.drafter == NGRAM:
        return replace(config, draft=None)
    if drafter == SELF:
        dtype = target.target_dtype if draft.draft_dtype == "auto" else draft.draft_dtype
        draft = replace(draft, model=target.model, draft_dtype=dtype)
    return replace(config, draft=draft)


def without_model(
    config: RunConfig, parser: Parser, given: Collection[str], reason: str
) -> RunConfig:
    """`config` of a command in which no model drafts. Raises ValueError, with the `reason`, for a
    flag of a draft that was given."""
    for dest in sorted(given):
        if dest.startswith(("kv.", "draft.")):
            raise ValueError(f"{parser.flag_of(dest)} does nothing here: {reason}; leave it out")
    decoding = replace(config.decoding, strategy=BASELINE, drafter=None)
    return replace(config, draft=None, decoding=decoding)
