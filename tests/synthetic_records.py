"""Records of passes that never decoded: what their steps did is drawn, or written by hand, and
their metrics follow from it.

Those of `magicdec run` begin as batches of rows (`Batch`), and come as the two passes of a command
(`command_of`, `drawn`). Those of `magicdec serve` begin as requests (`served`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from conftest import ROOT

from magicdec.bench.recording import MeasuredParts, describe_requests, record_pass
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.scheduler import StepCounts
from magicdec.records.acceptance import ReportedCounts, Verification, Verifications, estimates_of
from magicdec.records.computing import Beside
from magicdec.records.correctness import Correctness
from magicdec.records.drafted import DraftedPass
from magicdec.records.environment import Environment
from magicdec.records.metrics import REPORTABLE
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.reading import parse_line
from magicdec.records.record import Status
from magicdec.records.workload import WorkloadRecord
from magicdec.runner.request import Request, SamplingParams, Turn
from magicdec.systems.servers.details import ANSWERS, BOTH, COUNTERS, ServersDetails

Rng = np.random.Generator
Array = np.ndarray[Any, Any]
Step = tuple[int, int, int]
"""Of a row: how many tokens were proposed, accepted and emitted."""

BASELINES = ROOT / "magicdec" / "bench" / "gate" / "baselines" / "acceptance.jsonl"
PLAIN_PASS = "static"
DRAFTING_PASS = "static+draft"
GAMMA = 4
NUM_TOKENS = 63  # after the first one of each prompt
PROMPT_LEN = 10
BANDWIDTH = 1e9
ENVIRONMENT = Environment(
    time_utc="2026-11-22T05:00:00+00:00",
    argv=["magicdec"],
    magicdec="0",
    python="3",
    torch="2",
    system="Linux",
    cpu="",
    cpu_capability="AVX2",
    world_size=1,
    threads=2,
    read_bandwidth_bytes_per_s=BANDWIDTH,
)
WORKLOAD = WorkloadRecord(
    model="demo",
    random_weights=False,
    model_sha256="m",
    tokenizer="demo",
    dataset="demo",
    num_prompts=8,
    prefix_len=8,
    seed=0,
    sha256="w",
)
IDENTICAL = Correctness(PLAIN_PASS, True, 99, None, 0, 0, 1e-4)


# The passes of a run: batches of rows that begin together.


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of a pass: what each row did in each step that it took part in. `ends_ms` are the
    times from the first step until each row ended."""

    rows: Sequence[Sequence[Step]]
    step_ms: Sequence[float]
    begin_ms: float = 0.0
    calibration_ms: float | None = None
    draft_prefill_ms: float | None = None
    ends_ms: Sequence[float] | None = None  # otherwise when their last steps end
    prefill_ms: float | None = None  # otherwise 1 ms for each row
    ttft_ms: Sequence[float] | None = None
    prompt_len: int = PROMPT_LEN
    draft_ms: Sequence[float] = ()
    verify_ms: Sequence[float] = ()
    decode_ms: Sequence[float] = ()
    step_forwards: Sequence[int] | None = None
    bytes_read: Sequence[int] = (1,)
    draft_kv_tokens: int = 0
    draft_rows: int = 0
    peak_memory_bytes: Sequence[int] = (1,)
    threads: Sequence[int] = (2,)

    @property
    def tokens(self) -> list[int]:
        """Those of each row after its first one."""
        return [sum(emitted for _, _, emitted in row) for row in self.rows]

    @property
    def is_drafting(self) -> bool:
        return any(drafted for row in self.rows for drafted, _, _ in row)


def even_batch(rows: Sequence[Sequence[Step]], **values: Any) -> Batch:
    """A batch whose steps take 1 ms each."""
    return Batch(rows=rows, step_ms=[1.0] * max(map(len, rows)), **values)


def parts_of(batches: Sequence[Batch], is_drafting: bool | None = None) -> MeasuredParts:
    """The requests and the groups of a pass of these batches. `is_drafting`: whether it has counts
    of drafts; otherwise if anything was drafted."""
    has_drafts = any(batch.is_drafting for batch in batches)
    if is_drafting is not None:
        has_drafts = is_drafting
    requests: list[RequestRecord] = []
    for batch in batches:
        requests += requests_of(batch, len(requests), has_drafts)
    return MeasuredParts(requests, [group_of(batch, has_drafts) for batch in batches])


