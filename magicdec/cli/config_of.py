"""`magicdec config RECORDS`: the record of a run or a prediction as a file for `--config`, to
measure or predict it again. A run has its resolved values, so that no `auto` is chosen anew; a
prediction has the flags of its command.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.bench.report.listing import command_of
from magicdec.cli.commands import parser_of
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.cli.records import RecordTableSection
from magicdec.config.run_config import RunConfig, join_draft
from magicdec.config.sections import NONE, WrittenSection
from magicdec.config.setting import Declared, same, setting
from magicdec.config.toml_file import to_toml
from magicdec.output.writing import write_text
from magicdec.records.reading import read_records
from magicdec.records.record import MeasuredRecord, Record

# The commands that make records of which there are files.
COMMANDS = {"pass": "run", "plan": "plan", "simulation": "simulate"}
# Sections that name files, which belong to one run.
FILE_SECTIONS = ("file", "output")
# What another flag of the file says: `--draft`.
SAID_OTHERWISE = ("draft.model", "decoding.drafter", "drafts.draft")


@dataclass(frozen=True)
class RecordSection:
    records: Path = setting(..., "File of records, as JSON lines.", "records")
    kind: str = same(RecordTableSection, "kind", "pass")
    record: int = setting(-1, "Which record: 1 is the first one, -1 the last one.")
    out: Path | None = same(WrittenSection, "out")


def write_flags(values: ParsedValues) -> int:
    args = values[RecordSection]
    record = find_record(args)
    flags = to_toml(flags_of(record))
    text = f"# magicdec {COMMANDS[record.kind]} --config FILE\n{flags}"
    if args.out is None:
        print(text, end="")
    else:
        write_text("--out", args.out, text)
    return 0


def find_record(args: RecordSection) -> Record:
    """The chosen record. Raises ValueError if the file has fewer records of that kind."""
    records = [record for record in read_records(args.records, Record) if record.kind == args.kind]
    if not 1 <= abs(args.record) <= len(records):
        raise ValueError(
            f"--record {args.record}: {args.records} holds {len(records)} records of --kind "
            f"{args.kind}"
        )
    return records[args.record - 1 if args.record > 0 else args.record]


def flags_of(record: Record) -> dict[str, Any]:
    """The flags that make the record again, without ignored ones and files to write. Raises
    ValueError for a record of another kind, with its command, and for a prediction without
    flags."""
    config = record.config
    if not isinstance(record, MeasuredRecord):
        flags: dict[str, Any] | None = config.get("flags")
        if flags is None:
            raise ValueError("the record is older than its flags; predict it again")
        return flags
    if not record.is_of_run:
        again = command_of(record.environment)
        raise ValueError(f"the command itself makes the record again: {again}")
    draft = draft_of(config)
    run_config = with_recorded(RunConfig().with_draft(draft), config)
    flags = {"draft": draft}
    if record.environment.world_size > 1:
        flags["nproc"] = record.environment.world_size
    for setting_name, declaration in parser_of("run").settings.items():
        section, _, name = setting_name.partition(".")
        is_left_out = section in FILE_SECTIONS or setting_name in SAID_OTHERWISE
        if not is_left_out and why_ignored(run_config, setting_name) is None:
            value = value_of(declaration, (config.get(section) or {}).get(name))
            if value is not None:
                flags[declaration.flag.removeprefix("--")] = value
    return flags


def value_of(declaration: Declared, value: Any) -> Any:
    """A recorded value as a user writes it in TOML; None if it needs no flag, or is no choice of
    the flag."""
    if value is None or value == []:
        return None
    if isinstance(value, bool):
        return True if value != declaration.default else None
    texts = value if isinstance(value, list | tuple) else [value]
    choices = declaration.setting.choices
    if choices and not set(texts) <= set(choices):
        return None
    return list(value) if isinstance(value, tuple) else value


def draft_of(config: dict[str, Any]) -> str:
    drafter: str | None = config["decoding"]["drafter"]
    if drafter is None:
        return NONE
    draft = config["draft"]
    return join_draft(drafter, None if draft is None else draft["model"])


def with_recorded(run_config: RunConfig, config: dict[str, Any]) -> RunConfig:
    """`run_config` with the recorded values that decide which flags are ignored."""
    kv = config["kv"]
    temperature = config["sampling"]["temperature"]
    policy = dataclasses.replace(run_config.kv, policy=kv["policy"], budget=kv["budget"])
    return dataclasses.replace(
        run_config,
        kv=policy,
        sampling=dataclasses.replace(run_config.sampling, temperature=temperature),
    )


main = LoneCommand(
    write_flags,
    "Print the flags of the record of a run or of a prediction as TOML, for `--config FILE` of the "
    "command that makes such records. What `auto` chose in a run is written by name.",
    {"record": RecordSection},
)
