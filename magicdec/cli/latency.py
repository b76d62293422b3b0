"""`magicdec latency`: what one decode, verify or draft forward takes at a fixed cache length, over
a grid of batch sizes, contexts, new tokens and KV budgets.

    magicdec latency --B 1 4 --prefix_len 4096 16384 --T 1 2 4 8 --budget 65 257
    magicdec latency --nproc 2 --out latency.json --csv latency.csv

Owns the flags, the grid and its checks; `forwards.py` measures, `latency_report.py` prints and
writes. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from magicdec.cli.flags import add_section, announce_backend, read_sections, refuse, run_on_ranks
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.config.checks import MOST_WATCHED, check_budget, policy_called
from magicdec.config.choices.backend import check_returns_weights
from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, flag_of
from magicdec.console import labelled
from magicdec.distributed.groups import Launch, read_launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.tensor_parallel import Shard
from magicdec.distributed.watching.watch import naming_lost
from magicdec.latency.rows import KV_FIELDS, Grid
from magicdec.names import DEFAULT_KV_POLICY, FULL_KV_POLICY, KV_POLICIES
from magicdec.records.writing import check_files

if TYPE_CHECKING:
    from magicdec.model.checkpoint.source import ModelSource

BUDGETS = (65, 257)
EVERYDAY = (
    *("--model", "--nproc", "--B", "--prefix_len", "--T", "--kv_policy", "--budget", "--repeats"),
    *("--out", "--csv"),
)


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    config: RunConfig
    grid: Grid
    json_path: Path | None
    csv_path: Path | None


def main() -> NoReturn:
    """Measure on all ranks; the first prints the table and writes the files."""
    launch = read_launch()
    try:
        asked = parse(sys.argv[1:])
        nproc = asked.config.parallel.nproc
        asked.config.check(find_world_size(nproc, launch))
        run_on_ranks(nproc, sys.argv[1:], launch, partial(check_heads, asked.config))
        resolved, source, memory = prepare(asked, launch)
    except ValueError as error:
        refuse(error, launch)
    announce_backend(resolved, launch)
    if launch.rank == 0:
        print(labelled("memory", memory), flush=True)
    from magicdec.latency.forwards import measure
    from magicdec.latency.report import make_latency, print_table, write_files

    try:
        with naming_lost(launch):
            config, environment, rows = measure(resolved, asked.grid, source, launch)
    except KeyboardInterrupt:
        sys.exit(130)
    if launch.rank == 0:
        found = make_latency(config, asked.grid, source, environment, rows)
        print_table(found)
        try:
            write_files(found, asked.json_path, asked.csv_path)
        except ValueError as error:
            refuse(error, launch)
    sys.exit(0)


def build_parser() -> Parser:
    parser = Parser(
        description="Time single forwards at fixed cache lengths. With --nproc or under torchrun "
        "the model is spread over all ranks.",
        everyday=EVERYDAY,
    )
    config = RunConfig()
    add_section(parser, "model", config.model)
    add_section(parser, "parallel", config.parallel)
    add_section(parser, "attention", config.attention, only=("backend",))
    add_section(parser, "decoding", config.decoding, only=("cuda_graphs",))
    add_section(parser, "kv", config.kv, only=KV_FIELDS)
    add = parser.add_argument_group("grid").add_argument
    numbers: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    add("--B", **numbers, default=[1, 4, 8], help="rows of a forward [1 4 8]")
    add("--prefix_len", "--context", **numbers, dest="context", default=[1024, 4096, 16384],
        help="cached tokens a row [1024 4096 16384]")  # fmt: skip
    add("--T", **numbers, default=[1, 2, 4, 5, 8],
        help="new tokens a row of a verify forward; the decode (1) is always timed [1 2 4 5 8]",
    )  # fmt: skip
    add("--kv_policy", nargs="+", choices=tuple(KV_POLICIES), default=[DEFAULT_KV_POLICY],
        help=f"what a draft forward reads of the cache [{DEFAULT_KV_POLICY}]")  # fmt: skip
    add("--budget", **numbers,
        help="KV entries a draft forward reads of the context [65 257]; none where the "
        "policy reads it all")  # fmt: skip
    add("--repeats", type=int, default=20, metavar="N", help="timed rounds of each forward [20]")
    add("--warmup", type=int, default=3, metavar="N", help="rounds beforehand [3]")
    output = parser.add_argument_group("output").add_argument
    output("--out", "--json", type=Path, dest="json", metavar="FILE",
        help="write config, environment and rows here")  # fmt: skip
    output("--csv", type=Path, metavar="FILE", help="write the rows here, a line a forward")
    return parser


def parse(argv: Sequence[str]) -> Asked:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    args, given = build_parser().read(argv)
    config = read_sections(RunConfig(), args)
    check_grid(args)
    check_settings(args.kv_policy, given)
    grid = Grid(
        tuple(args.B),
        tuple(args.context),
        tuple(sorted({1, *args.T})),
        find_drafts(config.kv, args.kv_policy, args.budget),
        args.repeats,
        args.warmup,
    )
    watching = next((p for p in args.kv_policy if policy_called(p).needs_weights), None)
    if watching and max(args.T) > MOST_WATCHED:
        raise ValueError(
            f"--T {max(args.T)} is too large for --kv_policy {watching}; "
            f"it must be at most {MOST_WATCHED}"
        )
    check_outputs(args.json, args.csv)
    # A RunConfig has one policy; here it only lends the flags that all policies share.
    config = replace(config, kv=grid.drafts[0])
    return Asked(config, grid, args.json, args.csv)


def check_settings(policies: Sequence[str], given: set[str]) -> None:
    """Raises ValueError if a setting was given that none of the policies uses."""
    used = {setting for policy in policies for setting in policy_called(policy).settings}
    for name in KV_FIELDS:
        if f"kv.{name}" in given and name not in (*used, "draft_kv_dtype"):
            raise ValueError(
                f"{flag_of(KVSection(), name)} does nothing here: no policy of --kv_policy "
                f"{' '.join(policies)} uses it; leave it out"
            )


def check_grid(args: argparse.Namespace) -> None:
    """Every number is at least 1 (--warmup: 0), and no list names one twice."""

    def shown(name: str) -> str:
        return "prefix_len" if name == "context" else name

    for name in ("B", "context", "T", "budget", "repeats", "warmup"):
        value = getattr(args, name)
        least = 0 if name == "warmup" else 1
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < least:
                place = f"--{shown(name)} {number}"
                raise ValueError(f"{place} is too small; it must be at least {least}")
    for name in ("B", "context", "T", "budget", "kv_policy"):
        values = getattr(args, name) or []
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"--{shown(name)} names {value} twice; name each value once")


def find_drafts(
    kv: KVSection, policies: Sequence[str], budgets: Sequence[int] | None
) -> tuple[KVSection, ...]:
    """Each policy with each budget; `full` alone has none. Raises ValueError for a budget that a
    policy cannot keep."""
    if budgets and list(policies) == [FULL_KV_POLICY]:
        raise ValueError(
            f"--budget {' '.join(map(str, budgets))} does nothing: --kv_policy "
            f"{FULL_KV_POLICY} reads it all; "
            f"add a policy of {', '.join(p for p in KV_POLICIES if p != FULL_KV_POLICY)}"
        )
    drafts = []
    for policy in policies:
        for budget in (-1,) if policy == FULL_KV_POLICY else budgets or BUDGETS:
            draft = replace(kv, policy=policy, budget=budget)
            check_budget(draft, 0, flag="--budget")
            drafts.append(draft)
    return tuple(drafts)


def check_outputs(json_path: Path | None, csv_path: Path | None) -> None:
    """Raises ValueError if one of them cannot be written, or if they are the same."""
    check_files({"--out": json_path, "--csv": csv_path})
    if json_path and csv_path and json_path.resolve() == csv_path.resolve():
        raise ValueError(f"--out and --csv are both {json_path}; name two files")


def prepare(asked: Asked, launch: Launch) -> tuple[ResolvedConfig, ModelSource, str]:
    """Resolve the config, check the grid against the model and the memory; the last is the memory
    plan in a line. Raises ValueError as `parse` does."""
    from magicdec.executor.descriptions import layer_obstacle
    from magicdec.hardware.environment import probe_machine
    from magicdec.latency.memory import check_grid_memory
    from magicdec.memory.check import check_together
    from magicdec.memory.free_memory import free_device_memory
    from magicdec.memory.plan import Models
    from magicdec.model.checkpoint.source import find_model
    from magicdec.setup.model_checks import (
        check_interpreter,
        check_length,
        check_scores,
        check_window,
    )
    from magicdec.setup.prepare import as_stored, check_threads_equal

    check_threads_equal(launch, asked.config)
    source = find_model("--model", asked.config.model.model)
    model = source.config
    stored = as_stored(asked.config, source)
    config = resolve(
        stored,
        probe_machine(launch),
        model.cached_head_dim,
        layer_obstacles=(layer_obstacle(model), None),
    )
    check_interpreter(config)
    for kv in asked.grid.drafts:
        check_returns_weights(config.attention.backend, kv.resolve().policy)
    context, T = max(asked.grid.contexts), max(asked.grid.new_tokens)
    shown = f"--prefix_len {context} + --T {T} = {context + T}"
    check_length(shown, context + T, "--model", source)
    backend = config.attention.backend_choice.settled
    check_scores(backend, config.model.dtype, "--model", source)
    check_window(backend, context + T, "--model", source)
    Shard(0, launch.world_size).heads(model.num_heads, model.num_kv_heads)
    free = free_device_memory(config.parallel.device, launch.local_rank)
    place = config, asked.grid, Models(model), launch, free
    memory = check_together(launch, lambda: check_grid_memory(*place))
    return config, source, memory
