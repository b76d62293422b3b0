"""`magicdec config RECORDS`: a record as a file for `--config` of the command that made it, so that
it can be run again.

Owns which flags make the run or the pass of a record. It takes what was resolved, so that no `auto`
is chosen anew.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.commands import parser_of
from magicdec.cli.flags import refuse
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.table import TableSection
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import MODEL_PREFIX, NONE, WrittenSection
from magicdec.config.setting import Declared, same, setting
from magicdec.config.threads import describe_threads
from magicdec.config.toml_file import to_toml
from magicdec.distributed.groups import Launch
from magicdec.names import RECORDS, load_named
from magicdec.records.reading import read_records
from magicdec.records.record import MeasuredRecord
from magicdec.records.writing import write_text

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
# The command of each kind of record that has the flags of one run or pass.
COMMANDS = {"run": "run", "serving": "inflight", "pipeline": "recurrent", "speculation": "pipeline"}
# Sections that name files, which belong to one run.
OF_FILES = ("file", "files", "output", "picture")
# What other flags of the file say: `--draft`, `--gen_len`, and layers that were resolved.
SAID_OTHERWISE = (
    *("draft.model", "decoding.drafter", "workload.max_len", "drafts.draft"),
    *("ring.machine", "pipeline.machine"),
)
DESCRIPTION = (
    "Print the flags of a recorded run, or of a pass of inflight, recurrent or pipeline, as TOML, "
    "for `magicdec COMMAND --config FILE`. What `auto` chose is written by name."
)


@dataclass(frozen=True)
class RecordSection:
    """The record, and where its flags go."""

    records: Path = setting(..., "File of records, as JSON lines.", "records")
    kind: str = same(TableSection, "kind", "run", choices=tuple(COMMANDS))
    record: int = setting(-1, "Which record: 1 is the first one, -1 the last one.")
    out: Path | None = same(WrittenSection, "out")


def main() -> NoReturn:
    """`magicdec config RECORDS`"""
    try:
        args = build_parser().read(sys.argv[1:])[RecordSection]
        record = find_record(args)
        head = f"# magicdec {COMMANDS[record.kind]} --config FILE\n"
        text = head + to_toml(flags_of(record))
        if args.out is not None:
            write_text("--out", args.out, text)
    except ValueError as error:
        refuse(error, ALONE)
    if args.out is None:
        print(text, end="")
    sys.exit(0)


def build_parser() -> Parser:
    return Parser(DESCRIPTION, {"record": RecordSection})


def find_record(args: RecordSection) -> MeasuredRecord:
    """Raises ValueError if the file has not so many records of that kind."""
    kind = load_named(RECORDS, args.kind)
    records: list[MeasuredRecord] = list(read_records(args.records, kind, others=Counter()))
    if not 1 <= abs(args.record) <= len(records):
        raise ValueError(
            f"--record {args.record}: {args.records} holds {len(records)} records of --kind "
            f"{args.kind}"
        )
    return records[args.record - 1 if args.record > 0 else args.record]


def flags_of(record: MeasuredRecord) -> dict[str, Any]:
    """The flags of the command that make the record's run or pass, without those that it would
    ignore and those that name files to write."""
    config, workload = record.config, record.config["workload"]
    # To the stages of a pipeline every draft is a model, so that its name is not in `config`.
    draft = workload["draft"] if record.kind == "speculation" else draft_of(config)
    run_config = with_recorded(RunConfig().with_draft(draft), config)
    flags: dict[str, Any] = {"draft": draft}
    if record.environment.world_size > 1:
        flags["nproc"] = record.environment.world_size
    modes = {"modes": [workload["batching"]]} if "batching" in workload else {}
    for setting_name, each in parser_of(COMMANDS[record.kind]).settings.items():
        section, _, name = setting_name.partition(".")
        values = (config.get(section) or {}) if section in PARTS else workload | modes
        is_idle = section in PARTS and why_ignored(run_config, setting_name) is not None
        if section not in OF_FILES and not is_idle and setting_name not in SAID_OTHERWISE:
            value = value_of(each, values.get(name))
            if value is not None:
                flags[each.flag.removeprefix("--")] = value
    return flags


PARTS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "workload")


def value_of(each: Declared, value: Any) -> Any:
    """A recorded value as a user writes it in TOML; None if it needs no flag, or is a resolved
    dtype where the flag is auto or int8."""
    if value is None or value == {}:
        return None
    if isinstance(value, bool):
        return True if value != each.default else None
    if isinstance(value, dict):
        return [f"{name}:{bound:g}" for name, bound in value.items()]
    if each.name == "threads":
        return value if isinstance(value, int) else describe_threads(value)
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
    return f"{MODEL_PREFIX}{config['draft']['model']}" if drafter == "model" else drafter


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
