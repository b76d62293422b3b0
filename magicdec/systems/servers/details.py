"""ServersDetails: what a server reported of its drafts in a pass, and what of it is taken, which is
only what adds up and is of this pass alone. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from magicdec.names import SERVER_FORMATS, load_object
from magicdec.records.acceptance import ReportedCounts, Verifications
from magicdec.records.fields import recorded
from magicdec.runner.request import Request
from magicdec.systems.details import Details
from magicdec.systems.servers.counters import Counters
from magicdec.systems.servers.server_format import ServerEvent, ServerFormat, as_count, part_of

ANSWERS = "answers"
COUNTERS = "counters"
AND = " and "
BOTH = f"{ANSWERS}{AND}{COUNTERS}"
SAID_MISSING = ("draft_acceptance_rate", "mean_acceptance_length", "acceptance_per_position")
# A server may count a moment after it has answered.
COUNTING_S = 5.0
EVERY_S = 0.05
SUMS = ("drafted", "accepted", "verifications")  # that answers and counters may both have


def formats() -> dict[str, ServerFormat]:
    return {name: load_object(place) for name, place in SERVER_FORMATS.items()}


@dataclass(frozen=True, kw_only=True)
class ServersDetails(Details):
    """What a server reported of its drafts, and what is missing."""

    kind: Literal["servers"] = recorded("`servers`", default="servers")

    program: str | None = recorded(
        "the program whose form the report has",
        choices=tuple(SERVER_FORMATS),
        null="if nothing was reported in a known form",
    )
    source: str | None = recorded(
        f"where the acceptance of the pass is from: `{ANSWERS}`, which are of one request each; "
        f"`{COUNTERS}` of the server, of the whole pass; or `{BOTH}`, where counters fill in what "
        "answers lack",
        choices=(ANSWERS, COUNTERS, BOTH),
        null="if nothing was reported, or nothing of it is taken",
    )
    missing: list[str] = recorded(
        "metrics of acceptance that the server does not report and that do not follow from what it "
        "reports; if it reports nothing, all"
    )
    problems: list[str] = recorded("why reported counts are not taken, a sentence each")

    @classmethod
    def joined(cls, groups: Sequence[Self]) -> Self:
        """What is taken of several groups of requests: what is taken of each of them. The problems
        of all are there, each once."""
        problems = [problem for group in groups for problem in group.problems]
        taken = list[str]()
        for source in (ANSWERS, COUNTERS):
            count = sum(source in (group.source or "") for group in groups)
            if count == len(groups):
                taken.append(source)
            elif count:
                problems.append(f"{source}: known of {count} of {len(groups)} repeats alone")
        return cls(
            program=next((group.program for group in groups if group.program is not None), None),
            source=AND.join(taken) or None,
            missing=[],
            problems=list(dict.fromkeys(problems)),
        )

    @property
    def takes_totals(self) -> bool:
        return COUNTERS in (self.source or "")

    def completed(self, missing: Sequence[str], is_drafting: bool) -> Self:
        """The report with the metrics that do not follow from it. If it says that nothing was
        drafted, none is missing."""
        return replace(self, missing=list(missing) if self.source is None or is_drafting else [])

    def lines(self, name: str, has_drafts: bool) -> list[str]:
        lines = [f"{name}: not taken: {problem}" for problem in self.problems]
        if self.source is None and not self.problems:
            lines.append(f"{name}: does not say whether it drafts; see --endpoint_metrics")
        if has_drafts:
            missing = [key for key in self.missing if key in SAID_MISSING]
            rest = f"; without {', '.join(missing)}" if missing else ""
            lines.append(f"{name}: acceptance by the {self.source} of {self.program}{rest}")
        return lines


@dataclass
class ServerCounts:
    """What a server has said so far in one pass: the counts of drafts of each request with the name
    of their format, and sentences about what is no count."""

    formats: Mapping[str, ServerFormat] = field(default_factory=formats)
    by_request: dict[int, tuple[str, ReportedCounts]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    cached: dict[int, Any] = field(default_factory=dict)  # prompt tokens of which it had the KV

    def observe(self, request_id: int, event: ServerEvent) -> None:
        """Note what an event says of its request so far: its drafts, and its prompt."""
        details = part_of(part_of(event, "usage") or {}, "prompt_tokens_details") or {}
        if (count := details.get("cached_tokens")) is not None:
            self.cached[request_id] = count
        for name, report_format in self.formats.items():
            try:
                counts = report_format.read(event)
            except ValueError as error:
                self.problems[request_id] = str(error)
                continue
            if counts is not None:
                self.by_request[request_id] = name, counts


def cached_of(counts: ServerCounts, requests: Sequence[Request]) -> dict[int, int]:
    """Of each request the prompt tokens of which the server had the KV; empty if it does not say
    that of all. Raises ValueError, one sentence, if that cannot be right."""
    found = dict[int, int]()
    for request in requests:
        if (count := counts.cached.get(request.request_id)) is None:
            return {}
        size = len(request.prompt_ids)
        if not 0 <= as_count("cached_tokens", count) <= size:
            raise ValueError(
                f"request {request.request_id}: {count} cached tokens of a prompt of {size}"
            )
        found[request.request_id] = count
    return found


def conclude(
    server_counts: ServerCounts,
    requests: Sequence[Request],
    counted: Callable[[], CountedPass | None],
) -> tuple[Verifications, ServersDetails]:
    """What is taken of the answers and of the counters of a pass whose requests have ended.
    `counted` raises ValueError, one sentence, if its counts are not those of the pass."""
    lengths = {request.request_id: len(request.output_ids) - 1 for request in requests}
    program = next((name for name, _ in server_counts.by_request.values()), None)
    problems = list[str]()
    try:
        answers = _checked_answers(server_counts, lengths)
    except ValueError as error:
        problems.append(str(error))
        answers = {}
    total = None
    try:
        found = counted()
        if found is not None:
            total = found.counts
            program = program or found.program
            _check_total(total, answers, sum(lengths.values()))
    except ValueError as error:
        problems.append(f"counters: {error}")
        total = None
    source = {
        (True, True): BOTH,
        (True, False): ANSWERS,
        (False, True): COUNTERS,
    }.get((bool(answers), total is not None))
    taken = Verifications(reported=answers, reported_total=total)
    return taken, ServersDetails(program=program, source=source, missing=[], problems=problems)


def _checked_answers(
    server_counts: ServerCounts, lengths: Mapping[int, int]
) -> dict[int, ReportedCounts]:
    """The counts of each request; empty if no answer has any. Raises ValueError if one cannot be
    right, or lacks what others have."""
    for request_id, problem in sorted(server_counts.problems.items()):
        raise ValueError(f"request {request_id}: {problem}")
    counts = {
        request_id: reported for request_id, (_, reported) in server_counts.by_request.items()
    }
    if not counts:
        return {}
    for request_id, num_tokens in lengths.items():
        if request_id not in counts:
            raise ValueError(f"request {request_id} does not say what was drafted, as others do")
        if found := counts[request_id].find_contradiction(num_tokens):
            raise ValueError(f"request {request_id}: {found}")
    return counts


@dataclass(frozen=True)
class CountedPass:
    """What counters have counted in a pass."""

    program: str
    counts: ReportedCounts


class Decoded(Protocol):
    """A request with its output."""

    output_ids: list[int]


def count_when_ended(
    read: Callable[[], Counters], before: Counters, requests: Sequence[Decoded]
) -> CountedPass:
    """What was counted since a reading of the counters. Raises ValueError as `count_pass` does."""
    return count_pass(before, read_when_ended(read, before, requests), requests)


def read_when_ended(
    read: Callable[[], Counters], before: Counters, requests: Sequence[Decoded]
) -> Counters:
    """The counters as soon as a server has counted all tokens of these requests since a reading, or
    some time after."""
    end_s = time.monotonic() + COUNTING_S
    while True:
        after = read()
        if not is_behind(before, after, requests) or time.monotonic() > end_s:
            return after
        time.sleep(EVERY_S)


def count_pass(before: Counters, after: Counters, requests: Sequence[Decoded]) -> CountedPass:
    """What was counted between two readings around a pass. Raises ValueError, one sentence, if the
    server has restarted, or has generated tokens for other clients too."""
    counted = after.since(before)
    name, form = form_of(after)
    num_tokens = sum(len(request.output_ids) for request in requests)
    generated = counted.count(form.generated)
    if generated != num_tokens:
        reason = (
            "it does not count the tokens of --endpoint"
            if generated is None or generated < num_tokens
            else "it served other clients too"
        )
        raise ValueError(
            f"{generated} generated tokens, but the answers have {num_tokens}; {reason}"
        )
    return CountedPass(name, form.total(counted, num_tokens - len(requests)))


def is_behind(before: Counters, after: Counters, requests: Sequence[Decoded]) -> bool:
    """Whether a server that has answered these requests has not yet counted all of their tokens."""
    counted = [counters.count(form_of(after)[1].generated) or 0 for counters in (before, after)]
    return 0 <= counted[1] - counted[0] < sum(len(request.output_ids) for request in requests)


def form_of(counters: Counters) -> tuple[str, ServerFormat]:
    """The program whose counters these are. Raises ValueError if it is not known."""
    found = [(name, form) for name, form in formats().items() if counters.begins_with(form.prefix)]
    if len(found) != 1:
        prefixes = ", ".join(f"{form.prefix}*" for form in formats().values())
        raise ValueError(f"has no counters of a known server ({prefixes})")
    return found[0]


def _check_total(
    total: ReportedCounts, answers: Mapping[int, ReportedCounts], num_tokens: int
) -> None:
    """Raises ValueError if the counts of a pass contradict themselves or its answers."""
    if found := total.find_contradiction(num_tokens):
        raise ValueError(found)
    for name in SUMS:
        counted = getattr(total, name)
        sent = [getattr(answer, name) for answer in answers.values()]
        if sent and counted is not None and None not in sent and sum(sent) != counted:
            raise ValueError(
                f"{counted} {name}, but the answers have {sum(sent)}, so that they count others too"
            )