def requests_of(batch: Batch, first: int, has_drafts: bool) -> list[RequestRecord]:
    """Of a batch before which the pass had `first` requests."""
    passed_ms = [0.0, *accumulate(batch.step_ms)]
    prefill_ms = prefill_ms_of(batch)
    begin_ms = prefill_ms + batch.begin_ms + (batch.calibration_ms or 0.0)
    count = len(batch.rows)
    firsts_ms = batch.ttft_ms or [prefill_ms * (i + 1) / count for i in range(count)]
    ends_ms = batch.ends_ms or [passed_ms[len(row)] for row in batch.rows]
    return [
        RequestRecord(
            arrival_ms=0.0,
            joined_ms=[0.0],
            preempted_ms=[],
            prefilled_ms=[first_ms],
            first_token_ms=first_ms,
            finished_ms=begin_ms + end_ms if row else first_ms,
            prompt_len=batch.prompt_len,
            output_len=1 + sum(emitted for _, _, emitted in row),
            output_hash=f"{first + number:016x}",
            **(drafts_of(row, batch.prompt_len) if has_drafts else {}),
        )
        for number, (row, first_ms, end_ms) in enumerate(
            zip(batch.rows, firsts_ms, ends_ms, strict=True)
        )
    ]


def prefill_ms_of(batch: Batch) -> float:
    return float(len(batch.rows)) if batch.prefill_ms is None else batch.prefill_ms


def drafts_of(row: Sequence[Step], prompt_len: int) -> dict[str, Any]:
    """What a request says of its drafts; nothing without one. What is accepted of drafts is known
    up to the end of the row alone."""
    drafting = [step for step in row if step[0]]
    befores = accumulate((emitted for _, _, emitted in row), initial=prompt_len + 1)
    if not drafting:
        return {}
    drafted, accepted, emitted = (list(column) for column in zip(*drafting, strict=True))
    return {
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_spec_steps": len(drafting),
        "acceptance_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
        "per_step_drafted": drafted,
        "per_step_accepted": accepted,
        "per_step_emitted": emitted,
        "per_step_context": [before for step, before in zip(row, befores, strict=False) if step[0]],
    }


def group_of(batch: Batch, has_drafts: bool) -> GroupRecord:
    num_steps = len(batch.step_ms)
    running = [[row[i] for row in batch.rows if i < len(row)] for i in range(num_steps)]
    return GroupRecord(
        num_requests=len(batch.rows),
        prefill_ms=prefill_ms_of(batch),
        begin_ms=batch.begin_ms,
        calibration_ms=batch.calibration_ms,
        draft_prefill_ms=batch.draft_prefill_ms,
        num_steps=num_steps,
        step_ms=list(batch.step_ms),
        step_forwards=None if batch.step_forwards is None else list(batch.step_forwards),
        step_max_gamma=[max(drafted for drafted, _, _ in step) for step in running]
        if has_drafts
        else None,
        step_rows=[len(step) for step in running],
        draft_ms=list(batch.draft_ms),
        verify_ms=list(batch.verify_ms),
        decode_ms=list(batch.decode_ms),
        bytes_read=list(batch.bytes_read),
        draft_kv_tokens=batch.draft_kv_tokens,
        draft_rows=batch.draft_rows,
        peak_memory_bytes=list(batch.peak_memory_bytes),
        threads=list(batch.threads),
    )


def draw_chances(rng: Rng, num: int, mean: float, spread: float) -> Array:
    """[num] for each prompt, the chance that a draft token is accepted if all before it were. Its
    standard deviation over prompts is `spread`."""
    size = mean * (1 - mean) / spread**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, num)


def chances_of(rate: float, num_prompts: int = 8) -> Array:
    """The chance of each prompt that its next draft token is accepted, about `rate`."""
    return draw_chances(np.random.default_rng(7), num_prompts, rate, 0.08)


def draw_pass(
    rng: Rng, chances: Array, gamma: int, num_tokens: int, num_batches: int = 1
) -> list[Batch]:
    """A pass that drafts `gamma` tokens a step, until each prompt has emitted `num_tokens` after
    its first one. Each step takes 1 ms."""
    accepted = np.minimum(rng.geometric(1 - chances, (num_tokens, len(chances))) - 1, gamma)
    batches = []
    for places in np.split(np.arange(len(chances)), num_batches):
        counts = accepted[:, places]
        before = np.cumsum(counts + 1, axis=0) - counts - 1  # tokens before each step [steps, rows]
        emitted = np.minimum(counts + 1, num_tokens - before)
        rows = [
            [(gamma, int(a), int(n)) for a, n in zip(counts_of_step, tokens, strict=True) if n > 0]
            for counts_of_step, tokens in zip(counts.T, emitted.T, strict=True)
        ]
        batches.append(even_batch(rows))
    return batches


