"""`magicdec audit`: whether the speculation of another program's server is lossless, its counts are
right, and its acceptance is the same in every state.

    magicdec audit --endpoint http://127.0.0.1:8000/v1 --dataset books.jsonl --prefix_len 512 4096

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.bench.audit.record import (
    CHECKS,
    AuditRecord,
    comparisons_of,
    tables,
    worst,
)
from magicdec.cli.compare import RuleSection
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.cli.parsing.record_files import BaselineFileSection, given_flags
from magicdec.config.masking import masked
from magicdec.config.sections import OutputSection, SamplingSection, WorkloadSection
from magicdec.config.setting import same, setting
from magicdec.distributed.groups import Launch
from magicdec.names import OPENAI_API, SERVER_APIS, load_object
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_files, check_record_file, write_text
from magicdec.records.comparison.compare import exit_code, junit
from magicdec.records.reading import read_records
from magicdec.records.record import append_records
from magicdec.systems.options import ServeOptions
from magicdec.systems.servers.declaration import ServersSettings, check_credentials, parse_url
from magicdec.systems.servers.http_client import read_key

if TYPE_CHECKING:
    from magicdec.bench.audit.asking import AuditedServer
    from magicdec.bench.audit.measuring import Audit, AuditPlan
    from magicdec.records.environment import Environment

TITLE = "Audit of a server"
CHARACTERS = 8  # of a text, for each token that is cut from it
MOST_BOOKS = 1000
EVERYDAY = (
    *("--endpoint", "--plain", "--endpoint_api", "--endpoint_metrics", "--dataset"),
    *("--prefix_len", "--gen_len", "--num_requests", "--concurrency", "--checks"),
    *("--temperature", "--junit", "--baseline", "--out"),
)
EXIT_CODES = (
    "exit codes: 0 no fault, 1 a fault or a regression, 2 wrong usage, 3 something could not be "
    "judged"
)


@dataclass(frozen=True)
class AuditFlags:
    endpoint: str = same(ServersSettings, "endpoint", ..., parse=parse_url)
    plain: str | None = setting(
        None,
        "A server of the same model without drafts, which then judges. It is asked by the same "
        "interface.",
        metavar="URL",
        parse=parse_url,
    )
    endpoint_model: str | None = same(ServersSettings, "endpoint_model")
    endpoint_api: str = same(ServersSettings, "endpoint_api", OPENAI_API, can_repeat=False)
    endpoint_metrics: str | None = same(ServersSettings, "endpoint_metrics", parse=parse_url)
    endpoint_timeout_s: float = same(ServersSettings, "endpoint_timeout_s")
    endpoint_total_s: float = same(ServersSettings, "endpoint_total_s")
    endpoint_key_env: str | None = same(ServersSettings, "endpoint_key_env")
    dataset: str = same(WorkloadSection, "dataset")
    prefix_len: tuple[int, ...] = same(WorkloadSection, "prefix_len", (512, 2048), is_set=True)
    gen_len: int = same(WorkloadSection, "gen_len", 64)
    num_requests: int = same(ServeOptions, "num_requests", 8)
    concurrency: tuple[int, ...] = same(ServeOptions, "concurrency", (1, 8), is_set=True)
    checks: tuple[str, ...] = setting(CHECKS, "What is checked.", choices=CHECKS)
    temperature: tuple[float, ...] = same(
        SamplingSection, "temperature", (1.0, 0.6), least=None, above=0, is_set=True
    )
    top_k: int = same(SamplingSection, "top_k")
    top_p: float = same(SamplingSection, "top_p")
    num_places: int = setting(2, "Places at which tokens are sampled.", least=1)
    total_variation: float = setting(
        0.1,
        "How far from the right distribution samples are found (half the summed difference of "
        "probabilities), in 9 of 10 audits; half of it takes four times the requests.",
        above=0,
        most=1,
    )
    judged: int = setting(
        64,
        "Tokens of an answer that are judged where each takes a request, because the server scores "
        "no whole text.",
        least=2,
    )
    junit: Path | None = same(RuleSection, "junit")
    baseline: Path | None = same(BaselineFileSection, "baseline", is_default=True)
    out: Path = same(OutputSection, "results", Path(OutputSection.results))


def run(values: ParsedValues) -> int:
    """Audits, and prints and appends the record. Returns the exit code."""
    args = values[AuditFlags]
    check(args)
    old = None if args.baseline is None else last_audit(args.baseline)
    from magicdec.bench.audit.measuring import Audit
    from magicdec.hardware.environment import describe_environment

    started = datetime.datetime.now(datetime.UTC)
    started_s = time.monotonic()
    server = connect(args, args.endpoint, "--endpoint")
    plain = None if args.plain is None else connect(args, args.plain, "--plain")
    audit = Audit(server, plain, plan_of(args, server), say)
    try:
        audit.run()
        is_whole = True
    except KeyboardInterrupt:
        if not audit.checks:
            raise
        is_whole = False
    environment = describe_environment(Launch(), "cpu", started)
    record = record_of(audit, given_flags(values), args, environment, time.monotonic() - started_s)
    append_records("--out", args.out, [record])
    print_tables(tables([record]))
    comparisons = comparisons_of(record, old)
    for comparison in comparisons[len(record.checks) :]:
        print(comparison)
    if args.junit is not None:
        write_text("--junit", args.junit, junit(comparisons, TITLE, "magicdec.bench.audit"))
    if not is_whole:
        raise KeyboardInterrupt(f"{len(record.checks)} of {len(args.checks)} checks are kept")
    return exit_code(comparisons)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check(args: AuditFlags) -> None:
    """Raises ValueError, one line naming the flag, for what cannot be audited."""
    check_files({"--junit": args.junit})
    check_record_file("--out", args.out)
    check_credentials(args.endpoint, args.endpoint_key_env)
    if args.plain == args.endpoint:
        raise ValueError(
            f"--plain {masked(args.plain)} is --endpoint; name a server without drafts"
        )
    if args.top_k and args.top_p < 1:
        raise ValueError(f"--top_k {args.top_k} with --top_p {args.top_p:g}: give one of them")
    others = [value for value in args.temperature if value != 1]
    if args.top_p < 1 and others:
        raise ValueError(
            f"--top_p {args.top_p:g} with --temperature {others[0]:g}: the probabilities at "
            "another temperature than 1 do not follow from the likeliest tokens; give "
            "--temperature 1"
        )
    from magicdec.bench.audit.asking import NUM_LOGPROBS

    if args.top_k >= NUM_LOGPROBS:
        raise ValueError(
            f"--top_k {args.top_k}: of {NUM_LOGPROBS} tokens the server is asked for the "
            f"probability; give less than {NUM_LOGPROBS}"
        )


def last_audit(path: Path) -> AuditRecord:
    records = list(read_records(path, AuditRecord))
    if not records:
        raise ValueError(f"--baseline {path}: it has no record of an audit")
    return records[-1]


def connect(args: AuditFlags, url: str, option: str) -> AuditedServer:
    from magicdec.bench.audit.asking import AuditedServer
    from magicdec.systems.servers.connection import Connection

    key = None if args.endpoint_key_env is None else read_key(args.endpoint_key_env)
    connection = Connection(
        url,
        load_object(SERVER_APIS[args.endpoint_api]),
        args.endpoint_timeout_s,
        args.endpoint_total_s,
        key,
        option,
    )
    metrics = args.endpoint_metrics if option == "--endpoint" else None
    return AuditedServer(connection, args.endpoint_model, metrics)


def plan_of(args: AuditFlags, server: AuditedServer) -> AuditPlan:
    from magicdec.bench.audit.measuring import AuditPlan
    from magicdec.systems.servers.server_format import AskedSampling

    return AuditPlan(
        prompts=make_prompts(args, server),
        gen_len=args.gen_len,
        concurrency=tuple(sorted(args.concurrency)),
        checks=args.checks,
        samplings=tuple(
            AskedSampling(value, args.top_k or None, None if args.top_p == 1 else args.top_p)
            for value in args.temperature
        ),
        num_places=args.num_places,
        total_variation=args.total_variation,
        most_judged=args.judged,
    )


def make_prompts(args: AuditFlags, server: AuditedServer) -> dict[int, list[list[int]]]:
    """By context the prompts, in the server's own token ids: parts of the texts, of which shorter
    contexts have the beginnings. Raises ValueError if the texts are too short."""
    from magicdec.workload.books import read_books

    longest = max(args.prefix_len)
    parts = list[Sequence[int]]()
    for text in read_books(args.dataset, MOST_BOOKS):
        ids = server.tokenize(text[: CHARACTERS * longest * args.num_requests])
        parts += [ids[i : i + longest] for i in range(0, len(ids) - longest + 1, longest)]
        if len(parts) >= args.num_requests:
            break
    if len(parts) < args.num_requests:
        raise ValueError(
            f"--dataset {args.dataset} has {len(parts)} parts of --prefix_len {longest} tokens, "
            f"not --num_requests {args.num_requests}; give longer texts, or less of one of them"
        )
    few = parts[: args.num_requests]
    return {context: [list(part[:context]) for part in few] for context in sorted(args.prefix_len)}


def record_of(
    audit: Audit,
    flags: dict[str, Any],
    args: AuditFlags,
    environment: Environment,
    seconds: float,
) -> AuditRecord:
    """The record of the checks that have ended."""
    config = {
        key: masked(value) if isinstance(value, str) else value for key, value in flags.items()
    }
    asked = [server.num_requests for server in (audit.server, audit.plain) if server is not None]
    return AuditRecord(
        status=worst([check.status for check in audit.checks]),
        config=config,
        environment=environment,
        program=audit.program or next((a.program for a in audit.answers if a.program), None),
        server=masked(args.endpoint),
        model=audit.server.model or "",
        checks=audit.checks,
        noise=[] if audit.noise is None else audit.noise.pairs,
        tolerance=None if audit.noise is None else audit.noise.tolerance,
        greedy=audit.greedy,
        sampled=audit.sampled,
        states=audit.states,
        num_requests=sum(asked),
        seconds=seconds,
    )


main = LoneCommand(
    run,
    "Audit another program's server: judge its greedy tokens by its own forwards without drafts, "
    "test tokens that it samples, and compare its counts and its acceptance in several states.",
    {"file": ConfigFile(), "flags": AuditFlags},
    epilog=EXIT_CODES,
    everyday=EVERYDAY,
)
