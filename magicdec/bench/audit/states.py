"""Whether acceptance and tokens depend on the state of a server: after a cache hit, in later turns
of a conversation, beside requests that are cancelled, beside others, and at the end of the audit.
Each answer is compared with that to the same prompt without any KV of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

from magicdec.bench.audit.asking import ServerAnswer, together
from magicdec.bench.audit.counting import num_steps_of, tokens_per_step
from magicdec.bench.audit.judging import JudgedCell, finding_of, first_wrong, wrong_tokens
from magicdec.bench.audit.measuring import Audit
from magicdec.bench.audit.record import AuditCheck, AuditFinding, StateCell, WrongToken
from magicdec.bench.audit.statistics import chance_of_mean, rejected
from magicdec.records.intervals import FEWEST_PROMPTS, quantile
from magicdec.records.record import Status

ALPHA = 1e-3  # of a loss by chance in any state
LEAST_LOSS = 0.1  # share of the tokens a step that a state may cost by chance
NUM_TURNS = 5
MOST_TALKS = 4  # conversations
NEW_TOKENS = 24  # of the user, in each turn after the first
CANCELLED_AFTER = 4  # tokens
HIT = "after a cache hit"
TURN_WORD = "turn "
TURNS = f"in turns 2 to {NUM_TURNS}"
CANCELLED = "beside a cancelled request"
BESIDE = "beside others"
LATER = "later"
LAST = "at the end"


@dataclass(frozen=True)
class Pairs:
    """Answers in a state, and those to the same prompts without KV of them."""

    state: str
    context: int
    concurrency: int
    answers: list[ServerAnswer]
    cold: list[ServerAnswer]

    @property
    def are_others(self) -> list[bool]:
        """Of each answer whether it has other tokens."""
        pairs = zip(self.answers, self.cold, strict=True)
        return [answer.output_ids != cold.output_ids for answer, cold in pairs]

    @property
    def others(self) -> list[ServerAnswer]:
        """The answers with other tokens."""
        return [*compress(self.answers, self.are_others)]


def check(name: str, audit: Audit) -> AuditCheck:
    groups = pairs_of_all_states(audit)
    findings = compare(audit, groups)
    answers = [answer for pairs in groups for answer in pairs.answers]
    known = tokens_per_step(answers)
    text = f"{len(answers)} answers in {len(groups)} states beside the same prompts without KV"
    if known is None:
        text += "; acceptance is not known"
    is_judged = known is not None or audit.judge is not None
    return AuditCheck.of(
        name,
        findings,
        text,
        Status.VERIFIED if is_judged else Status.UNVERIFIED,
        "a loss of less than a tenth of the tokens a step, or of some prompts alone"
        if known
        else None,
    )


def compare(audit: Audit, groups: Sequence[Pairs]) -> list[AuditFinding]:
    """The findings that states cost tokens or acceptance; their evidence is kept."""
    findings = list[AuditFinding]()
    for pairs in groups:
        wrong = wrong_of(audit, pairs)
        audit.wrong += first_wrong(wrong)
        audit.states.append(cell_of(pairs, len(wrong)))
        audit.others += pairs.answers
        if audit.noise is not None:
            count = len(pairs.answers)
            tolerance = audit.noise.tolerance
            findings += finding_of(wrong, count, tolerance, f"tokens {pairs.state}")
    return findings + losses_of(groups)


def pairs_of_all_states(audit: Audit) -> list[Pairs]:
    groups = list[Pairs]()
    shortest = min(audit.cold)
    for context, cold in audit.cold.items():
        groups.append(after_hits(audit, cold, context))
        if audit.most_at_once > 1:
            groups.append(beside_others(audit, cold, context))
    first = audit.cold[shortest]
    groups.append(again(audit, first, shortest, LATER))
    groups += conversations(audit, first, shortest)
    groups.append(beside_cancelled(audit, first, shortest))
    groups.append(again(audit, first, shortest, LAST))
    return groups


def wrong_of(audit: Audit, pairs: Pairs) -> list[WrongToken]:
    """The wrong tokens of answers that differ from those without KV."""
    if audit.judge is None or audit.noise is None or not pairs.others:
        return []
    judged = iter(audit.judge.judge(pairs.others))
    scores = [next(judged) if is_other else {} for is_other in pairs.are_others]
    cell = JudgedCell(pairs.context, pairs.concurrency, pairs.state)
    return wrong_tokens(cell, pairs.answers, scores, audit.noise.tolerance)


def after_hits(audit: Audit, cold: Sequence[ServerAnswer], context: int) -> Pairs:
    """Each prompt once more after an answer of one token, which leaves its KV."""
    prompts = [answer.prompt_ids for answer in cold]
    audit.server.answers(prompts, 1)
    return Pairs(HIT, context, 1, audit.ask(prompts), [*cold])


def again(audit: Audit, cold: Sequence[ServerAnswer], context: int, state: str) -> Pairs:
    """The prompts once more without any KV of them."""
    answers = audit.ask([answer.prompt_ids for answer in cold], are_new=True)
    return Pairs(state, context, 1, answers, [*cold])


def beside_others(audit: Audit, cold: Sequence[ServerAnswer], context: int) -> Pairs:
    most = audit.most_at_once
    answers = audit.beside.get((context, most))
    if answers is None:
        answers = audit.ask([answer.prompt_ids for answer in cold], most)
    return Pairs(BESIDE, context, most, answers, [*cold])


def beside_cancelled(audit: Audit, cold: Sequence[ServerAnswer], context: int) -> Pairs:
    """Each prompt beside the one before, whose connection is closed after a few tokens."""
    ask = partial(audit.server.answer, max_tokens=audit.plan.gen_len)
    found = list[ServerAnswer]()
    for number, answer in enumerate(cold):
        other = cold[number - 1].prompt_ids
        cancelled = partial(ask, other, cancelled_after=CANCELLED_AFTER)
        found.append(together([partial(ask, answer.prompt_ids), cancelled], 2)[0])
    return Pairs(CANCELLED, context, 2, found, [*cold])


def conversations(audit: Audit, cold: Sequence[ServerAnswer], context: int) -> list[Pairs]:
    """By turn from the second on: prompts that go on from an answer, with new tokens from the
    beginning of another prompt."""
    talks = [*cold[:MOST_TALKS]]
    found = list[Pairs]()
    for turn in range(2, NUM_TURNS + 1):
        prompts = []
        for number, answer in enumerate(talks):
            other = cold[(number + 1) % len(cold)].prompt_ids
            first = NEW_TOKENS * (turn - 1)
            prompts.append([*answer.text_ids, *other[first : first + NEW_TOKENS]])
        talks = audit.ask(prompts)
        fresh = audit.ask(prompts, are_new=True)
        found.append(Pairs(f"{TURN_WORD}{turn}", context, 1, talks, fresh))
    return found


def cell_of(pairs: Pairs, num_wrong: int) -> StateCell:
    cached = [answer.cached for answer in pairs.answers]
    known = [amount for amount in cached if amount is not None]
    differences = differences_of([pairs])
    return StateCell(
        state=pairs.state,
        context=pairs.context,
        concurrency=pairs.concurrency,
        num_requests=len(pairs.answers),
        tokens_per_step=tokens_per_step(pairs.answers),
        cold_tokens_per_step=tokens_per_step(pairs.cold),
        difference=statistics.fmean(differences) if differences else None,
        difference_interval=interval_of(differences) if differences else None,
        num_cached=sum(known) if len(known) == len(cached) else None,
        num_different=len(pairs.others),
        num_wrong=num_wrong,
    )


def differences_of(groups: Sequence[Pairs]) -> list[float]:
    """Of each prompt, the tokens a step in the state less those without KV, on average over its
    answers. Empty if they are not known of one, or if there are too few prompts."""
    by_prompt = dict[tuple[int, ...], list[float]]()
    for pairs in groups:
        for answer, cold in zip(pairs.answers, pairs.cold, strict=True):
            steps = num_steps_of(answer), num_steps_of(cold)
            if not steps[0] or not steps[1]:
                return []
            lengths = len(answer.output_ids) - 1, len(cold.output_ids) - 1
            difference = lengths[0] / steps[0] - lengths[1] / steps[1]
            by_prompt.setdefault(cold.prompt_ids, []).append(difference)
    found = [statistics.fmean(values) for values in by_prompt.values()]
    return found if len(found) >= FEWEST_PROMPTS else []


def interval_of(differences: Sequence[float]) -> list[float]:
    """The 95 % interval of their mean, by Student's t."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = quantile(len(differences) - 1) * error
    mean = statistics.fmean(differences)
    return [mean - half, mean + half]


