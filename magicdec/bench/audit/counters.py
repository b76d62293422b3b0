"""Whether what a server reports of its drafts is what was seen of it: by request, by its counters,
and by the tokens that come together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from magicdec.bench.audit.asking import ServerAnswer
from magicdec.bench.audit.counting import seen_steps, sum_of, tokens_per_step
from magicdec.bench.audit.measuring import Audit
from magicdec.bench.audit.record import AuditCheck, AuditFinding
from magicdec.records.acceptance import ReportedCounts
from magicdec.records.record import Status
from magicdec.systems.servers.details import count_when_ended

NUM_REPEATS = 6  # of a passage, in texts that drafts follow
NUM_REPEATED = 2  # such texts of each context
FEWEST_STEPS = 4  # of an answer from which the length of drafts is seen
ROUNDING = 0.01  # share of accepted tokens by which sums may be apart; of rates


def check(name: str, audit: Audit) -> AuditCheck:
    """Texts that drafts follow, and answers of a single token, beside all others so far."""
    server = audit.server
    cold = [answer for found in audit.cold.values() for answer in found]
    few = [answer for found in audit.cold.values() for answer in found[:NUM_REPEATED]]
    prompts = [repeated(answer.prompt_ids) for answer in few]
    before = None if server.metrics is None else server.counters()
    forced = audit.ask(prompts)
    short = server.answers(prompts, 1)
    alone = [*forced, *cold]
    findings = faults_of_answers([*audit.answers, *forced, *short], alone)
    audit.others += forced
    total = None
    if before is not None:
        counted = count_when_ended(server.counters, before, [*forced, *short])
        total = counted.counts
        audit.program = counted.program
        findings += faults_of_sums([*forced, *short], total)
    reporting = [answer for answer in alone if answer.counts is not None]
    if not reporting and total is None:
        text = "the server reports no drafts; give --endpoint_metrics for its counters"
        return AuditCheck.of(name, findings, text, Status.UNVERIFIED)
    drafted = sum_of("drafted", reporting) or 0
    if not (drafted or (total is not None and total.has_drafts)):
        text = "nothing was drafted, not even after repeated text"
        return AuditCheck.of(name, findings, text, Status.UNVERIFIED)
    text = f"{len(reporting)} answers report {drafted} draft tokens"
    if total is not None:
        text += f"; its counters {total.drafted} of {len(forced) + len(short)} answers"
    if (rate := tokens_per_step(alone)) is not None:
        text += f"; {rate:.2f} tokens a step"
    bound = "counts that are wrong in every place alike, and as the steps that were seen"
    return AuditCheck.of(name, findings, text, bound=bound)


def repeated(prompt: Sequence[int]) -> list[int]:
    """A passage several times, as long as the prompt, so that drafts are right."""
    size = max(1, len(prompt) // NUM_REPEATS)
    return ([*prompt[:size]] * (NUM_REPEATS + 1))[: len(prompt)]


def faults_of_answers(
    answers: Sequence[ServerAnswer], alone: Sequence[ServerAnswer]
) -> list[AuditFinding]:
    """Answers whose counts contradict themselves, their rates or their tokens and, of those that
    were asked for `alone`, how these came. A busy client or server may send several steps at once,
    so that the latter are a fault only if most answers have it."""
    found = dict[str, list[str]]()
    for answer in answers:
        for name, text in [*_contradictions(answer), *_wrong_rates(answer)]:
            found.setdefault(name, []).append(_of(answer, text))
    findings = [
        AuditFinding(name=name, text=f"{len(texts)} of {len(answers)} answers; {texts[0]}")
        for name, texts in found.items()
    ]
    drafted = full_draft(alone)
    seen = dict[str, list[str]]()
    for answer in alone:
        for name, text in _beside_seen(answer, drafted):
            seen.setdefault(name, []).append(_of(answer, text))
    for name, texts in seen.items():
        if len(texts) > len(alone) / 2:
            text = f"{len(texts)} of {len(alone)} answers; {texts[0]}"
            findings.append(AuditFinding(name=name, text=text))
    return findings


def _of(answer: ServerAnswer, text: str) -> str:
    return f"{len(answer.prompt_ids)} prompt tokens and {len(answer.output_ids)} new ones: {text}"


def full_draft(answers: Sequence[ServerAnswer]) -> int | None:
    """How many tokens a draft has, of servers of which whole drafts were seen to be accepted: in
    half of the steps of an answer."""
    steps = [sizes for answer in answers if len(sizes := seen_steps(answer) or []) >= FEWEST_STEPS]
    most = max((max(sizes) for sizes in steps), default=1)
    is_full = any(2 * sizes.count(most) >= len(sizes) for sizes in steps)
    return most - 1 if is_full and most > 1 else None


def _contradictions(answer: ServerAnswer) -> list[tuple[str, str]]:
    """What contradicts itself in the counts of an answer, or its number of tokens."""
    count = len(answer.output_ids) - 1
    if answer.problem is not None:
        return [("no counts", answer.problem)]
    counts = answer.counts
    if counts is None:
        return []
    verified = counts.verifications
    accepted = counts.accepted
    drafted = counts.drafted
    if accepted is not None and drafted is not None and accepted > drafted:
        return [("rate above 1", f"{accepted} accepted of {drafted} draft tokens")]
    if count == 0 and counts.has_drafts:
        return [("drafts never judged", f"{drafted} draft tokens, though nothing was verified")]
    if (problem := counts.find_contradiction(count)) is not None:
        return [("contradiction", problem)]
    if verified and accepted is not None and drafted is not None:
        past = math.ceil(drafted / verified)  # tokens that the last step accepted past the end
        if verified + accepted > count + past:
            text = f"{verified} verifications and {accepted} accepted tokens, but {count} tokens"
            return [("double counts", text)]
    return []


def _wrong_rates(answer: ServerAnswer) -> list[tuple[str, str]]:
    """What is wrong with the rates of an answer, by its counts."""
    rates = answer.rates
    counts = answer.counts
    if rates is None or counts is None or not counts.verifications:
        return []
    accepted = counts.accepted
    drafted = counts.drafted
    if accepted is None or not drafted:
        return []
    found = list[tuple[str, str]]()
    rate = rates.acceptance_rate
    if rate is not None and abs(rate - accepted / drafted) > ROUNDING:
        name = "rate above 1" if rate > 1 else "acceptance rate"
        text = f"{rate:.2f} reported, {accepted} accepted of {drafted} draft tokens"
        found.append((name, text))
    length = rates.acceptance_length
    if length is not None:
        # The token of the prompt and those accepted past the end are in it or not.
        others = 1 + math.ceil(drafted / counts.verifications)
        apart = abs(length - 1 - accepted / counts.verifications)
        if apart > others / counts.verifications + ROUNDING:
            text = (
                f"{length:.2f} tokens a verification reported, {accepted} accepted in "
                f"{counts.verifications} verifications, each of which emits one more"
            )
            found.append(("acceptance length", text))
    return found


def _beside_seen(answer: ServerAnswer, draft_length: int | None) -> list[tuple[str, str]]:
    """Counts of an answer beside the steps in which its tokens came."""
    sizes = seen_steps(answer)
    counts = answer.counts
    if sizes is None or counts is None or counts.accepted is None:
        return []
    count = len(answer.output_ids) - 1
    seen = count - len(sizes)
    longest = max(max(sizes) - 1, draft_length or 0)
    slack = 1 + longest + ROUNDING * count
    found = list[tuple[str, str]]()
    if not seen - slack <= counts.accepted <= seen + slack:
        text = f"{counts.accepted} accepted tokens reported, {seen} seen in {len(sizes)} steps"
        found.append(("accepted tokens", text))
    most = math.inf if draft_length is None else draft_length * (len(sizes) + 1) + slack
    if counts.drafted is not None and counts.drafted > most:
        text = (
            f"{counts.drafted} draft tokens in {len(sizes)} steps, none of which accepts more than "
            f"{draft_length}, as most do: those behind are never accepted, or were never judged"
        )
        found.append(("useless drafts", text))
    return found


def faults_of_sums(answers: Sequence[ServerAnswer], total: ReportedCounts) -> list[AuditFinding]:
    """A server's counters over these answers alone beside what they report."""
    found = list[AuditFinding]()
    for name in ("drafted", "accepted", "verifications"):
        counted = getattr(total, name)
        # An answer of one token has no drafts to report.
        drafting = [answer for answer in answers if len(answer.output_ids) > 1 or answer.counts]
        reported = [getattr(answer.counts, name, None) for answer in drafting]
        known = [amount for amount in reported if amount is not None]
        if counted is None or len(known) < len(reported):
            continue
        if counted != sum(known):
            text = f"its counters have {counted} {name}, the answers {sum(known)}"
            found.append(AuditFinding(name="counters", text=text))
    return found
