"""`magicdec config RECORDS`: a record as a file for `--config` of the command that makes such
records, so that it can be measured or predicted again.

Owns which flags make a record. It takes what was resolved, so that no `auto` is chosen anew; a
prediction has the flags of its command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.cli.commands import parser_of
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Values
from magicdec.cli.records import TableSection
from magicdec.cli.serve import drafts_ahead, is_unused
from magicdec.config.capabilities import policy_called
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import MODEL_PREFIX, NONE, WrittenSection
from magicdec.config.setting import Declared, same, setting
from magicdec.config.toml_file import to_toml
from magicdec.latency.record import LatencyRecord
from magicdec.names import SEQUENTIAL
from magicdec.records.reading import read_records
from magicdec.records.record import MeasuredRecord, Record
from magicdec.records.writing import write_text
from magicdec.serving.modes import Pass
from magicdec.serving.record import ServingRecord

# The command that makes each kind of record.
COMMANDS = {"run": "run", "serving": "serve", "latency": "latency", "plan": "plan",
            "simulation": "simulate"}  # fmt: skip
# The keys of the recorded grid of `latency`, by their settings.
GRID = {"B": "batch_sizes", "prefix_len": "contexts", "T": "new_tokens", "repeats": "repeats",
        "warmup": "warmup"}  # fmt: skip
# Sections that name files, which belong to one run.
OF_FILES = ("file", "files", "output", "picture")
# What other flags of the file say: `--draft`, `--gen_len`, and layers that were resolved.
SAID_OTHERWISE = (
    *("draft.model", "decoding.drafter", "workload.max_len", "drafts.draft"),
    "serving.machine",
)


@dataclass(frozen=True)
class RecordSection:
    """The record, and where its flags go."""

    records: Path = setting(..., "File of records, as JSON lines.", "records")
    kind: str = same(TableSection, "kind", "run")
    record: int = setting(-1, "Which record: 1 is the first one, -1 the last one.")
    out: Path | None = same(WrittenSection, "out")


def write_flags(values: Values) -> int:
    args = values[RecordSection]
    record = find_record(args)
    text = f"# magicdec {COMMANDS[record.kind]} --config FILE\n" + to_toml(flags_of(record))
    if args.out is None:
        print(text, end="")
    else:
        write_text("--out", args.out, text)
    return 0


def find_record(args: RecordSection) -> Record:
    """Raises ValueError if the file has not so many records of that kind."""
    records = [each for each in read_records(args.records, Record) if each.kind == args.kind]
    if not 1 <= abs(args.record) <= len(records):
        raise ValueError(
            f"--record {args.record}: {args.records} holds {len(records)} records of --kind "
            f"{args.kind}"
        )
    return records[args.record - 1 if args.record > 0 else args.record]


def flags_of(record: Record) -> dict[str, Any]:
    """The flags of the command that make the record again, without those that it would ignore and
    those that name files to write. Raises ValueError for a prediction without its flags."""
    config = record.config
    if not isinstance(record, MeasuredRecord):
        flags: dict[str, Any] | None = config.get("flags")
        if flags is None:
            raise ValueError("the record is older than its flags; predict it again")
        return flags
    settings = parser_of(COMMANDS[record.kind]).settings
    if isinstance(record, LatencyRecord):
        flags, others, idle = of_grid(config)
    else:
        flags, others, idle = of_decoding(record, settings)
    if record.environment.world_size > 1:
        flags["nproc"] = record.environment.world_size
    for setting_name, each in settings.items():
        section, _, name = setting_name.partition(".")
        values = (config.get(section) or {}) if section in PARTS else others
        is_left_out = setting_name in idle or setting_name in SAID_OTHERWISE
        if section not in OF_FILES and not is_left_out:
            value = value_of(each, values.get(name))
            if value is not None:
                flags[each.flag.removeprefix("--")] = value
    return flags


Parts = tuple[dict[str, Any], dict[str, Any], set[str]]
"""Flags, values of settings that are in no section of a run, and settings that would be ignored."""


def of_decoding(record: MeasuredRecord, settings: Mapping[str, Declared]) -> Parts:
    """What is special in the record of a run or of a mode."""
    config, workload = record.config, record.config["workload"]
    draft, idle = draft_of(config), set[str]()
    if isinstance(record, ServingRecord):
        each_pass = Pass.named(record.name)
        draft = workload["draft"] if each_pass.is_drafting else NONE
        workload = workload | {"modes": modes_of(each_pass, workload)}
        idle = {name for name in settings if is_unused(name, [each_pass])}
        idle.add("parallel.rank_group")  # of all ranks, though one alone or a stage may compute
        if 0 in record.threads:  # one rank has had the threads of those that waited
            idle.add("parallel.threads")
    run_config = with_recorded(RunConfig().with_draft(draft), config)
    ignored = {name for name in settings if why_ignored(run_config, name) is not None}
    if workload.get("emulate_acceptance") is not None:
        ignored.discard("decoding.num_draft_tokens")
    idle |= {name for name in ignored if name.partition(".")[0] in PARTS}
    return {"draft": draft}, workload, idle


def of_grid(config: Mapping[str, Any]) -> Parts:
    """What is special in the record of a grid of forwards."""
    grid, drafts = config["grid"], config["grid"]["drafts"]
    policies = list(dict.fromkeys(draft["kv_policy"] for draft in drafts))
    used = {name for policy in policies for name in policy_called(policy).settings}
    values = {name: grid[key] for name, key in GRID.items()}
    values |= {"kv_policy": policies, "budget": sorted({d["budget"] or 0 for d in drafts} - {0})}
    window = drafts[0]["recent_window"] if "recent_window" in used else None
    flags = {} if window is None else {"recent_window": window}
    return flags, values, {f"kv.{name}" for name in config["kv"] if name not in used}


def modes_of(each: Pass, workload: dict[str, Any]) -> list[str]:
    """The modes that serve in this one again. An emulated drafter must know the tokens of an
    earlier mode, unless stages are emulated too."""
    has_script = workload["emulate_acceptance"] is not None and drafts_ahead(each)
    if has_script and workload["emulate_stage_ms"] is None:
        return [SEQUENTIAL, each.name]
    return [each.name]


PARTS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "workload")


def value_of(each: Declared, value: Any) -> Any:
    """A recorded value as a user writes it in TOML; None if it needs no flag, or is a resolved
    dtype where the flag is auto or int8."""
    if value is None or value in ({}, []):
        return None
    if isinstance(value, bool):
        return True if value != each.default else None
    if isinstance(value, dict):
        return [f"{name}:{bound:g}" for name, bound in value.items()]
    texts = value if isinstance(value, list | tuple) else [value]
    choices = each.setting.choices
    if choices and not set(texts) <= set(choices):
        return None
    return list(value) if isinstance(value, tuple) else value


def draft_of(config: dict[str, Any]) -> str:
    """The `--draft` of a recorded config."""
    drafter: str | None = config["decoding"]["drafter"]
    if drafter is None:
        return NONE
    if not drafter.endswith("model"):
        return drafter
    return drafter.removesuffix("model") + f"{MODEL_PREFIX}{config['draft']['model']}"


def with_recorded(run_config: RunConfig, config: dict[str, Any]) -> RunConfig:
    """`run_config` with the recorded values that decide which flags are ignored."""
    kv, temperature = config.get("kv"), config["sampling"]["temperature"]
    if kv is not None:
        policy = dataclasses.replace(run_config.kv, policy=kv["policy"], budget=kv["budget"])
        run_config = dataclasses.replace(run_config, kv=policy)
    return dataclasses.replace(
        run_config,
        decoding=dataclasses.replace(run_config.decoding, tree=config["decoding"].get("tree")),
        sampling=dataclasses.replace(run_config.sampling, temperature=temperature),
    )


main = LoneCommand(
    write_flags,
    "Print the flags of a record as TOML, for `--config FILE` of the command that makes such "
    "records. What `auto` chose in a run, a mode of serve or a latency is written by name.",
    {"record": RecordSection},
)
