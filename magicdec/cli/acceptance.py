"""`magicdec acceptance`: what drafts are worth at every position of a model's own continuations, by
context, draft, KV budget and number of draft tokens.

    magicdec acceptance --draft self self:int4 ngram --budget 65 257 --prefix_len 1024 4096
    magicdec acceptance --draft self self,kv_policy=snapkv,budget=129 ngram

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.bench.acceptance.record import MOST_DRAFTS, AcceptanceRecord, tables
from magicdec.cli.flags import LoneCommand, config_of
from magicdec.cli.parsing.drafts import OwnSettings, refuse_idle
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    NGRAM,
    NONE,
    SELF,
    DecodingSection,
    DraftChoice,
    DraftSection,
    KVSection,
    OutputSection,
    PictureSection,
    WorkloadSection,
)
from magicdec.config.setting import declared, same
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.names import DEFAULT_KV_POLICY, DRAFT_WEIGHTS, WITHOUT_BUDGET
from magicdec.output.console import START, labelled
from magicdec.output.figures import check_picture
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_files, check_record_file
from magicdec.records.reading import read_records
from magicdec.records.record import Record, append_records, records_of_type

if TYPE_CHECKING:
    from magicdec.bench.study.cells import StudyCell

BUDGETS = (65, 257)
EVERYDAY = (
    *("--model", "--dataset", "--draft", "--kv_policy", "--budget", "--prefix_len", "--gen_len"),
    *("--gamma", "--B", "--plot", "--out"),
)
SECTIONS = ("model", "draft", "parallel", "kv", "attention", "decoding", "sampling", "workload")
KV_SETTINGS = [name for name in declared(KVSection) if name not in ("policy", "budget")]
# Sections of which only some settings have a flag here.
ONLY = {
    "draft": ("eagle_layers",),
    "parallel": ("device", "threads"),
    "kv": KV_SETTINGS,
    "decoding": ("cuda_graphs", "ignore_eos", "lookup_corpus"),
    "workload": ("dataset", "seed", "skip_tokens", "prompt_format"),
}
# What a draft may have for itself.
OWN_SETTINGS = [
    *("flags.kv_policy", "flags.budget", "flags.gamma"),
    *(f"kv.{name}" for name in KV_SETTINGS),
    *("decoding.lookup_corpus", "draft.eagle_layers"),
]


@dataclass(frozen=True)
class AcceptanceFlags:
    draft: tuple[str, ...] = same(DraftChoice, "draft", (SELF,), is_set=True)
    kv_policy: tuple[str, ...] = same(KVSection, "policy", (DEFAULT_KV_POLICY,))
    budget: tuple[int, ...] = same(KVSection, "budget", BUDGETS, least=1, is_set=True)
    prefix_len: tuple[int, ...] = same(WorkloadSection, "prefix_len", (1024, 4096), is_set=True)
    gen_len: int = same(WorkloadSection, "gen_len", 256)
    B: int = same(WorkloadSection, "batch_size", 8)
    gamma: int = same(DecodingSection, "gamma", 8, words=(), most=MOST_DRAFTS)
    plot: Path | None = same(PictureSection, "plot")
    out: Path = same(OutputSection, "results", Path(OutputSection.results))


def run(values: ParsedValues) -> int:
    """Measures the cells that are not in `--out`, and prints the tables of all."""
    args = values[AcceptanceFlags]
    if args.plot is not None:
        check_picture("--plot", args.plot)
    check_files({"--plot": args.plot})
    check_record_file("--out", args.out)
    configs = make_configs(values)
    from magicdec.bench.acceptance.measuring import (
        cell_key,
        groups_of,
        measure_cells,
        prepare_cells,
        record_key,
    )
    from magicdec.bench.acceptance.memory import check_memory
    from magicdec.bench.study.progress import PassProgress
    from magicdec.output.console import make_progress
    from magicdec.setup.prepare import SetupCache

    prepared = list(prepare_cells(configs, SetupCache()))
    cells = [*{cell_key(cell): cell for cell in prepared}.values()]
    found = {record_key(record): record for record in records_in(args.out)}
    todo = [cell for cell in cells if cell_key(cell) not in found]
    num_done = len(cells) - len(todo)
    if num_done:
        say(f"{num_done} of {len(cells)} cells are in {args.out}")

    if todo:
        say(labelled("memory", check_memory(groups_of(todo)), START))

    def keep(cell: StudyCell, record: AcceptanceRecord) -> None:
        append_records("--out", args.out, [record])
        found[cell_key(cell)] = record

    try:
        measure_cells(todo, PassProgress(make_progress(True), Launch()), keep)
    except KeyboardInterrupt:
        num_done = sum(cell_key(cell) in found for cell in cells)
        raise KeyboardInterrupt(
            f"{num_done} of {len(cells)} cells are in {args.out}; the same command goes on with "
            "the others"
        ) from None
    records = [found[cell_key(cell)] for cell in cells]
    print_tables(tables(records))
    if args.plot is not None:
        from magicdec.bench.acceptance.figure import draw

        draw("--plot", args.plot, records)
        say(f"drawn to {args.plot}")
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_configs(values: ParsedValues) -> list[RunConfig]:
    """The run of each context and draft. Raises ValueError, one line naming the flag, for errors of
    any model."""
    args = values[AcceptanceFlags]
    drafts = []
    for text in args.draft:
        draft = OwnSettings.of(text, values, OWN_SETTINGS)
        configs = list(runs_of(draft))
        draft.refuse_idle(configs)
        drafts.append((draft, configs))
    refuse_idle(values, drafts)
    found = []
    for workload in workloads(config_of(values, RunConfig()).workload, args):
        for draft, configs in drafts:
            with draft.named():
                found += [checked(replace(config, workload=workload)) for config in configs]
    return [with_local_models(config) for config in found]


def workloads(base: WorkloadSection, args: AcceptanceFlags) -> Iterator[WorkloadSection]:
    for context in args.prefix_len:
        yield replace(
            base,
            batch_size=args.B,
            prefix_len=context,
            gen_len=args.gen_len,
            num_batches=1,
            warmup_batches=0,
        )


def runs_of(draft: OwnSettings) -> Iterator[RunConfig]:
    """The config of a draft with each policy and budget; of one that reads no cache one."""
    if draft.drafter == NONE:
        raise ValueError(f"--draft {NONE}: nothing drafts; leave it out")
    args = draft.values[AcceptanceFlags]
    base = config_of(draft.values, RunConfig(draft=DraftSection()))
    word, _, weights = draft.drafter.rpartition(":")
    is_low_bit = word.split("+")[-1] == SELF and weights in DRAFT_WEIGHTS
    decoding = replace(
        base.decoding,
        gamma=args.gamma,
        draft_weights=weights if is_low_bit else None,
        baseline=False,
        lookup_corpus=base.decoding.lookup_corpus if draft.drafter.startswith(NGRAM) else None,
    )
    config = replace(base, decoding=decoding).with_draft(word if is_low_bit else draft.drafter)
    if config.draft is not None and not config.decoding.has_eagle_head:
        config = replace(config, draft=replace(config.draft, eagle_layers=None))
    if config.decoding.model_drafter is None:
        yield replace(config, kv=KVSection())
        return
    for policy in args.kv_policy:
        for budget in args.budget:
            yield replace(config, kv=replace(base.kv, policy=policy, budget=budget))


def checked(config: RunConfig) -> RunConfig:
    if config.kv.policy in WITHOUT_BUDGET:
        config = replace(config, kv=replace(config.kv, budget=-1))
    config.kv.check(config.decoding.max_gamma, flag="--budget")
    config.check(world_size=1)
    return config


def records_in(path: Path) -> list[AcceptanceRecord]:
    if not path.is_file() or not path.stat().st_size:
        return []
    return records_of_type(read_records(path, Record), AcceptanceRecord)


main = LoneCommand(
    run,
    "Count the draft tokens that a model accepts at every position of its own continuations of "
    "texts, by context, draft, KV budget and number of draft tokens; with --temperature the "
    "probability that they are accepted. A cell that is in the file of records is not measured "
    "again.",
    {
        "file": ConfigFile(),
        **{name: getattr(RunConfig(draft=DraftSection()), name) for name in SECTIONS},
        "flags": AcceptanceFlags(),
    },
    only=ONLY,
    everyday=EVERYDAY,
)
