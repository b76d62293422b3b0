"""PassRecord: requests that one mode has decoded, request by request and step by step, one JSON
line. It is the only record of something that decoded: `run`, `serve`, sweeps, the gate and the
original suites' commands write it. Imports no torch.

A pass has metrics only if its tokens are not known to be wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, TypeAdapter

from magicdec.names import DETAILS, TRACES, load_object
from magicdec.records.acceptance import (
    GroupAcceptance,
    ReportedCounts,
    Verification,
    Verifications,
)
from magicdec.records.correctness import Correctness
from magicdec.records.drafted import JudgedRecord
from magicdec.records.environment import MemoryRecord
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.metrics import (
    COUNTED_ELSEWHERE,
    FIRST_CONTEXT,
    FIRST_GROWN,
    NO_HASHES,
    NO_OFFLOAD,
    NO_PREFIXES,
    NOT_COUNTED,
    NOT_KEPT,
    NOT_TIMED,
    UNCALIBRATED,
    ContextAcceptance,
    PassMetrics,
    TurnTimes,
)
from magicdec.records.record import Record, Status, margin_field, records_of_type, seal_field
from magicdec.records.workload import WorkloadRecord

NUM_PARTS = 100  # of the time of a pass, in which the share that stages are busy is recorded
EXACT_DTYPE = "float32"  # in which every request emits the same tokens in every pass
NO_VERIFICATIONS = "if nothing was drafted for it; with random weights"
UNREPORTED = f"{NO_VERIFICATIONS}; if a server does not report it"
ALONE = "without `--turns` or a trace of sessions"
NO_GROUPS = (
    "if nothing was drafted; with random weights; if a server reports it of the whole pass alone; "
    "if `mismatch` or `failed`"
)
AFTER_HIT = "after a hit"
COLD = "cold"
UNLOGGED = "except in the passes of the gate; of pipelined speculation; where steps are captured"
NO_STAGES = "of other modes, or if `mismatch` or `failed`"
UNDRAFTED = f"if nothing is drafted; with random weights; {NOT_TIMED}"
ACCEPTANCE = "emulate_acceptance"
STAGE_EMULATION = ("emulate_stage_ms", "emulate_link_ms")
# The keys of `config` that tables and comparisons need in every record of a pass.
CONFIG_KEYS = {
    "model": ("model", "dtype", "target_dtype"),
    "parallel": ("device",),
    "decoding": ("strategy", "drafter", "gamma", "ignore_eos"),
    "workload": ("prefix_len", "gen_len"),
}


def restored(details: Any) -> Any:
    """The details of a system as its own class, from the values in a line. Raises ValueError if no
    system has such."""
    if not isinstance(details, dict):
        return details
    return TypeAdapter(load_object(DETAILS)()).validate_json(json.dumps(details), strict=True)


RecordedDetails = Annotated[Any, BeforeValidator(restored)]
"""What the system of a mode measured, a part of the class that the system declares."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord(RecordPart):
    """The lengths and time stamps of one request, and its drafts. Times count from the first
    arrival of its group; where passes share a prefill, that is part of the times of each."""

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
        "its draft tokens that were judged", "tokens", null=UNREPORTED
    )
    num_accepted_draft_tokens: int | None = recorded(
        "those of them that were accepted", "tokens", null=UNREPORTED
    )
    num_spec_steps: int | None = recorded(
        "verifications of its drafts", "verifications", null=UNREPORTED
    )
    acceptance_histogram: list[int] | None = recorded(
        "those of them that accepted exactly j draft tokens, for j = 0, 1, ...",
        "verifications",
        null=UNREPORTED,
    )
    per_step_drafted: list[int] | None = recorded(
        "draft tokens of each verification of its drafts, in order", "tokens", null=UNREPORTED
    )
    per_step_accepted: list[int] | None = recorded(
        "those of them that were accepted", "tokens", null=UNREPORTED
    )
    per_step_emitted: list[int] | None = recorded(
        "tokens that each of these verifications appended to its output; where drafts run ahead "
        "those of the commit in which the verification ended",
        "tokens",
        null=f"{NO_VERIFICATIONS}; {COUNTED_ELSEWHERE}",
    )
    per_step_position: list[int] | None = recorded(
        "position of the first of these draft tokens in the text, prompt included",
        "tokens",
        null=NO_VERIFICATIONS + "; where drafts follow the newest token",
    )
    per_step_context: list[int] | None = recorded(
        "length of the text before these draft tokens, prompt included",
        "tokens",
        null=f"{NO_VERIFICATIONS}; {COUNTED_ELSEWHERE}; where drafts run ahead",
    )
    draft_hashes: list[str] | None = recorded(
        "of each of these verifications the hash of the tokens that were drafted, and that of the "
        "positions that the draft forwards read, in each layer and KV head; four hexadecimal "
        "digits of each",
        null=UNLOGGED,
    )
    num_draft_kv_read: list[int] | None = recorded(
        "of each of these verifications the keys that one KV head read in the draft forwards",
        "tokens",
        null=UNLOGGED,
    )
    output_hash: str = recorded(
        "hash of its output token ids, the first 16 hexadecimal digits of SHA-256; equal hashes "
        "stand for equal outputs"
    )
    num_cancelled_draft_tokens: int | None = recorded(
        "its draft tokens that were cancelled before they were judged",
        "tokens",
        null="of systems that cancel none; with random weights",
    )
    conversation: int | None = recorded("number of its conversation, from 0", null=ALONE)
    turn: int | None = recorded(
        "its turn in the conversation, from 1; of a sub-agent, among its own", null=ALONE
    )
    branch: int | None = recorded(
        "the agent of its session: 0 is the session's own, and its sub-agents are counted on",
        null=NO_HASHES,
    )
    num_known_tokens: int | None = recorded(
        "tokens of its prompt that a cache without limits would have had, as in "
        "`theoretical_hit_rate`",
        "tokens",
        null=NO_HASHES,
    )
    num_looked_up_tokens: int | None = recorded(
        "tokens that were looked for in the prefix cache, over all times that it joined",
        "tokens",
        null=NO_PREFIXES,
    )
    joined_prefix_tokens: list[int] | None = recorded(
        "tokens that the prefix cache had of it each time that it joined, in the order of "
        "`joined_ms`",
        "tokens",
        null=NO_PREFIXES,
    )
    joined_host_tokens: list[int] | None = recorded(
        "of `joined_prefix_tokens` those that were in host memory",
        "tokens",
        null=f"{NO_OFFLOAD}; if none were",
    )
    answer_score: float | None = recorded(
        "score of its answer",
        "0 to 1",
        null="if the workload has no known answers; if the target has random weights",
    )

    @property
    def has_positions(self) -> bool:
        """Whether it says where each of its verifications was, if it has any."""
        return self.per_step_position is not None or not self.per_step_drafted

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None without such tokens."""
        num_later = self.output_len - 1
        return (self.finished_ms - self.first_token_ms) / num_later if num_later else None

    def verifications(self) -> list[Verification]:
        """Those that are known whole, and none of a server's."""
        if self.per_step_emitted is None:
            return []
        count = len(self.per_step_drafted or ())
        digests: Iterable[tuple[str, int] | None] = [None] * count
        if self.draft_hashes is not None and self.num_draft_kv_read is not None:
            digests = zip(self.draft_hashes, self.num_draft_kv_read, strict=True)
        positions: Iterable[int | None] = self.per_step_position or [None] * count
        contexts: Iterable[int | None] = self.per_step_context or [None] * count
        columns = (
            self.per_step_drafted or (),
            self.per_step_accepted or (),
            self.per_step_emitted,
            digests,
            positions,
            contexts,
        )
        return [Verification(*counts) for counts in zip(*columns, strict=True)]

    def reported(self) -> ReportedCounts | None:
        """What another program reports of its drafts; None where the verifications are known, and
        if nothing was reported. Every step of such a program verifies."""
        if self.per_step_emitted is not None or self.num_draft_tokens is None:
            return None
        histogram = self.acceptance_histogram
        steps = None
        if self.per_step_drafted is not None and self.per_step_accepted is not None:
            steps = tuple(zip(self.per_step_drafted, self.per_step_accepted, strict=True))
        return ReportedCounts(
            drafted=self.num_draft_tokens,
            accepted=self.num_accepted_draft_tokens,
            verifications=self.num_spec_steps,
            emitted=self.output_len - 1,
            histogram=None if histogram is None else tuple(histogram),
            steps=steps,
        )


