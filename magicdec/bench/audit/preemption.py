"""Whether requests that lose their KV to others, and continue later, have the tokens and the
acceptance of the same prompts alone. So many are asked for at once that the server's cache has no
room for all; its counters say whether it preempted any, but not which.

A preempted request waits in the middle of its answer, so that those with the longest pauses are
taken for the preempted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice, pairwise

from magicdec.bench.audit.asking import ServerAnswer, together
from magicdec.bench.audit.counters import faults_of_answers
from magicdec.bench.audit.measuring import Audit
from magicdec.bench.audit.record import AuditCheck
from magicdec.bench.audit.states import Pairs, compare, differences_of
from magicdec.records.record import Status
from magicdec.systems.servers.details import form_of, read_when_ended

PREEMPTED = "after a preemption"
BESIDE = "beside preempted requests"
ENOUGH = 3  # preempted answers for each prompt, after which no more are asked for
MOST_ROUNDS = 4  # of requests at once


def check(name: str, audit: Audit) -> AuditCheck:
    context = max(audit.cold)
    size = audit.plan.preemption_concurrency
    assert size is not None, "the check is left out without it"
    program, form = form_of(audit.server.counters())
    if form.preemptions is None:
        text = f"the counters of {program} say nothing of preemptions"
        return AuditCheck.of(name, [], text, Status.UNVERIFIED)
    cold = {answer.prompt_ids: answer for answer in audit.cold[context]}
    preempted = Pairs(PREEMPTED, context, size, [], [])
    beside = Pairs(BESIDE, context, size, [], [])
    for number in range(MOST_ROUNDS):
        # Servers preempt the newest requests, so that each prompt comes late in some round.
        first = number * len(cold) // MOST_ROUNDS
        prompts = islice(cycle(cold), first, first + size)
        count, answers = answers_at_once(audit, [*prompts], form.preemptions)
        by_pause = sorted(answers, key=longest_pause, reverse=True)
        for pairs, found in ((preempted, by_pause[:count]), (beside, by_pause[count:])):
            pairs.answers.extend(found)
            pairs.cold.extend(cold[answer.prompt_ids] for answer in found)
        if not count or len(preempted.answers) >= ENOUGH * len(cold):
            break
    groups = [pairs for pairs in (preempted, beside) if pairs.answers]
    findings = compare(audit, groups)
    answers = [answer for pairs in groups for answer in pairs.answers]
    findings += faults_of_answers(answers, [])
    asked = f"{size} requests at once after {context} tokens"
    if not preempted.answers:
        text = (
            f"the server preempted none of {asked}; more of --preemption_concurrency, --prefix_len "
            "or --gen_len need more of its cache"
        )
        return AuditCheck.of(name, findings, text, Status.UNVERIFIED)
    text = f"{len(preempted.answers)} of {len(answers)} answers were preempted, of {asked}"
    bound = "a loss of less than a tenth of the tokens a step, or of some prompts alone"
    is_known = bool(differences_of([preempted]))
    if not is_known:
        bound = "any loss of acceptance, of which too little is known"
    is_judged = is_known or audit.judge is not None
    sound = Status.VERIFIED if is_judged else Status.UNVERIFIED
    return AuditCheck.of(name, findings, text, sound, bound)


def answers_at_once(
    audit: Audit, prompts: Sequence[tuple[int, ...]], counter: str
) -> tuple[int, list[ServerAnswer]]:
    """How many requests were preempted, and the answers to these prompts at once, which share no
    KV. `counter` counts preemptions."""
    server = audit.server
    before = server.counters()
    ask = partial(server.answer, max_tokens=audit.plan.gen_len)
    jobs = [partial(ask, prompt, salt=server.new_salt()) for prompt in prompts]
    answers = together(jobs, len(jobs))
    counted = read_when_ended(server.counters, before, answers).since(before)
    return counted.count(counter) or 0, answers


def longest_pause(answer: ServerAnswer) -> float:
    """The most seconds between two events of an answer."""
    return max((after[0] - before[0] for before, after in pairwise(answer.parts)), default=0.0)