def baseline_pass(batches: Sequence[Batch]) -> list[Batch]:
    """What decodes the same tokens without drafts, in steps of 1 ms."""
    return [
        even_batch([[(0, 0, 1)] * count for count in batch.tokens], threads=batch.threads)
        for batch in batches
    ]


def scaled(batches: Sequence[Batch], factors: Array) -> list[Batch]:
    """The pass with the times of the steps of each batch multiplied by a factor."""
    return [
        replace(
            batch,
            step_ms=[ms * float(factor) for ms in batch.step_ms],
            ends_ms=None if batch.ends_ms is None else [ms * float(factor) for ms in batch.ends_ms],
        )
        for batch, factor in zip(batches, factors, strict=True)
    ]


def command_of(
    batches: Sequence[Batch],
    budget: int = 257,
    baseline: Sequence[Batch] | None = None,
    **beside: Any,
) -> list[PassRecord]:
    """The passes `static` and `static+draft` of a run; without `baseline` the former decodes the
    same outputs in steps of 1 ms. `beside` are further fields of `Beside` for both."""
    draft_groups = [replace(b, draft_kv_tokens=budget, draft_rows=1) for b in batches]
    parts = parts_of(draft_groups, is_drafting=True)
    plain = parts_of(baseline_pass(batches) if baseline is None else baseline, is_drafting=False)
    decoding = DecodingSection("speculative", "self")
    config = resolve(RunConfig(kv=KVSection(budget=budget), decoding=decoding), Machine(2))
    values: dict[str, Any] = {"bandwidth": BANDWIDTH, **beside}
    shared: dict[str, Any] = {
        "status": Status.VERIFIED,
        "environment": ENVIRONMENT,
        "workload": replace(WORKLOAD, num_prompts=len(parts.requests)),
        "correctness": IDENTICAL,
        "reference": PLAIN_PASS,
        "num_differing": 0,
    }
    return [
        record_pass(
            PLAIN_PASS,
            plain,
            Beside(is_drafting=False, **values),
            config=config.without_drafts().to_dict(),
            **shared,
        ),
        record_pass(
            DRAFTING_PASS,
            parts,
            Beside(is_drafting=True, reference=plain, **values),
            config=config.to_dict(),
            **shared,
        ),
    ]


def record_of(batches: Sequence[Batch], budget: int = 257) -> PassRecord:
    """The drafting pass of a run that has these batches."""
    return command_of(batches, budget)[-1]


def drawn_command(
    rate: float = 0.8, budget: int = 257, seed: int = 0, num_prompts: int = 8
) -> list[PassRecord]:
    """The passes of a run with self-speculation. Equal arguments make equal counts."""
    rng = np.random.default_rng(seed)
    return command_of(draw_pass(rng, chances_of(rate, num_prompts), GAMMA, NUM_TOKENS), budget)


def drawn(rate: float = 0.8, budget: int = 257, seed: int = 0, num_prompts: int = 8) -> PassRecord:
    """The drafting pass of `drawn_command`."""
    return drawn_command(rate, budget, seed, num_prompts)[-1]


def parse_record(raw: Any) -> PassRecord:
    """The record of a pass from its JSON value."""
    return parse_line(json.dumps(raw), PassRecord)


def with_fields(record: PassRecord, **fields: Any) -> PassRecord:
    """The record with values at places such as `config__workload__gen_len` or
    `requests__0__output_len`."""
    raw = json.loads(record.to_json())
    for name, value in fields.items():
        place = raw
        *path, last = name.split("__")
        for key in path:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value
    return parse_record(raw)


KERNELS = {"forward-HEAD_SIZE=64": "aa", "packed": "bb"}


