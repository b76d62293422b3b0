"""`magicdec config RECORDS`: a record as a file for `magicdec run --config`, so that it can be run
again.

Owns which flags make the run of a record. It takes what was resolved, so that no `auto` is chosen
anew. Must not know how a flag is read.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.flags import Parser, refuse
from magicdec.cli.front.run import MODEL_PREFIX, NONE, config_of_draft
from magicdec.cli.parsing.config_file import to_toml
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.config.run_config import RunConfig
from magicdec.config.threads import describe_threads
from magicdec.distributed.groups import Launch
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.writing import write_text

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
DESCRIPTION = (
    "Print the flags of a recorded run as TOML, for `magicdec run --config FILE`. What `auto` "
    "chose is written by name."
)


def main() -> NoReturn:
    """`magicdec config RECORDS`"""
    try:
        args, _ = build_parser().read(sys.argv[1:])
        records = load_records(args.records)
        if not 1 <= abs(args.record) <= len(records):
            raise ValueError(f"--record {args.record}: {args.records} holds {len(records)} records")
        index = args.record - 1 if args.record > 0 else args.record
        text = to_toml(flags_of(records[index]))
        if args.out is not None:
            write_text("--out", args.out, text)
    except ValueError as error:
        refuse(error, ALONE)
    if args.out is None:
        print(text, end="")
    sys.exit(0)


def build_parser() -> Parser:
    parser = Parser(description=DESCRIPTION)
    parser.add_argument("records", type=Path, help="file of records, as JSON lines")
    parser.add_argument("--record", type=int, default=-1, metavar="N",
        help="which record: 1 is the first one, -1 the last one [-1]")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
        help="write the flags to this file; default: they are printed")  # fmt: skip
    return parser


def flags_of(record: RunRecord) -> dict[str, Any]:
    """The flags of `magicdec run` that make the record's run, without those that it would ignore
    and those that name files to write."""
    config = record.config
    draft = draft_of(config)
    asked = config_of_draft(draft)
    found: dict[str, Any] = {"draft": draft}
    if record.environment.world_size > 1:
        found["nproc"] = record.environment.world_size
    for section in dataclasses.fields(asked):
        recorded = config.get(section.name) or {}
        if section.name != "output":
            values = getattr(asked, section.name)
            found |= _section_flags(with_recorded(asked, config), section.name, values, recorded)
    return found


def draft_of(config: dict[str, Any]) -> str:
    """The `--draft` of a recorded config."""
    drafter: str | None = config["decoding"]["drafter"]
    if drafter is None:
        return NONE
    return f"{MODEL_PREFIX}{config['draft']['model']}" if drafter == "model" else drafter


def with_recorded(asked: RunConfig, config: dict[str, Any]) -> RunConfig:
    """`asked` with the recorded values that decide which flags are ignored."""
    kv, temperature = config["kv"], config["sampling"]["temperature"]
    return dataclasses.replace(
        asked,
        kv=dataclasses.replace(asked.kv, policy=kv["policy"], budget=kv["budget"]),
        decoding=dataclasses.replace(asked.decoding, tree=config["decoding"].get("tree")),
        sampling=dataclasses.replace(asked.sampling, temperature=temperature),
    )


def _section_flags(
    run: RunConfig, section: str, values: Any, recorded: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(values):
        value = recorded.get(field.name)
        is_idle = why_ignored(run, f"{section}.{field.name}") is not None
        named_otherwise = (section, field.name) in (("draft", "model"), ("decoding", "drafter"))
        if not field.metadata or value is None or is_idle or named_otherwise:
            continue
        choices = field.metadata["choices"]
        if choices and value not in choices:  # a resolved dtype, where the flag is auto or int8
            continue
        if field.name == "max_len":
            continue
        flag = field.metadata["flags"][0].removeprefix("--")
        if isinstance(value, bool):
            value = value != field.default
            if not value:
                continue
        if (section, field.name) == ("parallel", "threads"):
            value = value if isinstance(value, int) else describe_threads(value)
        found[flag] = list(value) if isinstance(value, list | tuple) else value
    return found
