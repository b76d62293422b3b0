"""ServingRecord: the requests of one command, served in one of its modes, one JSON line that is
appended and never rewritten. Imports no torch. The tables of docs/record.md are made from these
classes.

A run's record (`records/record.py`) has two passes over whole batches, and this one requests with
their arrivals. Like that one, it has metrics only if its tokens are not known to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from magicdec.bench.serving.metrics import (
    FIRST_CONTEXT,
    NO_PREFIXES,
    ContextAcceptance,
    ServingMetrics,
    TurnTimes,
)
from magicdec.config.run_config import split_draft
from magicdec.names import FULL_KV_POLICY
from magicdec.records.acceptance import ReportedCounts, Verification, Verifications
from magicdec.records.correctness import Correctness
from magicdec.records.drafted import DraftedPass, StepLog
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.record import MeasuredRecord, margin_field, seal_field, sealed_json
from magicdec.records.samples import hash_output
from magicdec.records.workload import WorkloadRecord
from magicdec.runner.request import Moves, Request
from magicdec.systems.declaration import Ranks
from magicdec.systems.details import Details, details_type
from magicdec.systems.modes import Pass

if TYPE_CHECKING:
    AnyDetails = Details
else:
    AnyDetails = details_type()

PARTS = ("model", "parallel", "attention", "decoding", "sampling")  # of a config that are recorded
OF_DRAFTS = ("draft", "kv")  # and those of a pass with drafts
UNCHECKED = "unchecked"
FAILED = "failed"
STATUSES = ("ok", "ok_with_ties", "differs", "diverged", UNCHECKED, FAILED)
WITHOUT_METRICS = ("diverged", FAILED)
NO_VERIFICATIONS = "if nothing was drafted for it; with random weights"
UNREPORTED = f"{NO_VERIFICATIONS}; if a server does not report it"
ALONE = "without `--turns`; in records of earlier versions"
UNLOGGED = "except in the passes of the gate; of pipelined speculation; where steps are captured"
ACCEPTANCE = "emulate_acceptance"
OF_STAGES = ("emulate_stage_ms", "emulate_link_ms")
# The flags of the load on which drafts depend, beside those of a run and of a system.
SERVING_FLAGS = ("num_requests", "arrival", "concurrency", "turns", ACCEPTANCE)
# Those that older records do not have, with what they did.
LATER_FLAGS = {"concurrency": None, "prefix_cache": False, "turns": 1}
EXACT_DTYPE = "float32"  # in which every request emits the same tokens in every pass


@dataclass(frozen=True, kw_only=True)
class RequestRecord(RecordPart):
    """The lengths and time stamps of one request. Times count from the first arrival."""

    arrival_ms: float = recorded("when the request arrived", "ms")
    joined_ms: list[float] = recorded(
        "when it got a row of the running batch: once, and again after each preemption", "ms"
    )
    preempted_ms: list[float] = recorded("when it gave its row back before its end", "ms")
    prefilled_ms: list[float] = recorded(
        "when the next output token after each of `joined_ms` was known", "ms"
    )
    first_token_ms: float = recorded("when its first output token was known", "ms")
    finished_ms: float = recorded("when its last output token was known", "ms")
    prompt_len: int = recorded("length of its prompt", "tokens")
    output_len: int = recorded("length of its output", "tokens")
    num_draft_tokens: int | None = recorded(
        "its draft tokens that were judged",
        "tokens",
        null=f"{UNREPORTED}; in records of earlier versions",
    )
    num_accepted_draft_tokens: int | None = recorded(
        "those of them that were accepted",
        "tokens",
        null=f"{UNREPORTED}; in records of earlier versions",
    )
    num_spec_steps: int | None = recorded(
        "verifications of its drafts",
        "verifications",
        null=f"{UNREPORTED}; in records of earlier versions",
    )
    acceptance_histogram: list[int] | None = recorded(
        "those of them that accepted exactly j draft tokens, for j = 0, 1, ...",
        "verifications",
        null=f"{UNREPORTED}; in records of earlier versions",
    )
    per_step_drafted: list[int] | None = recorded(
        "draft tokens of each verification of its drafts, in order", "tokens", null=UNREPORTED
    )
    per_step_accepted: list[int] | None = recorded(
        "those of them that were accepted", "tokens", null=UNREPORTED
    )
    per_step_emitted: list[int] | None = recorded(
        "tokens that each of these verifications appended to its output; where drafts run ahead, "
        "those of the commit in which the verification ended",
        "tokens",
        null=f"{NO_VERIFICATIONS}; of `endpoint`",
    )
    per_step_position: list[int] | None = recorded(
        "position of the first of these draft tokens in the text, prompt included",
        "tokens",
        null=NO_VERIFICATIONS + "; where drafts follow the newest token",
    )
    draft_hashes: list[str] | None = recorded(
        "of each of these verifications the hash of the tokens that were drafted, and that of the "
        "positions that the draft forwards read; four hexadecimal digits of each",
        null=UNLOGGED,
    )
    draft_keys: list[int] | None = recorded(
        "of each of these verifications the keys that one KV head read in the draft forwards",
        "tokens",
        null=UNLOGGED,
    )
    output_hash: str = recorded(
        "hash of its output token ids, the first 16 hexadecimal digits of SHA-256"
    )
    num_cancelled_draft_tokens: int | None = recorded(
        "its draft tokens that were cancelled before they were judged",
        "tokens",
        null="of systems that cancel none; with random weights",
    )
    conversation: int | None = recorded(
        "number of its conversation, from 0", null=ALONE, default=None
    )
    turn: int | None = recorded("its turn in the conversation, from 1", null=ALONE, default=None)
    num_prefix_tokens: int | None = recorded(
        "tokens that the prefix cache had of it when it joined, over all times that it joined",
        "tokens",
        null=f"{NO_PREFIXES}; in records of earlier versions",
        default=None,
    )
    joined_prefix_tokens: list[int] | None = recorded(
        "those of each time that it joined, in the order of `joined_ms`",
        "tokens",
        null=f"{NO_PREFIXES}; in records of earlier versions",
        default=None,
    )

    @property
    def has_positions(self) -> bool:
        """Whether it says where each of its verifications was, if it has any."""
        return self.per_step_position is not None or not self.per_step_drafted

    def verifications(self) -> list[Verification]:
        """Those that are known whole, and none of a server's."""
        if self.per_step_emitted is None:
            return []
        count = len(self.per_step_drafted or ())
        digests: Iterable[tuple[str, int] | None] = [None] * count
        if self.draft_hashes is not None and self.draft_keys is not None:
            digests = zip(self.draft_hashes, self.draft_keys, strict=True)
        positions: Iterable[int | None] = self.per_step_position or [None] * count
        columns = (
            self.per_step_drafted or (),
            self.per_step_accepted or (),
            self.per_step_emitted or (),
            digests,
            positions,
        )
        return [Verification(*counts) for counts in zip(*columns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ServingRecord(MeasuredRecord):
    """The requests of one command, served in one of its modes, and how their tokens compare with
    those of the first one."""

    kind: Literal["serving"] = recorded("`serving`", default="serving")
    status: str = recorded(
        "`ok`: every request has the tokens that it has in `reference`; `ok_with_ties`: some have "
        "others, and the rounding of the command explains it; `diverged`: it does not explain it, "
        "or steps or forwards are wrong; `differs`: some have others, and nothing could judge that "
        f"(docs/serving.md says when), in a dtype other than {EXACT_DTYPE} or in another program; "
        f"`{UNCHECKED}`: there is no other mode, a server sent no token ids, drafts were sampled, "
        f"which keeps only the distribution, or accepted by chance; `{FAILED}`: the logits of a "
        "request were not finite numbers, so that no token followed from them",
        choices=STATUSES,
    )
    name: str = recorded(
        "the mode as `--modes` names it, such as `inflight` or `inflight+draft`; of a closed loop "
        "with its requests in flight, such as `inflight, 4 at once`"
    )
    config: dict[str, Any] = recorded(
        "the resolved configuration as in a run's record, in which no value is `auto`; of stages, "
        "that of the first; `workload` has the flags of the load and of the system; `draft` and "
        "`kv` are there with drafts only"
    )
    threads: list[int] = recorded(
        "CPU threads as measured in this pass, in the order of all ranks; 0 for a rank that "
        f"waited; none if `{FAILED}`"
    )
    workload: WorkloadRecord = recorded(
        "the prompts and the models; `prefix_len` is the length of the longest prompt, of first "
        "turns with `--turns`"
    )
    reference: str | None = recorded(
        "the `name` of the first pass of the command", null="if it is the only one"
    )
    num_differing: int | None = recorded(
        "requests with tokens other than those in `reference`",
        null=f"if `{UNCHECKED}` or `{FAILED}`",
    )
    metrics: ServingMetrics | None = recorded("its metrics", null=f"if `diverged` or `{FAILED}`")
    details: AnyDetails | None = recorded(
        "what its system measured beside the requests, by its `kind`",
        null="of systems that measure nothing else; if `diverged` or `failed`",
    )
    requests: list[RequestRecord] = recorded(
        f"the requests in the order of arrival; none if `{FAILED}`"
    )
    times_by_turn: list[TurnTimes] | None = recorded(
        "the times of requests by their turns in conversations",
        null="without `--turns`; if `diverged` or `failed`; in records of earlier versions",
        default=None,
    )
    acceptance_by_context: list[ContextAcceptance] | None = recorded(
        f"acceptance by the length of prompts: up to {FIRST_CONTEXT} tokens, up to twice as many, "
        "and so on; groups without a request are left out",
        null="if nothing was drafted; with random weights; if a server reports it of the whole "
        "pass alone; if `diverged` or `failed`; in records of earlier versions",
        default=None,
    )
    error: str | None = recorded(
        "what has ended the pass, with the step", null=f"unless `{FAILED}`", default=None
    )
    correctness: Correctness | None = recorded(
        "the comparison with `reference`, of tokens and of forwards, and steps that were judged "
        "again",
        null=f"if `{FAILED}`; in records of earlier versions",
        default=None,
    )
    margin: float | None = margin_field()
    seal: str | None = seal_field()

    def to_json(self) -> str:
        return sealed_json(self)

    def __post_init__(self) -> None:
        assert self.status in STATUSES, f"status is {self.status}"
        assert self._counts_agree, "its status contradicts num_differing"
        has_none = self.status in WITHOUT_METRICS
        assert (self.metrics is None) == has_none, "metrics contradict status"
        assert (self.error is None) == (self.status != FAILED), "an error belongs to `failed`"

    @property
    def _counts_agree(self) -> bool:
        count = self.num_differing
        if self.status in (UNCHECKED, FAILED):
            return count is None
        if self.status == "diverged":  # by its tokens, a step that is wrong, or its logits
            found = self.correctness
            is_wrong = found is not None and (found.has_wrong_steps or found.has_alarms)
            return count != 0 or is_wrong
        return count is not None and (count == 0) == (self.status == "ok")

    @property
    def passed(self) -> bool:
        return self.status not in WITHOUT_METRICS

    @property
    def mode(self) -> str:
        return self.name

    @property
    def way(self) -> str:
        """Its `name` without the requests in flight."""
        return self.name.partition(", ")[0]

    @property
    def concurrency(self) -> int | None:
        """The requests in flight of a closed loop; None of an open one."""
        found: int | None = self.config["workload"].get("concurrency")
        return found

    @property
    def arrival(self) -> str:
        """When its requests arrived, in words."""
        if self.concurrency is None:
            return str(self.config["workload"]["arrival"])
        return "closed loop" if self.turns == 1 else f"closed loop of up to {self.turns} turns"

    @property
    def turns(self) -> int:
        """The questions of a conversation that were asked at most; 1 where requests are none."""
        found: int = self.config["workload"].get("turns", 1)
        return found

    @property
    def is_logged(self) -> bool:
        return self.seal is not None

    @property
    def why_other_drafts(self) -> str | None:
        if self.are_judged_by_time and not self._drafts_by_text:
            return "which drafts are made and judged follows from measured times"
        if self.are_judged_by_time and not all(each.has_positions for each in self.requests):
            return "a record does not say where its drafts were; renew it"
        if self.config["workload"]["arrival"] != "burst":
            return "requests join at measured times"
        return None

    @property
    def are_judged_by_time(self) -> bool:
        return Pass.named(self.name).declared.is_judged_by_time

    @property
    def _drafts_by_text(self) -> bool:
        """Whether a draft follows from the text before it alone, committed or not: a model that
        reads all of it does so, and lookups know only what is committed."""
        config = self.config_as_run()
        kv = config["kv"] or {}
        drafts = config["decoding"]["drafter"], kv.get("policy")
        return drafts == ("model", FULL_KV_POLICY)

    @property
    def accepts_by_chance(self) -> bool:
        """Whether `--emulate_acceptance` judged its drafts, so that its tokens mean nothing."""
        has_rates = self.config["decoding"].get(ACCEPTANCE) is not None
        return has_rates and "draft" in self.config

    @property
    def emulated_by(self) -> list[str]:
        """The flags by which stages, links, drafts or their acceptance were emulated."""
        workload = self.config["workload"]
        names = [name for name in OF_STAGES if workload.get(name) is not None]
        has_rate = workload.get(ACCEPTANCE) is not None
        if self.accepts_by_chance or (has_rate and Pass.named(self.name).drafts_ahead):
            names.append(ACCEPTANCE)
        return [f"--{name}" for name in names]

    @property
    def is_external(self) -> bool:
        """Whether another program has computed."""
        return Pass.named(self.name).ranks is Ranks.NONE

    @property
    def program(self) -> str | None:
        """The other program that has computed, if it is known."""
        return None if self.details is None else self.details.program

    @property
    def is_uncompared(self) -> bool:
        # The gate compares the tokens of others with those of the baseline.
        return self.accepts_by_chance

    def config_as_run(self) -> dict[str, Any]:
        """The sections of a run's config. In pipelined speculation the config of the stages drafts
        nothing."""
        drafter, _ = split_draft(self.config["workload"]["draft"])
        decoding = self.config["decoding"] | {"strategy": "speculative"}
        decoding |= {"drafter": drafter}
        return {"draft": None, "kv": None} | self.config | {"decoding": decoding}

    def serving_flags(self) -> dict[str, Any]:
        settings = LATER_FLAGS | self.config["workload"]
        of_system = Pass.named(self.name).system.drafts_follow
        return {
            name: settings[name] for name in (*SERVING_FLAGS, "concurrency", "turns", *of_system)
        }

    def drafted_pass(self) -> DraftedPass:
        """As `DraftingRecord`."""
        if self.metrics is None or self.metrics.draft_acceptance_rate is None:
            raise ValueError("has no draft_acceptance_rate")
        if self.is_external:
            raise ValueError("has the acceptance that a server reports, which is not compared")
        found = Verifications()
        for number, request in enumerate(self.requests):
            for each in request.verifications():
                counts = each.drafted, each.accepted, each.emitted
                found.add(number, *counts, each.digest, each.position)
        steps = [
            [step_log(i, each) for i, each in enumerate(found.by_request.get(number, ()))]
            for number in range(len(self.requests))
        ]
        hashes = [request.output_hash for request in self.requests]
        return DraftedPass(found, hashes, steps if self.is_logged else None, {})


def step_log(number: int, verification: Verification) -> StepLog:
    """One of the verifications of a request."""
    hashes, num_read = verification.digest or (None, 0)
    counts = verification.drafted, verification.accepted, verification.emitted
    return StepLog(number, hashes, num_read, *counts)


def parts_of(config: Mapping[str, Any], has_drafts: bool) -> dict[str, Any]:
    """The parts of a resolved config that are recorded."""
    return {name: config[name] for name in ((*PARTS, *OF_DRAFTS) if has_drafts else PARTS)}


def status_of(
    num_differing: int | None, correctness: Correctness, dtype: str, is_external: bool
) -> str:
    """The status of a pass. `num_differing` is None if tokens cannot be compared. `is_external`:
    another program made some of them."""
    if correctness.has_wrong_steps or correctness.has_alarms:
        return "diverged"
    if num_differing is None:
        return UNCHECKED
    if num_differing == 0:
        return "ok"
    if correctness.num_diverged is not None:
        return correctness.status
    return "diverged" if dtype == EXACT_DTYPE and not is_external else "differs"


def describe_requests(
    requests: Sequence[Request],
    moves: Mapping[int, Moves],
    begin_s: float,
    verifications: Verifications | None = None,
) -> list[RequestRecord]:
    """The time stamps of finished requests, of which the first arrived at `begin_s`. `moves` has
    those of each request by its id. `verifications` are None where they have no meaning."""
    judged = Verifications() if verifications is None else verifications

    def per_step(request: Request, name: str) -> list[int] | None:
        steps = judged.by_request.get(request.request_id)
        return [getattr(each, name) for each in steps] if steps else None

    def by_step(counts: ReportedCounts, part: int) -> list[int] | None:
        return None if counts.steps is None else [step[part] for step in counts.steps]

    def counted(request: Request) -> dict[str, Any]:
        counts = judged.counts_of(request.request_id) or ReportedCounts()
        histogram = counts.histogram
        return {
            "num_draft_tokens": counts.drafted,
            "num_accepted_draft_tokens": counts.accepted,
            "num_spec_steps": counts.verifications,
            "acceptance_histogram": None if histogram is None else list(histogram),
            "per_step_drafted": by_step(counts, 0),
            "per_step_accepted": by_step(counts, 1),
        }

    def ms(at_s: float | None) -> float:
        assert at_s is not None, "the request has ended"
        return 1e3 * (at_s - begin_s)

    def after(request: Request, at_s: float) -> float:
        return ms(next((t for t in request.token_times_s if t >= at_s), None))

    def positions_of(request: Request) -> list[int] | None:
        steps = judged.by_request.get(request.request_id, ())
        known = [each.position for each in steps if each.position is not None]
        return known or None

    def of_log(request: Request, part: int) -> list[Any] | None:
        digests = [each.digest for each in judged.by_request.get(request.request_id, ())]
        known = [digest[part] for digest in digests if digest is not None]
        return known if known and len(known) == len(digests) else None

    def found(own: Moves) -> dict[str, Any]:
        if not own.num_looked_up:
            return {}
        return {"num_prefix_tokens": own.num_found, "joined_prefix_tokens": own.found}

    return [
        RequestRecord(
            arrival_ms=ms(request.arrived_s),
            joined_ms=[ms(at_s) for at_s in moves[request.request_id].joined_s],
            preempted_ms=[ms(at_s) for at_s in moves[request.request_id].preempted_s],
            prefilled_ms=[after(request, at_s) for at_s in moves[request.request_id].joined_s],
            first_token_ms=ms(request.first_token_s),
            finished_ms=ms(request.finished_s),
            prompt_len=len(request.prompt_ids),
            output_len=len(request.output_ids),
            **counted(request),
            per_step_emitted=per_step(request, "emitted"),
            per_step_position=positions_of(request),
            draft_hashes=of_log(request, 0),
            draft_keys=of_log(request, 1),
            output_hash=hash_output(request.output_ids),
            num_cancelled_draft_tokens=judged.num_cancelled.get(request.request_id),
            conversation=None if request.turn is None else request.turn.conversation,
            turn=None if request.turn is None else request.turn.number,
            **found(moves[request.request_id]),
        )
        for request in requests
    ]