def logged(record: PassRecord | None = None) -> PassRecord:
    """A record of a pass of the gate on native kernels, which has a log."""
    record = with_fields(
        record or drawn(),
        config__model__native_steps="on",
        environment__compiler="g++ 12",
        environment__instructions=["AVX2", "FMA"],
        environment__kernels=KERNELS,
        seal="",
    )
    requests = []
    for number, request in enumerate(record.requests):
        count = len(request.per_step_drafted or ())
        if count:
            hashes = [f"{step:04x}{number:04x}" for step in range(count)]
            request = replace(request, draft_hashes=hashes, num_draft_kv_read=[260] * count)
        requests.append(request)
    return with_fields(replace(record, requests=requests))


def rate_of(record: PassRecord) -> float:
    return float(estimates_of(DraftedPass.of(record).counts).rate[0])


def with_losses(record: PassRecord, share: float, seed: int = 0) -> PassRecord:
    """The record of a worse draft for the same outputs: it misses each token that it had right with
    a chance such that about `share` of the acceptance rate is lost."""
    low = 0.0
    high = 0.5
    lossy = record
    for _ in range(12):  # the chance is found by halving
        chance = (low + high) / 2
        lossy = _missing(record, chance, np.random.default_rng(seed))
        lost = 1 - rate_of(lossy) / rate_of(record)
        low, high = (chance, high) if lost < share else (low, chance)
    return lossy


def _missing(record: PassRecord, chance: float, rng: Rng) -> PassRecord:
    """The pass of a draft that misses each token that it had right with that chance."""
    batches = []
    for group, requests in record.groups_of_requests:
        gammas = group.step_max_gamma or [0]
        is_even = 0 not in gammas
        rows = [
            _walk(_rights(request), max(gammas), request.output_len - 1, rng, chance)
            if is_even
            else _decoded(request, rng, chance)
            for request in requests
        ]
        batches.append(
            even_batch(
                rows,
                prompt_len=requests[0].prompt_len,
                bytes_read=group.bytes_read or (),
                draft_kv_tokens=group.draft_kv_tokens or 0,
                draft_rows=group.draft_rows or 0,
                peak_memory_bytes=group.peak_memory_bytes or (),
                threads=group.threads,
            )
        )
    parts = parts_of(batches, is_drafting=True)
    hashes = record.output_hashes
    requests = [
        replace(request, output_hash=hashed)
        for request, hashed in zip(parts.requests, hashes, strict=True)
    ]
    beside = Beside(
        is_drafting=True,
        bandwidth=BANDWIDTH,
        reference=parts_of(baseline_pass(batches), is_drafting=False),
    )
    assert record.workload is not None and record.correctness is not None
    lossy = record_pass(
        record.name,
        MeasuredParts(requests, parts.groups),
        beside,
        status=Status(record.status),
        config=record.config,
        environment=record.environment,
        workload=record.workload,
        correctness=record.correctness,
        reference=record.reference,
        num_differing=record.num_differing,
    )
    return replace(lossy, margin=record.margin, seal=record.seal)


def _rights(request: RequestRecord) -> list[bool]:
    """Whether the draft has each of its tokens right. A token that follows accepted drafts and was
    not drafted itself counts as right."""
    rights = list[bool]()
    for verification in request.verifications():
        rights += [True] * verification.accepted + [verification.accepted == verification.drafted]
    return rights


def _decoded(request: RequestRecord, rng: Rng, chance: float) -> list[Step]:
    """The same verifications of a request with fewer accepted tokens. Those that are lacking in the
    end are decoded without drafts."""
    found = list[Step]()
    left = request.output_len - 1
    pairs = [
        (verification.drafted, verification.accepted) for verification in request.verifications()
    ]
    for proposed, accepted in [*pairs, *[(0, 0)] * left]:
        if left == 0:
            break
        right = min(accepted, proposed)
        count = next((i for i in range(right) if rng.random() < chance), accepted)
        emitted = min(count + 1, left)
        found.append((proposed, count, emitted))
        left -= emitted
    return found


def _walk(right: list[bool], gamma: int, num_tokens: int, rng: Rng, chance: float) -> list[Step]:
    """Each verification of a request of `num_tokens` tokens after the first."""
    kept = [is_right and rng.random() >= chance for is_right in right] + [True] * gamma
    steps = list[Step]()
    place = 0
    while place < num_tokens:
        count = next((i for i in range(gamma) if not kept[place + i]), gamma)
        emitted = min(count + 1, num_tokens - place)
        steps.append((gamma, count, emitted))
        place += emitted
    return steps


# The passes of serving: requests that come and go.