def losses_of(groups: Sequence[Pairs]) -> list[AuditFinding]:
    """The findings that states cost acceptance. One that is lost later for prompts without KV too
    is lost by the number of requests; one that is lost there at the end, for good."""
    by_state = dict[str, list[Pairs]]()
    for pairs in groups:
        state = TURNS if pairs.state.startswith(TURN_WORD) else pairs.state
        by_state.setdefault(state, []).append(pairs)
    losses = [loss_of(state, pairs) for state, pairs in by_state.items()]
    chances = [1.0 if loss is None else loss.chance for loss in losses]
    found = {
        state: loss.finding
        for state, loss, is_lost in zip(by_state, losses, rejected(chances, ALPHA), strict=True)
        if loss is not None and is_lost
    }
    if LATER in found:
        return [found[LATER]]
    if len(found) > 1 and (last := found.pop(LAST, None)) is not None:
        state, first = next(iter(found.items()))
        found[state] = replace(first, text=f"{first.text}; and for good: at the end {last.text}")
    return list(found.values())


@dataclass(frozen=True)
class Loss:
    """A finding, and the probability of such a one by chance."""

    finding: AuditFinding
    chance: float


def loss_of(state: str, groups: Sequence[Pairs]) -> Loss | None:
    """What a state, in one or several groups of pairs, costs of acceptance; None if it is not
    known. A little is as if by chance."""
    warm = tokens_per_step([answer for pairs in groups for answer in pairs.answers])
    cold = tokens_per_step([answer for pairs in groups for answer in pairs.cold])
    differences = differences_of(groups)
    if warm is None or cold is None or not differences:
        return None
    low, high = interval_of(differences)
    text = (
        f"{warm:.2f} tokens a step, {cold:.2f} without KV of the prompt (difference "
        f"{low:.2f} to {high:.2f})"
    )
    finding = AuditFinding(name=f"acceptance {state}", text=text)
    is_little = warm > (1 - LEAST_LOSS) * cold
    return Loss(finding, 1.0 if is_little else chance_of_mean(differences))
