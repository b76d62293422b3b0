"""The drivers of the original suite: commands that decode in one way each, with the spellings that
the suite has for their flags. Imports no torch.

A new way to run is a line in `DRIVERS`; the commands and `magicdec sweep` take their names from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from magicdec.cli.flags import EVERYDAY, config_of, sections_of, start
from magicdec.cli.parsing.ignored import drafts_only, refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, Parser
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, ModelSection
from magicdec.config.setting import same
from magicdec.names import BASELINE


@dataclass(frozen=True)
class TargetSection(ModelSection):
    """The target, where `--model` names the draft."""

    model: str = same(
        ModelSection,
        "model",
        flags=("--target",),
        help="The target, which verifies. Named as --model names a draft.",
    )


@dataclass(frozen=True)
class StandaloneDraft(DraftSection):
    """The draft, where `--model` names it."""

    model: str = same(
        DraftSection,
        "model",
        flags=("--model",),
        help="The draft: demo, demo-draft, random:<preset>, a Hugging Face directory, or a "
        ".safetensors/.pth/.bin file beside its config.json.",
    )


@dataclass(frozen=True)
class Driver:
    """A command of the suite, and the config that its flags start from."""

    description: str
    config: RunConfig

    def build_parser(self) -> Parser:
        """The help leaves out flags that the command could only refuse."""
        sections = {"file": ConfigFile(), **sections_of(self.config)}
        parser = Parser(self.description, sections, aliases=ALIASES, everyday=EVERYDAY)
        parser.hide(partial(drafts_only, self.config))
        return parser

    def read(self, words: Sequence[str]) -> RunConfig:
        """The config that the command line asks for. Raises ValueError, one line naming the flag,
        for what cannot be."""
        values = self.build_parser().read(words)
        config = config_of(values, self.config)
        refuse_ignored(config, values)
        return config


DRIVERS = {
    "baseline": Driver(
        "Autoregressive decoding of long prompts: the baseline of every comparison.",
        RunConfig(decoding=DecodingSection(strategy=BASELINE)),
    ),
    "selfspec": Driver(
        "Self-speculation: the target drafts for itself with a small budget of its own KV cache.",
        RunConfig(decoding=DecodingSection(strategy="speculative", drafter="self")),
    ),
    "longspec": Driver(
        "Speculation with a standalone draft: a smaller model (--model) on some of the ranks "
        "drafts for the target (--target).",
        RunConfig(
            model=TargetSection(),
            draft=StandaloneDraft(),
            decoding=DecodingSection(strategy="speculative", drafter="model"),
        ),
    ),
}
# Spellings of the original suite, beside those of the other commands.
ALIASES = {
    "kv.budget": ("--streamingllm_budget", "--draft_budget"),
    "draft.rank_group": ("--draft_rank_group", "--draft_group"),
}


def baseline() -> None:
    start(DRIVERS["baseline"].read)


def selfspec() -> None:
    start(DRIVERS["selfspec"].read)


def longspec() -> None:
    start(DRIVERS["longspec"].read)
