"""`magicdec latency`: times of single decode, verify and draft forwards over a grid of batch sizes,
contexts, new tokens and KV budgets.

    magicdec latency --B 1 4 --prefix_len 4096 16384 --T 1 2 4 8 --budget 65 257
    magicdec latency --attention native grouped sdpa --B 8 --prefix_len 16384

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.bench.latency.record import (
    KV_FIELDS,
    LatencyGrid,
    LatencyRecord,
    break_even_table,
    make_record,
    tables,
)
from magicdec.bench.study.study import Settings
from magicdec.cli.flags import (
    announce_backend,
    config_of,
    ended_at_once,
    run_on_ranks,
    run_ranks,
)
from magicdec.cli.parsing.parser import ConfigFile, Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.config.capabilities import MOST_WATCHED, policy_called
from magicdec.config.choices.backend import check_coded_copy, check_returns_weights
from magicdec.config.choices.layers import check_copy, check_low_bit
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    SELF,
    AttentionSection,
    DecodingSection,
    KVSection,
    OutputSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.other_load import warn_of_load
from magicdec.names import DEFAULT_KV_POLICY, SAME, WITHOUT_BUDGET
from magicdec.output.console import START, labelled, spinner
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_record_file
from magicdec.records.record import append_records

if TYPE_CHECKING:
    from magicdec.setup.prepare import ResolvedRun

BUDGETS = (65, 257)
EVERYDAY = (
    "--model",
    "--nproc",
    "--B",
    "--prefix_len",
    "--T",
    "--kv_policy",
    "--budget",
    "--repeats",
    "--out",
)
SECTIONS = ("model", "parallel", "decoding", "kv")
# Sections of which only some settings have a flag here.
ONLY = {"decoding": ("cuda_graphs",), "kv": KV_FIELDS}


@dataclass(frozen=True)
class GridSection:
    attention: tuple[str, ...] = same(AttentionSection, "backend", ("auto",))
    B: tuple[int, ...] = same(WorkloadSection, "batch_size", (1, 4, 8), is_set=True)
    prefix_len: tuple[int, ...] = same(
        WorkloadSection, "prefix_len", (1024, 4096, 16384), is_set=True
    )
    T: tuple[int, ...] = setting(
        (1, 2, 4, 5, 8),
        "New tokens a row of a verify forward. The decode (1) is always timed.",
        least=1,
        is_set=True,
    )
    kv_policy: tuple[str, ...] = same(KVSection, "policy", (DEFAULT_KV_POLICY,))
    budget: tuple[int, ...] | None = same(
        KVSection, "budget", None, is_default=True, least=1, is_set=True
    )
    draft_weights: tuple[str, ...] | None = same(
        DecodingSection, "draft_weights", None, is_default=True, is_set=True
    )
    repeats: int = same(Settings, "repeats", 20)
    warmup: int = setting(3, "Rounds before the timed ones.", least=0)
    prefill_chunk: int | None = same(AttentionSection, "prefill_chunk", None, is_default=True)
    break_even: bool = setting(
        False,
        "Also print from how many emitted tokens of a step drafting pays, by draft and number of "
        "draft tokens.",
    )
    out: Path = same(OutputSection, "results", Path(OutputSection.results))


def run(words: Sequence[str], launch: Launch) -> int:
    """Measures on all ranks, with each of the attention backends; the first rank writes a record
    and prints a table of each."""
    with ended_at_once(launch):
        asked, grid, args = parse(words)
    nproc = asked.parallel.nproc
    asked.check(find_world_size(nproc, launch))
    run_on_ranks(nproc, words, launch, partial(check_heads, asked))
    with spinner(f"preparing {asked.model.model}", launch.rank == 0):
        runs = prepare(asked, args.attention, grid, launch)
    for run, memory in runs:
        if launch.rank == 0:
            announce_backend(run.config)
            print(labelled("memory", memory, START), flush=True)
    from magicdec.bench.latency.forwards import measure

    source = runs[0][0].source
    configs = [run.config for run, _ in runs]
    measured = measure(configs, grid, source, launch)
    for config, (environment, rows) in zip(configs, measured, strict=True):
        if launch.rank == 0:
            report(make_record(config, grid, source, environment, rows), args)
    return 0


def report(record: LatencyRecord, args: GridSection) -> None:
    try:
        append_records("--out", args.out, [record])
        print(f"record appended to {args.out}", file=sys.stderr)
    finally:
        print_tables(tables([record]))
        if args.break_even:
            print_tables([break_even_table(record)])
        warn_of_load([record.environment], "grids")


main = partial(run_ranks, run)


def build_parser() -> Parser:
    sections = {name: getattr(RunConfig(), name) for name in SECTIONS}
    return Parser(
        "Time single forwards at fixed cache lengths. With --nproc or under torchrun the model is "
        "spread over all ranks.",
        {"file": ConfigFile(), **sections, "grid": GridSection()},
        ONLY,
        everyday=EVERYDAY,
    )


def parse(words: Sequence[str]) -> tuple[RunConfig, LatencyGrid, GridSection]:
    """The config, grid and files of a command line. Raises ValueError, one line naming the flag,
    for errors of any model."""
    values = build_parser().read(words)
    config = config_of(values, RunConfig())
    args = values[GridSection]
    used = {setting for policy in args.kv_policy for setting in policy_called(policy).settings}
    idle = [f"kv.{name}" for name in KV_FIELDS if name not in used]
    idle += ["grid.budget"] if "budget" not in used else []
    values.refuse_given(idle, f"no policy of --kv_policy {' '.join(args.kv_policy)} uses it")
    drafts = [
        replace(config.kv, policy=policy, budget=budget)
        for policy in args.kv_policy
        for budget in ((-1,) if policy in WITHOUT_BUDGET else args.budget or BUDGETS)
    ]
    for draft in drafts:
        draft.check(0, flag="--budget")
    watching = next((p for p in args.kv_policy if policy_called(p).needs_weights), None)
    if watching and max(args.T) > MOST_WATCHED:
        raise ValueError(
            f"--T {max(args.T)} is too large for --kv_policy {watching}; "
            f"it must be at most {MOST_WATCHED}"
        )
    check_record_file("--out", args.out)
    new_tokens = tuple(sorted({1, *args.T}))
    copies = [dtype for dtype in args.draft_weights or () if dtype != SAME]
    grid = LatencyGrid(
        batch_sizes=args.B,
        contexts=args.prefix_len,
        new_tokens=new_tokens,
        drafts=tuple(drafts),
        repeats=args.repeats,
        warmup=args.warmup,
        draft_weights=(None, *copies),
        prefill_chunk=args.prefill_chunk,
    )
    return config, grid, args


def largest_run(asked: RunConfig, grid: LatencyGrid) -> RunConfig:
    """The run by which `auto` decides for the whole grid: largest batch and context, longest
    verification, as many drafts, and the policy that asks most of an attention backend."""
    watching = [kv for kv in grid.drafts if policy_called(kv.policy).needs_weights]
    most = max(1, max(grid.new_tokens) - 1)
    return replace(
        asked,
        kv=[*watching, *grid.drafts][0],
        decoding=replace(asked.decoding, strategy="speculative", drafter=SELF, gamma=most),
        workload=replace(
            asked.workload,
            batch_size=max(grid.batch_sizes),
            prefix_len=max(grid.contexts),
            gen_len=1,
        ),
    )


def prepare(
    asked: RunConfig, backends: Sequence[str], grid: LatencyGrid, launch: Launch
) -> list[tuple[ResolvedRun, str]]:
    """For each attention backend the run that stands for the grid, and a line with its memory plan,
    checked. Raises ValueError as `parse` does, also if two backends are the same one."""
    from magicdec.setup.prepare import SetupCache, find

    cache = SetupCache()
    runs: list[tuple[ResolvedRun, str]] = []
    names = dict[str, str]()
    for backend in backends:
        with_backend = replace(asked, attention=AttentionSection(backend))
        run = find(largest_run(with_backend, grid), launch, cache)
        name = str(run.config.attention.backend)
        if name in names:
            raise ValueError(
                f"--attention {names[name]} {backend} are both {name} here; leave one of them out"
            )
        names[name] = backend
        runs.append((run, check_grid(run, grid, launch)))
    return runs


def check_grid(run: ResolvedRun, grid: LatencyGrid, launch: Launch) -> str:
    """The line with the memory plan of a grid that the run's attention backend can serve. Raises
    ValueError otherwise."""
    from magicdec.bench.latency.forwards import check_grid_memory
    from magicdec.setup.memory_check import check_together, free_device_memory
    from magicdec.setup.model_checks import (
        check_groups,
        check_interpreter,
        check_length,
        check_scores,
        check_window,
    )
    from magicdec.setup.prepare import check_agreement, traits_of

    check_agreement(run, vars(grid))
    config = run.config
    source = run.source
    model = run.source.config
    check_interpreter(config)
    for weights in grid.draft_weights:
        check_copy(weights, config.model.target_dtype, config.run_config.model.native_steps)
        check_low_bit(weights, config.parallel.device, run.machine)
        check_groups("--draft_weights", weights, f"--model {source.name}", launch.world_size, model)
    for kv in grid.drafts:
        check_returns_weights(config.attention.backend, kv.resolve().policy)
        check_coded_copy(
            kv.resolve(),
            config.attention.backend,
            config.attention.kv_dtype,
            traits_of(model),
        )
    context = max(grid.contexts)
    T = max(grid.new_tokens)
    length = f"--prefix_len {context} + --T {T} = {context + T}"
    check_length(length, context + T, "--model", source)
    backend = config.attention.backend
    check_scores(backend, config.model.dtype, "--model", source)
    check_window(backend, context + T, "--model", source)
    Shard(0, launch.world_size).heads(model.num_heads, model.num_kv_heads)
    free = free_device_memory(config.parallel.device, launch.local_rank)
    return check_together(launch, lambda: check_grid_memory(config, grid, run.models, launch, free))