@dataclass(frozen=True, kw_only=True)
class GroupRecord(RecordPart):
    """What happened to the requests that were served together: a batch of prompts of `magicdec
    run`, one of the `--repeats` of `magicdec serve`. Steps are those that decode, in order."""

    num_requests: int = recorded("requests of the group; `requests` has those of all, in order")
    prefill_ms: float | None = recorded(
        "time of the prefill that the passes of the command share", "ms", null=NOT_KEPT
    )
    begin_ms: float | None = recorded(
        "time between prefill and the first decode step, without `calibration_ms`",
        "ms",
        null=NOT_KEPT,
    )
    calibration_ms: float | None = recorded(
        "time that `--gamma auto` spent on measuring steps before the first one",
        "ms",
        null=UNCALIBRATED,
    )
    draft_prefill_ms: float | None = recorded(
        "`begin_ms` of a standalone draft, which is its own prefill",
        "ms",
        null=f"without a standalone draft; {NOT_KEPT}",
    )
    num_steps: int | None = recorded(
        "as in `metrics`, of this group", "steps", null=COUNTED_ELSEWHERE
    )
    num_in_flight: int | None = recorded(
        "requests that each step prefilled or decoded, summed over the steps",
        "requests",
        null=f"in pipelined speculation, or {COUNTED_ELSEWHERE}; where passes share a prefill",
    )
    step_ms: list[float] = recorded("time of each step; empty where they wait for each other", "ms")
    step_prompt_tokens: list[int] | None = recorded(
        "prompt tokens that each step prefilled", "tokens", null=f"{NOT_TIMED}; if no step did"
    )
    step_forwards: list[int] | None = recorded(
        "forwards of the target and of a draft in each step, as the first rank has counted them",
        "forwards",
        null=f"{NOT_TIMED}; if they are not counted",
    )
    step_max_gamma: list[int] | None = recorded(
        "draft tokens of the row with the most in each step; 0 in a step without drafts",
        "tokens",
        null=UNDRAFTED,
    )
    step_rows: list[int] | None = recorded("rows that each step decoded", "rows", null=NOT_TIMED)
    blocks_to_host: int | None = recorded(
        "blocks of the prefix caches of target and draft that were copied to host memory, on the "
        "first rank",
        "blocks",
        null=NO_OFFLOAD,
    )
    blocks_from_host: int | None = recorded(
        "as `blocks_to_host`, of those that came back", "blocks", null=NO_OFFLOAD
    )
    draft_ms: list[float] = recorded(
        "time of drafting, of each step that drafts; empty if not timed", "ms"
    )
    verify_ms: list[float] = recorded(
        "time of verifying, of each step that drafts; empty if not timed", "ms"
    )
    decode_ms: list[float] = recorded(
        "time of the forward and of sampling, of each step without drafts; empty if not timed", "ms"
    )
    bytes_read: list[int] | None = recorded(
        "bytes to read in the decode steps, by rank", "bytes", null=NOT_COUNTED
    )
    draft_kv_tokens: int | None = recorded(
        "tokens whose K and V the draft forwards read, summed over rows and forwards",
        "tokens",
        null=NOT_COUNTED,
    )
    draft_rows: int | None = recorded(
        "rows of the draft forwards, summed over forwards", "rows", null=NOT_COUNTED
    )
    peak_memory_bytes: list[int] | None = recorded(
        "largest memory use, by rank; 0 of a rank for which it is not known",
        "bytes",
        null=f"if it is not known; {COUNTED_ELSEWHERE}",
    )
    threads: list[int] = recorded(
        "CPU threads as measured, in the order of all ranks; 0 for a rank that waited"
    )


