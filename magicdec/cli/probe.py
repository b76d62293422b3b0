"""`magicdec probe`: measures the rates of this machine into a file for `magicdec plan`, or finds
the fastest attention backend of a run.

    magicdec probe --nproc 2 --out machine.json
    magicdec probe --attention --model meta-llama/Llama-3.1-8B --B 8 --prefix_len 16384

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.cli.flags import config_of, run_on_ranks, run_ranks
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DraftChoice, DraftSection, ParallelSection, WrittenSection
from magicdec.config.setting import setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.hardware.other_load import LoadWatch, warn_of_load
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.output.tables import Column, Table
from magicdec.output.writing import check_writable
from magicdec.records.metric_tables import fixed

if TYPE_CHECKING:
    from magicdec.predict.probe_attention import BackendTime
    from magicdec.setup.prepare import ResolvedRun

# What describes the run whose attention is measured: some settings of these sections.
OF_ATTENTION = {
    "model": ("model", "dtype"),
    "kv": (
        *("policy", "budget", "num_sink_tokens", "window_size", "reselect_every"),
        "recent_window",
    ),
    "decoding": ("gamma", "cuda_graphs"),
    "workload": ("batch_size", "prefix_len", "gen_len"),
}


@dataclass(frozen=True)
class ProbeSection(WrittenSection):
    attention: bool = setting(
        False,
        "Measure the attention backends instead, over a step of the run that the flags describe, "
        "and print which --attention is the fastest there. No file is written.",
    )


def run(words: Sequence[str], launch: Launch) -> int:
    """Measures on all ranks. Rank 0 writes the file and prints the results."""
    asked = parse(words)
    config = asked.config
    nproc = asked.config.parallel.nproc
    config.check(find_world_size(nproc, launch))
    if asked.has_attention:
        config = with_local_models(config)
        run_on_ranks(nproc, words, launch, partial(check_heads, config))
        return probe_attention(config, launch)
    run_on_ranks(nproc, words, launch)
    out = asked.out
    from magicdec.hardware.environment import probe_machine
    from magicdec.predict.probe import measure

    machine = probe_machine(launch)
    resolved = resolve(config, machine)
    results = measure(resolved, machine, launch)
    if launch.rank == 0:
        results.save(out)
        print_machine(results, out)
        if results.busy:
            print(
                f"warning: {results.busy}; the rates will be too low. Probe again when nothing "
                "else runs.",
                file=sys.stderr,
                flush=True,
            )
    return 0


main = partial(run_ranks, run)


def build_parser() -> Parser:
    return Parser(
        "Measure memory bandwidth, FLOP/s, all-reduce and overhead, and write them to a file; or, "
        "with --attention, which attention backend is the fastest in a run. Several ranks measure "
        "at the same time.",
        {
            "probe": ProbeSection(),
            "parallel": ParallelSection(),
            "drafts": DraftChoice(),
            **{name: getattr(RunConfig(), name) for name in OF_ATTENTION},
        },
        {"parallel": ("threads", "device", "nproc"), **OF_ATTENTION},
    )


@dataclass(frozen=True)
class Asked:
    """The parsed command line. `config` is the run whose attention is measured, or has only the
    ranks."""

    out: Path
    config: RunConfig
    has_attention: bool


def parse(words: Sequence[str]) -> Asked:
    """The parsed command line. Raises ValueError for unknown, impossible and unused flags."""
    values = build_parser().read(words)
    section = values[ProbeSection]
    out = section.out or Path("machine.json")
    parallel = values[ParallelSection]
    of_run = ("drafts", *OF_ATTENTION)
    if not section.attention:
        idle = [name for name in values.settings if name.partition(".")[0] in of_run]
        values.refuse_given(idle, "it describes a run, for --attention")
        check_writable("--out", out)
        return Asked(out, RunConfig(parallel=parallel), has_attention=False)
    values.refuse_given(["probe.out"], "--attention prints what it finds")
    config = config_of(values, RunConfig(draft=DraftSection()))
    config = config.with_draft(values[DraftChoice].draft)
    refuse_ignored(config, values)
    return Asked(out, config, has_attention=True)


def probe_attention(config: RunConfig, launch: Launch) -> int:
    """Measures the backends on all ranks. Rank 0 prints the table and the flag to give. Raises
    ValueError as a run of `config` does."""
    from magicdec.predict.probe_attention import measure_backends
    from magicdec.setup.model_checks import check_draft, check_fits, check_interpreter
    from magicdec.setup.prepare import SetupCache, check_agreement, find
    from magicdec.setup.session import RankSession

    run = find(config, launch, SetupCache())
    check_agreement(run)
    check_interpreter(run.config)
    check_fits(run.config, run.source, launch.world_size)
    if run.draft_source is not None:
        check_draft(run.config, run.source, run.draft_source)
    load = LoadWatch(launch.rank == 0)
    with RankSession(launch, run.config.parallel) as session:
        load.begin()
        times = list(measure_backends(run, session.groups.target, session.device))
        load.end()
        environment = load.add_to(session.describe_environment())
    if launch.rank == 0:
        print_attention(run, times)
        warn_of_load([environment], "times")
    return 0


def print_attention(run: ResolvedRun, times: Sequence[BackendTime]) -> None:
    from magicdec.predict.probe_attention import fastest_of, step_seconds, steps_of

    steps = steps_of(run)
    num_layers = [model.num_layers for model, _ in steps]
    served = [each for each in times if each.seconds]
    served.sort(key=lambda each: step_seconds(each, num_layers))
    rows: list[tuple[Any, ...]] = []
    for each in served:
        seconds = *each.seconds, step_seconds(each, num_layers)
        rows.append((each.name, *(fixed(value, 3, scale=1e3) for value in seconds)))
    draft = run.config.draft
    chosen = [run.config.attention.backend, *([] if draft is None else [draft.backend])]
    auto = " and ".join(dict.fromkeys(chosen))
    fastest = fastest_of(times, num_layers).name
    roles = ("target", "draft")[: len(steps)]
    Table(
        [
            Column("", is_text=True),
            *(f"{role}, ms a layer" for role in roles),
            "all layers, ms",
        ],
        rows,
        f"attention of a step on {run.config.parallel.device}, {run.config.model.dtype}",
        above=[
            f"{role}: {step.name}; {step.rows} rows, {step.num_heads} heads of {step.head_dim}, "
            f"{step.num_kv_heads} KV heads"
            for role, (_, step) in zip(roles, steps, strict=True)
        ],
        below=[
            *(f"{each.name} left out: {each.obstacle}" for each in times if each.obstacle),
            f"--attention {fastest} was the fastest; auto takes {auto}",
        ],
    ).print()


def print_machine(machine: MachineFile, out: Path) -> None:
    from magicdec.predict.probe import MANY

    by_dtype = (  # (label, name of the rates, digits, scale)
        ("matrix product, {}, TFLOP/s", "flops_per_s", 3, 1e-12),
        ("attention over a long cache, {}, GB/s", "kv_bytes_per_s", 1, 1e-9),
        (f"attention of {MANY} new tokens, {{}}, TFLOP/s", "attention_flops_per_s", 3, 1e-12),
        ("overhead of a layer, {}, us", "layer_overhead_s", 1, 1e6),
        ("overhead of a layer for each further token, {}, us", "token_overhead_s", 1, 1e6),
    )
    d = machine.description
    rows: list[tuple[object, ...]] = []

    def add(label: str, value: float, digits: int, scale: float, spread: str) -> None:
        spread_cell = fixed(machine.spreads.get(spread), 0, " %", 100)
        rows.append((label, fixed(value, digits, scale=scale), spread_cell))

    add("read bandwidth, GB/s", machine.read_bytes_per_s, 1, 1e-9, "read_bytes_per_s")
    for label, name, digits, scale in by_dtype:
        for dtype, rate in getattr(machine, name).items():
            add(label.format(dtype), rate, digits, scale, f"{name} {dtype}")
    for between, link in (("ranks", machine.link), ("nodes", machine.node_link)):
        if link is not None:
            label = f"all-reduce between {between} ({d['collectives']})"
            add(f"{label}, latency, us", link.latency_s, 1, 1e6, "link")
            add(f"{label}, GB/s", link.bytes_per_s, 2, 1e-9, "")
    Table(
        [Column("", is_text=True), "measured", "spread"],
        rows,
        f"{d['gpu'] or d['cpu']}: ranks {d['world_size']} x threads {d['threads']}, of one rank",
        below=[
            "spread: slowest over fastest repetition of the measurement, minus 1",
            f"written to {out}",
        ],
    ).print()
