"""The commands that make one run: `magicdec run`, and the drivers of the original suite, which
decode in one way each with the suite's spellings of flags. Imports no torch.

    magicdec run --model checkpoints/Llama-3.2-1B --prefix_len 8192
    magicdec run --model meta-llama/Llama-3.1-8B --draft model:meta-llama/Llama-3.2-1B --nproc 2
    magicdec longdecode --kv_policy verified --gamma 8

A new way to run is a line in `DRIVERS`; `magicdec sweep` takes their names from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from magicdec.cli.flags import (
    EVERYDAY,
    NO_RECORD,
    announce_run,
    check_outputs,
    config_of,
    sections_of,
    start,
)
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues, Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    DraftChoice,
    DraftSection,
    ModelSection,
    WorkloadSection,
)
from magicdec.config.setting import declared, same, setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.names import BASELINE

if TYPE_CHECKING:
    from magicdec.setup.prepare import Prepared


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
    model: str = same(
        DraftSection,
        "model",
        flags=("--model",),
        help="The draft: demo, demo-draft, random:<preset>, a Hugging Face directory, or a "
        ".safetensors/.pth/.bin file beside its config.json.",
    )


@dataclass(frozen=True)
class OriginalSection:
    """What the original suite says in another way, beside `ALIASES`."""

    max_len: int | None = setting(
        None, "Tokens of a finished sequence: --prefix_len and --gen_len together."
    )


@dataclass(frozen=True)
class Driver:
    """A command, and the config that its flags start from. With `chooses_draft`, `--draft` names
    the drafter."""

    description: str
    config: RunConfig
    chooses_draft: bool = False

    def __call__(self) -> NoReturn:
        start(self.parse)

    def build_parser(self) -> Parser:
        sections: dict[str, Any] = {"file": ConfigFile()}
        if self.chooses_draft:
            settled = ("drafter", "ignore_eos" if self.config.decoding.ignore_eos else None)
            only = {
                "decoding": [name for name in declared(DecodingSection) if name not in settled],
                "draft": [name for name in declared(DraftSection) if name != "model"],
            }
            sections |= {"drafts": DraftChoice(), **sections_of(self.config)}
            return Parser(self.description, sections, only, everyday=EVERYDAY, gone=GONE)
        sections |= {**sections_of(self.config), "original": OriginalSection()}
        return Parser(self.description, sections, aliases=ALIASES, everyday=EVERYDAY)

    def config_of(self, values: ParsedValues) -> RunConfig:
        config = config_of(values, self.config)
        if self.chooses_draft:
            return config.with_draft(values[DraftChoice].draft)
        return with_max_len(config, values[OriginalSection].max_len)

    def read(self, words: Sequence[str]) -> RunConfig:
        """The config of a command line. Raises ValueError, one line naming the flag."""
        values = self.build_parser().read(words)
        config = self.config_of(values)
        refuse_ignored(config, values)
        return config

    def parse(self, words: Sequence[str], launch: Launch) -> RunCommand:
        """The command of a command line, checked for these ranks. Raises ValueError as `read`."""
        config = self.read(words)
        config.check(find_world_size(config.parallel.nproc, launch))
        if launch.rank == 0:
            check_outputs(config.output)
        return RunCommand(config)


@dataclass(frozen=True)
class RunCommand:
    """A run of one config."""

    config: RunConfig
    kept: str = NO_RECORD

    def check_ranks(self, config: RunConfig, nproc: int) -> None:
        check_heads(config, nproc)

    def preparation(self) -> Callable[[RunConfig, Launch], Prepared]:
        from magicdec.setup.prepare import prepare

        return prepare

    def announce(self, prepared: Prepared) -> None:
        from magicdec.cli.report import announce

        w = prepared.config.workload
        announce_run(prepared, prepared, w.prefix_len, w.num_new_tokens)
        announce(prepared)

    def conclude(self, prepared: Prepared) -> int:
        from magicdec.cli.report import conclude

        return conclude(prepared)


def with_max_len(config: RunConfig, max_len: int | None) -> RunConfig:
    """The config whose sequences have `max_len` tokens in the end. Raises ValueError if these are
    no more than the prompt's, or not those of `--gen_len`."""
    w = config.workload
    if max_len is None:
        return config
    gen_len = max_len - w.prefix_len
    if gen_len < 1:
        raise ValueError(
            f"--max_len {max_len} minus --prefix_len {w.prefix_len} is {gen_len}; it must be at "
            "least 1"
        )
    if w.gen_len not in (None, gen_len):
        raise ValueError(
            f"--max_len {max_len} is not --prefix_len {w.prefix_len} + --gen_len {w.gen_len}; give "
            "one of the two"
        )
    return replace(config, workload=replace(w, gen_len=gen_len))


GONE = {"--max_len": "give --gen_len, the tokens after the prompt"}
# Spellings of the original suite, beside those of the other commands.
ALIASES = {
    "kv.budget": ("--streamingllm_budget", "--draft_budget"),
    "draft.rank_group": ("--draft_rank_group", "--draft_group"),
}
RUN = Driver(
    "Decode long prompts, and compare every token with autoregressive decoding in the same run. "
    "--draft says what drafts.",
    RunConfig(draft=DraftSection()),
    chooses_draft=True,
)
LONG_DECODE = Driver(
    "Decode outputs that are many times as long as their prompts, past any end token, as models "
    "that reason do: `run` with other lengths. The table has acceptance by the length that the "
    "text has grown to.",
    RunConfig(
        draft=DraftSection(),
        decoding=DecodingSection(ignore_eos=True),
        workload=WorkloadSection(prefix_len=1024, gen_len=16384, num_batches=1, warmup_batches=0),
    ),
    chooses_draft=True,
)
baseline = Driver(
    "Autoregressive decoding of long prompts: the baseline of every comparison.",
    RunConfig(decoding=DecodingSection(strategy=BASELINE)),
)
selfspec = Driver(
    "Self-speculation: the target drafts for itself with a small budget of its own KV cache.",
    RunConfig(decoding=DecodingSection(strategy="speculative", drafter="self")),
)
longspec = Driver(
    "Speculation with a standalone draft: a smaller model (--model) on some of the ranks drafts "
    "for the target (--target).",
    RunConfig(
        model=TargetSection(),
        draft=StandaloneDraft(),
        decoding=DecodingSection(strategy="speculative", drafter="model"),
    ),
)
DRIVERS = {
    "run": RUN,
    "longdecode": LONG_DECODE,
    "baseline": baseline,
    "selfspec": selfspec,
    "longspec": longspec,
}