@dataclass(frozen=True, kw_only=True)
class PassRecord(JudgedRecord):
    """All requests of a command, decoded in one of its modes, and how their tokens compare with
    those of another pass of the command."""

    kind: Literal["pass"] = recorded("`pass`", default="pass")
    status: str = recorded(
        "`verified`: every request has the tokens that it has in `reference`; "
        "`verified_with_ties`: some have others, and the rounding of the command explains it; "
        "`mismatch`: it does not explain it, or steps or forwards are wrong; `unverified`: tokens "
        "were compared with nothing, because there is no other pass, a server sent no token ids, "
        "drafts were sampled, which keeps only the distribution, or accepted by chance; or some "
        f"differ, in a dtype other than {EXACT_DTYPE} or in another program, and nothing could "
        "judge that (docs/serving.md says when); `failed`: an error ended the pass",
        choices=tuple(Status),
    )
    name: str = recorded(
        "the mode as `--modes` names it, such as `static` or `inflight+draft`; of a closed loop "
        "with its requests in flight, such as `inflight, 4 at once`"
    )
    config: dict[str, Any] = recorded(
        "the resolved configuration, in which no value is `auto`; of stages, that of the first; "
        "`workload` has the flags of the command; `draft` and `kv` are there with drafts only"
    )
    workload: WorkloadRecord | None = recorded(
        "the prompts and the models; `prefix_len` is the length of the longest prompt, of first "
        "turns with `--turns`",
        null="if `failed` before they were found",
    )
    reference: str | None = recorded(
        "the `name` of the pass of the command that this one is compared with",
        null="if it is the only one, and of a pass that failed before another one",
    )
    num_differing: int | None = recorded(
        "requests with tokens other than those in `reference`",
        null="if those of some requests cannot be compared",
    )
    metrics: PassMetrics | None = recorded("its metrics", null="if `mismatch` or `failed`")
    details: RecordedDetails = recorded(
        "what its system measured beside the requests; see the page of the system. Of several "
        "groups counts are summed, the largest and the least are of all, and shares and times are "
        "means over the groups; of what a server reports, that is taken which all groups have",
        null=NO_STAGES,
    )
    requests: list[RequestRecord] = recorded(
        "the requests in the order of arrival, group after group; if `failed`, those of the groups "
        "that had ended before"
    )
    groups: list[GroupRecord] = recorded(
        "the groups in order; fewer than `--repeats` if the command was ended before"
    )
    times_by_turn: list[TurnTimes] | None = recorded(
        "the times of requests by their turns in conversations",
        null=f"{ALONE}; if `mismatch` or `failed`",
    )
    acceptance_by_turn: dict[str, GroupAcceptance] | None = recorded(
        "acceptance by the turns of conversations: `1`, `2`, `3 to 4`, `5 to 8` and so on",
        null=f"{ALONE}; {NO_GROUPS}",
    )
    acceptance_by_hit: dict[str, GroupAcceptance] | None = recorded(
        "acceptance of the requests of which the prefix cache had something when they first "
        f"joined (`{AFTER_HIT}`), and of the others (`{COLD}`)",
        null=f"{NO_PREFIXES}; {NO_GROUPS}",
    )
    acceptance_by_context: list[ContextAcceptance] | None = recorded(
        f"acceptance by the length of prompts: up to {FIRST_CONTEXT} tokens, up to twice as many, "
        "and so on; groups without a request are left out",
        null="if nothing was drafted; with random weights; if a server reports it of the whole "
        "pass alone; if `mismatch` or `failed`",
    )
    acceptance_by_grown_context: dict[str, GroupAcceptance] | None = recorded(
        "acceptance of the verifications by the length that the text had before their drafts, "
        f"prompt included: `up to {FIRST_GROWN}`, `{FIRST_GROWN + 1} to {2 * FIRST_GROWN}` tokens, "
        "and so on, each group to twice as many as the one before; the prompts of a group are "
        "those that were drafted for there",
        null=f"{NO_GROUPS}; {COUNTED_ELSEWHERE}",
    )
    memory: MemoryRecord | None = recorded(
        "the planned and the measured memory of all ranks together",
        null=f"if it was not planned; {COUNTED_ELSEWHERE}",
    )
    correctness: Correctness | None = recorded(
        "the comparison with `reference`, of tokens and of forwards, and steps that were judged "
        "again",
        null="if `failed`",
    )
    error: str | None = recorded(
        "type and message of what has ended the pass", null="unless `failed`"
    )
    margin: float | None = margin_field()
    seal: str | None = seal_field()

    def __post_init__(self) -> None:
        problem = self._contradiction() or missing_key(self.config)
        problem = problem or gone_with_trees(self.config) or unequal_threads(self)
        assert problem is None, problem

    def _contradiction(self) -> str | None:
        """Why the values of the record exclude each other."""
        if self.status not in tuple(Status):
            return f"status is {self.status}; choose from {', '.join(Status)}"
        if (self.error is not None) != (self.status == Status.FAILED):
            return "an error belongs to status failed, and only to it"
        if (self.metrics is not None) != self.passed:
            return "metrics exist only, and always, where its tokens are not known to be wrong"
        if self.workload is None and self.status != Status.FAILED:
            return "it has no workload"
        found = self.correctness
        if found is None and self.status != Status.FAILED:
            return "it does not say how its tokens compare, although it did not fail"
        if found is not None and (found.has_wrong_steps or found.has_alarms):
            return None if self.status == Status.MISMATCH else "its status hides wrong steps"
        differs = bool(self.num_differing) or (found is not None and found.identical is False)
        if self.status == Status.MISMATCH and not differs:
            return "it is a mismatch, but no tokens differ, and no steps or forwards are wrong"
        if self.passed and found is not None and found.num_diverged:
            return f"its status is {self.status}, but its tokens diverged"
        if self.status == Status.VERIFIED and self.num_differing != 0:
            return "it is verified, but tokens differ, or were compared with nothing"
        if self.status == Status.VERIFIED_WITH_TIES and not self.num_differing:
            return "it has ties, but no tokens differ"
        if sum(group.num_requests for group in self.groups) != len(self.requests):
            return "its groups have not as many requests as it has"
        return None

    @property
    def passed(self) -> bool:
        """Whether its tokens are not known to be wrong."""
        return self.status not in (Status.MISMATCH, Status.FAILED)

    @property
    def mode(self) -> str:
        """Its `name` without the requests in flight."""
        return self.name.partition(", ")[0]

    @property
    def is_judged(self) -> bool:
        """Whether comparisons give a verdict on it: on what the gate has made, on the drafts of
        passes that share a prefill, and on any failure."""
        has_failed = self.error is not None
        return self.is_logged or has_failed or (self.shares_prefill and self.is_drafting)

    @property
    def is_reference(self) -> bool:
        """Whether other passes of its command are compared with it."""
        return self.reference == self.name

    @property
    def is_drafting(self) -> bool:
        """Whether its mode drafts, whether something was drafted or not."""
        return self.config["decoding"]["drafter"] is not None

    @property
    def groups_of_requests(self) -> Iterator[tuple[GroupRecord, list[RequestRecord]]]:
        """Each group with its requests."""
        first = 0
        for group in self.groups:
            yield group, self.requests[first : first + group.num_requests]
            first += group.num_requests

    @property
    def num_missing_repeats(self) -> int:
        """The `--repeats` that it has not served, because the command was ended before."""
        repeats: int = self.config["workload"].get("repeats", 1)
        return max(0, repeats - len(self.groups)) if self.groups else 0

    @property
    def concurrency(self) -> int | None:
        """The requests in flight of a closed loop; None of an open one."""
        found: int | None = self.config["workload"].get("concurrency")
        return found

    @property
    def arrival(self) -> str:
        """When its requests arrived, in words."""
        workload = self.config["workload"]
        asked = str(workload.get("arrival", "burst"))
        if self.has_sessions:
            scale = workload["scale"]
            starts = workload["session_starts"]
            loop = "" if self.concurrency is None else ", closed loop"
            loop += "" if starts is None else f", sessions begin {starts}"
            return f"{asked}{'' if scale == '1' else f', scale {scale}'}{loop}"
        if self.concurrency is None:
            return asked
        return "closed loop" if self.turns == 1 else f"closed loop of up to {self.turns} turns"

    @property
    def has_sessions(self) -> bool:
        """Whether it served the sessions of a trace."""
        name, _, file = self.config["workload"].get("arrival", "").partition(":")
        return bool(file) and name in TRACES

    @property
    def turns(self) -> int:
        """The questions of a conversation that were asked at most; 1 where requests are none."""
        found: int = self.config["workload"].get("turns", 1)
        return found

    @property
    def shares_prefill(self) -> bool:
        """Whether its prompts were prefilled once for several passes, as by `magicdec run`; of a
        pass that failed, whether they would have been."""
        if not self.groups:
            return "num_batches" in self.config["workload"]
        return any(group.prefill_ms is not None for group in self.groups)

    @property
    def is_of_run(self) -> bool:
        return self.shares_prefill

    def repeats(self, others: Sequence[Record]) -> bool:
        return self.name in {other.name for other in records_of_type(others, PassRecord)}

    @property
    def is_logged(self) -> bool:
        """Whether the gate has made it, so that it says of each step what was drafted."""
        has_log = any(request.draft_hashes is not None for request in self.requests)
        return self.seal is not None or has_log

    @property
    def is_uncompared(self) -> bool:
        """Whether its tokens could have been compared with others, and were not. The gate compares
        the tokens of others with those of the baseline."""
        if self.accepts_by_chance:
            return True
        is_checked = self.correctness is not None and self.correctness.reference is not None
        return self.shares_prefill and not is_checked and is_greedy(self.config)

    @property
    def accepts_by_chance(self) -> bool:
        """Whether `--emulate_acceptance` judged its drafts, so that its tokens mean nothing."""
        return self.is_drafting and self.config["decoding"].get(ACCEPTANCE) is not None

    @property
    def emulated_by(self) -> list[str]:
        """The flags by which stages, links, drafts or their acceptance were emulated."""
        workload = self.config["workload"]
        names = [name for name in STAGE_EMULATION if workload.get(name) is not None]
        if self.accepts_by_chance or (self.is_drafting and workload.get(ACCEPTANCE) is not None):
            names.append(ACCEPTANCE)
        return [f"--{name}" for name in names]

    @property
    def draft_acceptance_rate(self) -> float | None:
        return None if self.metrics is None else self.metrics.draft_acceptance_rate

    @property
    def kv_tokens_read(self) -> float | None:
        return None if self.metrics is None else self.metrics.kv_tokens_read

    @property
    def draft_totals(self) -> dict[str, Any]:
        return {
            name: values
            for name in ("draft_kv_tokens", "draft_rows")
            if None not in (values := [getattr(group, name) for group in self.groups])
        }

    @property
    def output_hashes(self) -> list[str]:
        return [request.output_hash for request in self.requests]

    def verifications(self) -> Verifications:
        return verifications_of(self.requests)


