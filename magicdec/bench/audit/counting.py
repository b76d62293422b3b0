"""Whether what a server reports of its drafts is what was seen of it: by request, by its counters,
and by the tokens that come together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from magicdec.bench.audit.asking import ServerAnswer
from magicdec.bench.audit.record import AuditFinding
from magicdec.records.acceptance import ReportedCounts

FEWEST_STEPS = 4  # of an answer from which the length of drafts is seen
ROUNDING = 0.01  # share of accepted tokens by which sums may be apart
TOGETHER_S = 0.003  # between the events of one step, of servers that send one a token
APART = 5  # times as long as that between steps, at least


def num_steps_of(answer: ServerAnswer) -> int | None:
    """The decode steps of an answer after its first token, each of which emits one token more than
    it accepts; as seen, if the server reports no drafts. None if neither is known."""
    count = len(answer.output_ids) - 1
    if answer.counts is not None and answer.counts.accepted is not None:
        # Drafts may be accepted past the end, with the last step. Each verification is a step.
        least = max(1, answer.counts.verifications or 0)
        return max(least, count - answer.counts.accepted) if count else 0
    sizes = seen_steps(answer)
    return None if sizes is None else len(sizes)


def seen_steps(answer: ServerAnswer) -> list[int] | None:
    """The tokens of each decode step as they came: one event a step or, if events have one token
    each, those that came together. None if steps cannot be told apart."""
    first, *later = answer.parts or [(0.0, 0)]
    sizes = [size for _, size in later]
    if max(sizes, default=1) > 1:
        return ([first[1] - 1] if first[1] > 1 else []) + sizes
    gaps = [after[0] - before[0] for before, after in pairwise(answer.parts)]
    short = [gap for gap in gaps if gap <= TOGETHER_S]
    long = [gap for gap in gaps if gap > TOGETHER_S]
    if not short or not long or min(long) < APART * max(short):
        return None
    found = list[int]()
    for gap in gaps:
        if gap > TOGETHER_S or not found:
            found.append(1)
        else:
            found[-1] += 1
    return found


def tokens_per_step(answers: Sequence[ServerAnswer]) -> float | None:
    """Of all answers together; None if it is not known of one of them."""
    steps = [num_steps_of(answer) for answer in answers]
    known = [count for count in steps if count is not None]
    if len(known) < len(steps) or not sum(known):
        return None
    return sum(len(answer.output_ids) - 1 for answer in answers) / sum(known)


def faults_of_answers(
    answers: Sequence[ServerAnswer], alone: Sequence[ServerAnswer]
) -> list[AuditFinding]:
    """Answers whose counts contradict themselves or their tokens and, of those that were asked for
    `alone`, how these came. A busy client or server may send several steps at once, so that the
    latter are a fault only if most answers have it."""
    found = dict[str, list[str]]()
    for answer in answers:
        for name, text in _contradictions(answer):
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
    verified, accepted, drafted = counts.verifications, counts.accepted, counts.drafted
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
