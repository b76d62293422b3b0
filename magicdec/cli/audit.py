"""`magicdec audit`: whether the speculation of another program's server is lossless, its counts are
right, its acceptance is the same in every state, and where its drafts pay.

    magicdec audit --endpoint http://127.0.0.1:8000/v1 --dataset books.jsonl --prefix_len 512 4096
    magicdec audit --arm "plain=vllm serve M --port {port}" "drafts=vllm serve M --port {port} ..."

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.bench.audit.pays import compared, schedule_of
from magicdec.bench.audit.record import (
    CHECKS,
    AuditCheck,
    AuditRecord,
    comparisons_of,
    tables,
    worst,
)
from magicdec.bench.audit.starting import Arm, parse_arms
from magicdec.cli.compare import RuleSection
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.cli.parsing.record_files import BaselineFileSection, given_flags
from magicdec.config.masking import masked
from magicdec.config.sections import OutputSection, PictureSection, SamplingSection, WorkloadSection
from magicdec.config.setting import same, setting
from magicdec.distributed.groups import Launch
from magicdec.names import OPENAI_API, PAYS_CHECK, PREEMPTION_CHECK, SERVER_APIS, load_object
from magicdec.output.figures import check_picture
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_files, check_record_file, to_json, write_text
from magicdec.records.comparison.compare import exit_code, junit
from magicdec.records.reading import read_records
from magicdec.records.record import Status, append_records
from magicdec.systems.options import ServeOptions
from magicdec.systems.servers.declaration import (
    ENDPOINT,
    ServersSettings,
    check_credentials,
    parse_url,
)
from magicdec.systems.servers.http_client import read_key

if TYPE_CHECKING:
    from magicdec.bench.audit.arms import Arms
    from magicdec.bench.audit.asking import AuditedServer
    from magicdec.bench.audit.measuring import Audit, AuditPlan
    from magicdec.records.environment import Environment
    from magicdec.systems.servers.connection import Connection

TITLE = "Audit of a server"
CHARACTERS = 8  # of a text, for each token that is cut from it
MOST_BOOKS = 1000
EVERYDAY = (
    *("--endpoint", "--plain", "--endpoint_api", "--endpoint_metrics", "--dataset"),
    *("--prefix_len", "--gen_len", "--num_requests", "--concurrency", "--checks"),
    *("--temperature", "--arm", "--plot", "--junit", "--baseline", "--out"),
)
EXIT_CODES = (
    "exit codes: 0 no fault, 1 a fault or a regression, 2 wrong usage, 3 something could not be "
    "judged"
)


@dataclass(frozen=True)
class AuditFlags:
    endpoint: str | None = same(ServersSettings, ENDPOINT, parse=parse_url)
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
    checks: tuple[str, ...] | None = setting(
        None,
        "What is checked. Default: all that can be, which is pays with --arm, preemption with "
        "--preemption_concurrency, and the others with --endpoint.",
        choices=CHECKS,
    )
    temperature: tuple[float, ...] = same(
        SamplingSection, "temperature", (1.0, 0.6), least=None, above=0, is_set=True
    )
    top_k: int = same(SamplingSection, "top_k")
    top_p: float = same(SamplingSection, "top_p")
    preemption_concurrency: int | None = setting(
        None,
        "So many requests at once that the KV cache of the server has no room for all, for the "
        "check preemption: those that lose their KV to others must go on as if alone. "
        "--endpoint_metrics says how many do.",
        least=2,
    )
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
    arm: tuple[str, ...] | None = setting(
        None,
        "Servers of one model that are measured one after the other, to see where drafts pay: "
        "plain (no drafts), which is measured again at the end, and drafts, and if wanted idle "
        "(drafts are loaded, and none are used) and rejected (all are). What is no URL is a "
        "command, in which {port} is the port of the loopback on which it is to serve; it is "
        "started, and ended when it is measured.",
        metavar="NAME=URL_OR_COMMAND",
        parse=parse_arms,
    )
    rounds: int = setting(
        3,
        "Rounds of each cell of --arm, after one that warms up. One arm is faster if every round "
        "of it is; with 3, arms that are alike come out apart in 1 of 42 cells.",
        least=2,
    )
    price_per_hour: float | None = setting(
        None,
        "Dollars that the machine of --arm costs in an hour, for the price of output tokens.",
        above=0,
    )
    export_schedule: Path | None = setting(
        None,
        "Write how long drafts are to be by batch size, at the longest --prefix_len, as JSON for "
        "vLLM (the key num_speculative_tokens_per_batch_size) and SGLang "
        "(--speculative-adaptive-config).",
    )
    plot: Path | None = same(PictureSection, "plot")
    junit: Path | None = same(RuleSection, "junit")
    baseline: Path | None = same(BaselineFileSection, "baseline", is_default=True)
    out: Path = same(OutputSection, "results", Path(OutputSection.results))


def run(values: ParsedValues) -> int:
    """Audits, and prints and appends the record. Returns the exit code."""
    args = values[AuditFlags]
    check(args)
    if args.arm is None:
        names = ("rounds", "price_per_hour", "export_schedule", "plot")
        values.refuse_given([f"flags.{name}" for name in names], "there is no --arm")
    old = None if args.baseline is None else last_audit(args.baseline)
    from magicdec.hardware.environment import describe_environment

    started = datetime.datetime.now(datetime.UTC)
    started_s = time.monotonic()
    checks = list[AuditCheck]()
    audit = audit_of_endpoint(args)
    arms = arms_of(args)
    try:
        if audit is not None:
            audit.checks = checks
            audit.run()
        if arms is not None:
            say(PAYS_CHECK)
            checks.append(arms.run())
        is_whole = True
    except KeyboardInterrupt:
        if not checks:
            raise
        is_whole = False
    environment = describe_environment(Launch(), "cpu", started)
    seconds = time.monotonic() - started_s
    record = record_of(checks, audit, arms, given_flags(values), args, environment, seconds)
    append_records("--out", args.out, [record])
    print_tables(tables([record]))
    comparisons = comparisons_of(record, old)
    for comparison in comparisons[len(record.checks) :]:
        print(comparison)
    if args.junit is not None:
        write_text("--junit", args.junit, junit(comparisons, TITLE, "magicdec.bench.audit"))
    if args.export_schedule is not None:
        export(args.export_schedule, record)
    if args.plot is not None:
        plot(args.plot, record)
    if not is_whole:
        raise KeyboardInterrupt(f"{len(record.checks)} of {len(checks_of(args))} checks are kept")
    return exit_code(comparisons)


def export(path: Path, record: AuditRecord) -> None:
    """Write the schedule of draft lengths, or say why there is none."""
    cells = compared(record.arms)
    has_ended = any(
        check.name == PAYS_CHECK and check.status != Status.FAILED for check in record.checks
    )
    try:
        if not has_ended:
            raise ValueError("not all arms were measured")
        schedule = schedule_of(cells)
    except ValueError as error:
        say(f"--export_schedule {path} was not written: {error}")
        return
    write_text("--export_schedule", path, f"{to_json(schedule)}\n")
    say(f"--export_schedule {path}: drafts at context {schedule['context']}")


def plot(path: Path, record: AuditRecord) -> None:
    """Draw the cells that were measured with drafts and without, if there are any."""
    cells = compared(record.arms)
    if not cells:
        say(f"--plot {path} was not drawn: nothing was measured with drafts and without")
        return
    from magicdec.bench.audit.figure import draw

    draw("--plot", path, cells)
    say(f"drawn to {path}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def checks_of(args: AuditFlags) -> tuple[str, ...]:
    """What is checked. Raises ValueError for what cannot be, and for servers that no check asks."""
    needs = dict.fromkeys(CHECKS, (args.endpoint, "--endpoint URL")) | {
        PREEMPTION_CHECK: (
            args.endpoint and args.preemption_concurrency,
            "--endpoint URL and --preemption_concurrency N",
        ),
        PAYS_CHECK: (args.arm, "--arm plain=URL drafts=URL"),
    }
    can_be = [name for name, (value, _) in needs.items() if value is not None]
    checks = args.checks or tuple(can_be)
    if not checks:
        raise ValueError(
            "there is no server; give --endpoint URL, or --arm plain=URL drafts=URL to see where "
            "drafts pay"
        )
    for name in checks:
        if name not in can_be:
            raise ValueError(f"--checks {name} needs {needs[name][1]}")
    if args.arm is not None and PAYS_CHECK not in checks:
        raise ValueError(
            f"--arm is for the check {PAYS_CHECK}; add it to --checks, or leave --arm out"
        )
    if args.preemption_concurrency is not None:
        flag = f"--preemption_concurrency {args.preemption_concurrency}"
        if PREEMPTION_CHECK not in checks:
            raise ValueError(
                f"{flag} is for the check {PREEMPTION_CHECK}; add it to --checks, or leave it out"
            )
        if args.endpoint_metrics is None:
            raise ValueError(
                f"{flag} needs --endpoint_metrics URL, whose counters say whether requests were "
                "preempted"
            )
    others = {
        "--endpoint": args.endpoint,
        "--plain": args.plain,
        "--endpoint_metrics": args.endpoint_metrics,
    }
    for flag, value in others.items():
        if checks == (PAYS_CHECK,) and value is not None:
            raise ValueError(f"{flag} is for other checks than {PAYS_CHECK}; leave it out")
    return checks


def check(args: AuditFlags) -> None:
    """Raises ValueError, one line naming the flag, for what cannot be audited."""
    if args.plot is not None:
        check_picture("--plot", args.plot)
    files = {"--plot": args.plot, "--junit": args.junit, "--export_schedule": args.export_schedule}
    check_files(files)
    check_record_file("--out", args.out)
    if PAYS_CHECK in checks_of(args) and args.gen_len == 1:
        raise ValueError(
            f"--gen_len 1 with --checks {PAYS_CHECK}: decoding is timed from the first token on; "
            "give 2 or more"
        )
    for arm in map(Arm.of, args.arm or ()):
        arm.check()
        if arm.url is not None:
            check_credentials(arm.url, args.endpoint_key_env, arm.option)
    if args.endpoint is None:
        return
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


def connect(args: AuditFlags, url: str, option: str) -> Connection:
    from magicdec.systems.servers.connection import Connection

    key = None if args.endpoint_key_env is None else read_key(args.endpoint_key_env)
    return Connection(
        url,
        load_object(SERVER_APIS[args.endpoint_api]),
        args.endpoint_timeout_s,
        args.endpoint_total_s,
        key,
        option,
    )


def audit_of_endpoint(args: AuditFlags) -> Audit | None:
    """The checks of the server at `--endpoint`; None if it is not asked."""
    if args.endpoint is None:
        return None
    from magicdec.bench.audit.asking import AuditedServer
    from magicdec.bench.audit.measuring import Audit

    connection = connect(args, args.endpoint, "--endpoint")
    server = AuditedServer(connection, args.endpoint_model, args.endpoint_metrics)
    plain = None
    if args.plain is not None:
        connection = connect(args, args.plain, "--plain")
        plain = AuditedServer(connection, args.endpoint_model, None)
    return Audit(server, plain, plan_of(args, server), say)


def arms_of(args: AuditFlags) -> Arms | None:
    if args.arm is None:
        return None
    from magicdec.bench.audit.arms import Arms, ArmsPlan

    plan = ArmsPlan(
        tuple(map(Arm.of, args.arm)),
        tuple(sorted(args.concurrency)),
        args.gen_len,
        args.num_requests,
        args.rounds,
        args.price_per_hour,
        args.endpoint_total_s,
        args.endpoint_model,
    )
    return Arms(
        plan,
        partial(connect, args),
        lambda server: make_prompts(args, server, plan.num_prompts),
        say,
    )


def plan_of(args: AuditFlags, server: AuditedServer) -> AuditPlan:
    from magicdec.bench.audit.measuring import AuditPlan
    from magicdec.systems.servers.server_format import AskedSampling

    return AuditPlan(
        prompts=make_prompts(args, server, args.num_requests),
        gen_len=args.gen_len,
        concurrency=tuple(sorted(args.concurrency)),
        checks=checks_of(args),
        samplings=tuple(
            AskedSampling(value, args.top_k or None, None if args.top_p == 1 else args.top_p)
            for value in args.temperature
        ),
        num_places=args.num_places,
        total_variation=args.total_variation,
        most_judged=args.judged,
        preemption_concurrency=args.preemption_concurrency,
    )


def make_prompts(args: AuditFlags, server: AuditedServer, count: int) -> dict[int, list[list[int]]]:
    """By context the prompts, in the server's own token ids: parts of the texts, of which shorter
    contexts have the beginnings. Raises ValueError if the texts are too short."""
    from magicdec.workload.books import read_books

    longest = max(args.prefix_len)
    parts = list[Sequence[int]]()
    for text in read_books(args.dataset, MOST_BOOKS):
        ids = server.tokenize(text[: CHARACTERS * longest * count])
        parts += [ids[i : i + longest] for i in range(0, len(ids) - longest + 1, longest)]
        if len(parts) >= count:
            break
    if len(parts) < count:
        more = "--num_requests" if count == args.num_requests else "--concurrency"
        raise ValueError(
            f"--dataset {args.dataset} has {len(parts)} parts of --prefix_len {longest} tokens, "
            f"not {more} {count}; give longer texts, or less of one of them"
        )
    few = parts[:count]
    return {context: [list(part[:context]) for part in few] for context in sorted(args.prefix_len)}


def record_of(
    checks: list[AuditCheck],
    audit: Audit | None,
    arms: Arms | None,
    flags: dict[str, Any],
    args: AuditFlags,
    environment: Environment,
    seconds: float,
) -> AuditRecord:
    """The record of the checks that have ended."""
    config = {key: masked_value(value) for key, value in flags.items()}
    servers = [] if audit is None else [audit.server, audit.plain]
    asked = sum(server.num_requests for server in servers if server is not None)
    models = list[str | None]()
    programs = list[str | None]()
    if audit is not None:
        models.append(audit.server.model)
        programs.append(audit.reporting_program)
    if arms is not None:
        models.append(arms.model)
        programs.append(arms.program)
    noise = None if audit is None else audit.noise
    return AuditRecord(
        status=worst([check.status for check in checks]),
        config=config,
        environment=environment,
        program=next(filter(None, programs), None),
        server=None if args.endpoint is None else masked(args.endpoint),
        model=next(filter(None, models), None),
        checks=checks,
        noise=[] if noise is None else noise.pairs,
        tolerance=None if noise is None else noise.tolerance,
        greedy=[] if audit is None else audit.greedy,
        wrong=[] if audit is None else audit.wrong,
        sampled=[] if audit is None else audit.sampled,
        states=[] if audit is None else audit.states,
        arms=[] if arms is None else arms.cells,
        meters=None if arms is None else str(arms.meter),
        num_requests=asked + (0 if arms is None else arms.num_requests),
        seconds=seconds,
    )


def masked_value(value: Any) -> Any:
    """The value of a flag without credentials."""
    if isinstance(value, list):
        return [masked_value(part) for part in value]
    return masked(value) if isinstance(value, str) else value


main = LoneCommand(
    run,
    "Audit another program's server: judge its greedy tokens by its own forwards without drafts, "
    "test tokens that it samples, compare its counts and its acceptance in several states, and "
    "measure where its drafts pay.",
    {"file": ConfigFile(), "flags": AuditFlags},
    epilog=EXIT_CODES,
    everyday=EVERYDAY,
)