def verifications_of(requests: Sequence[RequestRecord]) -> Verifications:
    """Those of requests, by their place; of another program what it reports of each."""
    found = Verifications()
    for number, request in enumerate(requests):
        if steps := request.verifications():
            found.by_request[number] = steps
        if (counts := request.reported()) is not None:
            found.reported[number] = counts
        if request.num_cancelled_draft_tokens is not None:
            found.num_cancelled[number] = request.num_cancelled_draft_tokens
    return found


PLAIN = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}


def is_greedy(config: Mapping[str, Any]) -> bool:
    """Whether each token is the one with the largest logit."""
    section = config.get("sampling") or {}
    return all(section.get(name, value) == value for name, value in PLAIN.items())


def missing_key(config: Mapping[str, Any]) -> str | None:
    """A message with the first of `CONFIG_KEYS` that `config` lacks."""
    for section, keys in CONFIG_KEYS.items():
        values = config.get(section)
        if not isinstance(values, Mapping):
            return f"it has no config.{section}"
        for key in keys:
            if key not in values:
                return f"it has no config.{section}.{key}"
    return None


def gone_with_trees(config: Mapping[str, Any]) -> str | None:
    """A message if an older record drafted a tree, which must not be taken for a chain of `--gamma`
    tokens."""
    tree = config["decoding"].get("tree")
    return None if tree is None else f"it drafted a tree (--tree {tree}), which is gone"


def unequal_threads(record: PassRecord) -> str | None:
    """A message if a group had other ranks or threads than the first."""
    first = next((group.threads for group in record.groups), None)
    for number, group in enumerate(record.groups):
        if group.threads != first:
            return (
                f"group {number}: the ranks had {group.threads} threads, but {first} in the first "
                "group"
            )
    return None


def hash_output(token_ids: Sequence[int]) -> str:
    """The hash of an output, as a record holds it (`RequestRecord.output_hash`)."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


def reference_of(record: PassRecord, command: Iterable[PassRecord]) -> PassRecord | None:
    """The pass of the command that a pass was compared with; None if it was compared with none, or
    itself is the reference."""
    if record.reference in (None, record.name):
        return None
    return next((candidate for candidate in command if candidate.name == record.reference), None)