NUM_REQUESTS = 15
BEGIN_S = 1000.0
SERVED_GAMMA = 3
# Those of one group by context and of the next begin between them.
PROMPT_LENS = (4097, 5, 2048, 2049, 700, 4096, 33, 5, 900)
GOODPUT = {"ttft": 300.0, "tpot": 40.0, "e2el": 900.0}
PLAIN = "plain"
STEPS = "steps"
AHEAD = "ahead"
TURNS = "turns"
SERVER_KINDS = ("vllm", "sums", "histogram", "even", COUNTERS, BOTH)
KINDS = (PLAIN, STEPS, AHEAD, TURNS, *SERVER_KINDS)
LOAD = {
    "dataset": "demo",
    "prompt_format": "plain",
    "seed": 0,
    "num_requests": NUM_REQUESTS,
    "prefix_len": "4097",
    "gen_len": "1..12",
    "batch_size": 3,
    "arrival": "constant",
    "concurrency": None,
    "turns": 1,
    "goodput": GOODPUT,
}


def served(kind: str = STEPS, seed: int = 0, reference: PassRecord | None = None) -> PassRecord:
    """A pass of `inflight`, with drafts but for the kind `PLAIN`; of `endpoint` for those of
    servers. `reference` is the pass that it is compared with, if any."""
    rng = random.Random(seed)
    requests = [drawn_request(rng, number) for number in range(NUM_REQUESTS)]
    if kind == TURNS:
        for number, request in enumerate(requests):
            request.turn = Turn(number // 3, number % 3 + 1, (), tuple)  # type: ignore[arg-type]
    counts = drawn_moves(rng, requests, kind)
    is_external = kind in SERVER_KINDS
    is_drafting = kind != PLAIN
    if is_external:
        counts.num_steps = counts.num_in_flight = 0
    judged = drawn_drafts(rng, requests, kind)
    categories = ["maths", "code", None] * (NUM_REQUESTS // 3)
    described = describe_requests(requests, counts.moves, requests[0].arrived_s, judged)
    parts = MeasuredParts(described, [drawn_group(rng, counts, is_drafting, is_external)])
    mode = "endpoint" if is_external else "inflight"
    name = f"{mode}+draft" if is_drafting and not is_external else mode
    record = record_pass(
        name,
        parts,
        Beside(
            is_drafting=is_drafting,
            goodput=GOODPUT,
            categories=categories,
            gaps_ms=[gap for request in requests for gap in request.gaps_ms()],
            reported_total=judged.reported_total,
            reference=reference,
        ),
        status=Status.UNVERIFIED if reference is None else Status.VERIFIED,
        config=serving_config(is_drafting, mode=mode, modes=[name]),
        environment=ENVIRONMENT,
        workload=replace(WORKLOAD, num_prompts=NUM_REQUESTS, categories=categories),
        correctness=IDENTICAL
        if reference is not None
        else Correctness(None, None, 99, None, None, None, None),
        reference=None if reference is None else reference.name,
        num_differing=None if reference is None else 0,
        details=report_of(kind) if is_external else None,
    )
    if is_external:
        missing = [name for name in REPORTABLE if getattr(record.metrics, name, None) is None]
        report = record.details.completed(missing, judged.has_drafts)
        record = replace(record, details=report)
    return record


def serving_config(is_drafting: bool, **load: Any) -> dict[str, Any]:
    """The config of a served pass, with the flags of its command."""
    decoding = DecodingSection("speculative", "self")
    config = resolve(RunConfig(kv=KVSection(budget=257), decoding=decoding), Machine(2))
    values = (config if is_drafting else config.without_drafts()).to_dict()
    parts = ["model", "parallel", "attention", "decoding", "sampling"]
    parts += ["draft", "kv"] if is_drafting else []
    return {name: values[name] for name in parts} | {"workload": LOAD | load}


def drawn_request(rng: random.Random, number: int) -> Request:
    """The first has one token, and the second all in one step."""
    num_tokens = 1 if number == 0 else rng.randint(4, 12)
    prompt_len = PROMPT_LENS[number % len(PROMPT_LENS)]
    request = Request(number, tuple(range(prompt_len)), SamplingParams(num_tokens))
    request.arrived_s = BEGIN_S + number * rng.uniform(0.05, 0.1)
    at_s = request.arrived_s + rng.uniform(0.2, 0.6)
    while request.finished_s is None:
        size = num_tokens if number == 1 else rng.randint(1, 3)
        request.append([7] * size, at_s)
        at_s += rng.uniform(0.03, 0.2)
    return request


def drawn_moves(rng: random.Random, requests: Sequence[Request], kind: str) -> StepCounts:
    """With drafts by steps, the last two requests are preempted once. Turns and a server of text
    have what was found of prompts."""
    counts = StepCounts(num_steps=40, num_in_flight=100)
    looks_up = kind in (TURNS, "vllm", STEPS)
    for request in requests:
        number = request.request_id
        moves = counts.moves[number]
        first_s = request.token_times_s[0]
        moves.joined_s.append(request.arrived_s + 0.3 * (first_s - request.arrived_s))
        if looks_up:
            counts.look_up(number, len(request.prompt_ids), rng.randint(0, 5))
        if kind in (STEPS, TURNS) and number >= NUM_REQUESTS - 2:
            last_s = request.token_times_s[-1]
            moves.preempted_s.append(first_s + 0.25 * (last_s - first_s))
            moves.joined_s.append(first_s + 0.5 * (last_s - first_s))
            counts.num_preemptions += 1
            emitted = sum(at_s < moves.joined_s[-1] for at_s in request.token_times_s)
            counts.look_up(number, len(request.prompt_ids) + emitted - 1, 3)
    return counts


def drawn_drafts(rng: random.Random, requests: Sequence[Request], kind: str) -> Verifications:
    """Of all requests but the first; nothing of a pass without drafts. Steps draft other numbers,
    except for a server whose histogram says all of them."""
    found = Verifications()
    for request in requests[1:] if kind != PLAIN else ():
        left = len(request.output_ids) - 1
        if kind == AHEAD:
            found.num_cancelled[request.request_id] = rng.randint(0, 4)
        while left > 0:
            drafted = SERVED_GAMMA if kind in ("even", COUNTERS) else rng.randint(1, SERVED_GAMMA)
            accepted = rng.randint(0, drafted)
            emitted = min(accepted + 1, left)
            position = len(request.prompt_ids) + left if kind == AHEAD else None
            text_len = len(request.prompt_ids) + len(request.output_ids) - left
            context = None if kind == AHEAD else text_len
            found.add(request.request_id, drafted, accepted, emitted, None, position, context)
            left -= emitted
    return as_reported(found, kind) if kind in SERVER_KINDS else found


def as_reported(found: Verifications, kind: str) -> Verifications:
    """What a server reports of these in its answers, in its counters, or in both."""
    whole = {number: ReportedCounts.of(steps) for number, steps in found.by_request.items()}
    every: list[Verification] = found.every
    pass_counts = replace(ReportedCounts.of(every), steps=None)
    if kind == COUNTERS:
        return Verifications(reported_total=pass_counts)
    if kind == "vllm":
        return Verifications(reported=whole)
    if kind in ("sums", BOTH):
        sums = {n: ReportedCounts(counts.drafted, counts.accepted) for n, counts in whole.items()}
        return Verifications(reported=sums, reported_total=pass_counts if kind == BOTH else None)
    # Of a program whose steps all verify.
    return Verifications(
        reported={
            n: replace(counts, steps=None, emitted=sum(v.emitted for v in found.by_request[n]))
            for n, counts in whole.items()
        }
    )


def report_of(kind: str) -> ServersDetails:
    source = kind if kind in (COUNTERS, BOTH) else ANSWERS
    return ServersDetails(program="vllm", source=source, missing=[], problems=[])


def drawn_group(
    rng: random.Random, counts: StepCounts, is_drafting: bool, is_external: bool
) -> GroupRecord:
    """Of steps of one kind, of which two stall; of a server, whose steps are not known."""
    times_ms = [] if is_external else [rng.uniform(9.0, 11.0) for _ in range(30)]
    for place, ms in ((11, 90.0), (23, 60.0)) if times_ms else ():
        times_ms[place] = ms
    return GroupRecord(
        num_requests=NUM_REQUESTS,
        num_steps=counts.num_steps or None,
        num_in_flight=counts.num_in_flight or None,
        step_ms=times_ms,
        step_prompt_tokens=[0] * len(times_ms) or None,
        step_max_gamma=[SERVED_GAMMA] * len(times_ms) if times_ms and is_drafting else None,
        step_rows=[2] * len(times_ms) or None,
        draft_ms=[],
        verify_ms=[],
        decode_ms=[],
        peak_memory_bytes=None if is_external else [3 << 30],
        threads=[2],
    )
