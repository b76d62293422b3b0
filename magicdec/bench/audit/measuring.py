"""Audits a server: whether its speculation is lossless, its counts are right, and its acceptance is
the same in every state. One check after the other; a check that a server cannot be judged by says
so, and the others go on.

All prompts are new to the server, or asked for without KV of them, the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from magicdec.bench.audit.asking import AuditedServer, NoScores, ServerAnswer, together
from magicdec.bench.audit.counting import faults_of_answers, faults_of_sums, tokens_per_step
from magicdec.bench.audit.judging import (
    Judge,
    Noise,
    OutputScores,
    best,
    can_score_texts,
    gap,
    margin,
    measure_noise,
)
from magicdec.bench.audit.record import (
    COUNTERS,
    GREEDY,
    SAMPLING,
    STATE,
    AuditCheck,
    AuditFinding,
    GreedyCell,
    SampledPlace,
    StateCell,
)
from magicdec.bench.audit.sampling import draw, draws_needed, faults_of, open_places
from magicdec.bench.audit.states import LAST, LATER, Pairs, States, cell_of, losses_of
from magicdec.bench.audit.statistics import binomial_tail, most_undetected
from magicdec.records.record import Status
from magicdec.systems.servers.details import count_when_ended
from magicdec.systems.servers.server_format import AskedSampling

Say = Callable[[str], None]
FLIP_ALPHA = 1e-3  # chance of a false alarm about how often near ties are lost
ScoresByAnswer = dict[tuple[tuple[int, ...], tuple[int, ...]], OutputScores]
"""What is said of the output of an answer, by its prompt and output."""
NUM_REPEATS = 6  # of a passage, in texts that drafts follow
SHOWN = 3  # first differences that are named


@dataclass(frozen=True)
class AuditPlan:
    """What is asked for: `prompts` by context, so many tokens after each, so many requests at once,
    which checks, how tokens are sampled at one place after the other, and how far from the right
    distribution they may be."""

    prompts: dict[int, list[list[int]]]
    gen_len: int
    concurrency: tuple[int, ...]
    checks: tuple[str, ...]
    samplings: tuple[AskedSampling, ...]
    num_places: int
    total_variation: float
    most_judged: int


@dataclass
class Audit:
    """An audit, and what it has found so far."""

    server: AuditedServer
    plain: AuditedServer | None
    plan: AuditPlan
    say: Say
    checks: list[AuditCheck] = field(default_factory=list)
    noise: Noise | None = None
    greedy: list[GreedyCell] = field(default_factory=list)
    sampled: list[SampledPlace] = field(default_factory=list)
    states: list[StateCell] = field(default_factory=list)
    program: str | None = None
    cold: dict[int, list[ServerAnswer]] = field(default_factory=dict)
    others: list[ServerAnswer] = field(default_factory=list)  # beside others or in states
    judge: Judge | None = None
    unjudged: str = ""  # why there is no judge

    def run(self) -> None:
        """All checks. Raises ValueError if the server fails before anything is known."""
        started_s = time.monotonic()
        for context, prompts in self.plan.prompts.items():
            self.say(f"{len(prompts)} answers after {context} tokens, one after the other")
            self.cold[context] = self._states().cold(prompts)
        self._prepare_judge()
        known = {
            GREEDY: self._check_greedy,
            COUNTERS: self._check_counters,
            STATE: self._check_states,
            SAMPLING: self._check_sampling,
        }
        for name, check in known.items():
            if name not in self.plan.checks:
                continue
            self.say(f"{name} ({time.monotonic() - started_s:.0f} s so far)")
            try:
                found = check()
            except NoScores as error:
                found = AuditCheck(
                    name=name, status=Status.UNVERIFIED, text=str(error), findings=[]
                )
            except ValueError as error:
                found = AuditCheck(name=name, status=Status.FAILED, text=str(error), findings=[])
            self.checks.append(found)

    @property
    def answers(self) -> list[ServerAnswer]:
        """All greedy answers so far."""
        return [*(answer for found in self.cold.values() for answer in found), *self.others]

    @property
    def reporting_program(self) -> str | None:
        """The program in whose form the server reports drafts."""
        return self.program or next((a.program for a in self.answers if a.program), None)

    def _states(self) -> States:
        return States(self.server, self.plan.gen_len)

    @property
    def most_at_once(self) -> int:
        return max(self.plan.concurrency)

    def _prepare_judge(self) -> None:
        """Find out how the server, or a plain one of the same model, scores texts, and how noisy it
        is."""
        answers = self.answers
        most = self.plan.most_judged
        try:
            own = Judge(
                self.server, can_score_texts(self.server, answers[0]), self.most_at_once, most
            )
            plain = None
            if self.plain is not None:
                by_text = can_score_texts(self.plain, answers[0])
                plain = Judge(self.plain, by_text, self.most_at_once, most)
            self.say("noise of the server's own log-probabilities")
            self.noise = measure_noise(answers, own, plain, self.most_at_once)
            if self.noise.text_is_wrong:
                own = replace(own, by_text=False, known={})
            self.judge = plain or own
        except NoScores as error:
            self.unjudged = str(error)

    def _judged(self) -> tuple[Judge, Noise]:
        """Raises NoScores if there is no judge."""
        if self.judge is None or self.noise is None:
            raise NoScores(self.unjudged)
        return self.judge, self.noise

    def _check_greedy(self) -> AuditCheck:
        judge, noise = self._judged()
        findings = list[AuditFinding]()
        if noise.contradictions:
            text = "; ".join(noise.contradictions)
            findings.append(AuditFinding(name="log-probabilities", text=text))
        wrong = list[WrongToken]()
        places = ScoresByAnswer()
        for context, cold in self.cold.items():
            for concurrency in self.plan.concurrency:
                answers = cold
                if concurrency > 1:
                    jobs = [self._asking(answer.prompt_ids) for answer in cold]
                    answers = together(jobs, concurrency)
                    self.others += answers
                found = judge.judge(answers)
                cell, lost = greedy_cell(context, concurrency, answers, found, noise)
                self.greedy.append(cell)
                wrong += lost
                for answer, here in zip(answers, found, strict=True):
                    places[answer.prompt_ids, tuple(answer.output_ids)] = here
        findings += finding_of(wrong, sum(c.num_requests for c in self.greedy), noise)
        flips = sum(cell.num_flips for cell in self.greedy)
        num_near, num_lost = distinct_ties(places, noise)
        if binomial_tail(num_lost, num_near, 0.5) < FLIP_ALPHA:
            text = f"{num_lost} of {num_near} near ties went against the likeliest token, not half"
            findings.append(AuditFinding(name="flips", text=text))
        tokens = sum(cell.num_tokens for cell in self.greedy)
        text = f"{tokens} tokens of {sum(c.num_requests for c in self.greedy)} answers are judged "
        text += "by the plain server" if judge.server is not self.server else "by the server itself"
        text += f"; {flips} lost to near ties" if flips else ""
        if findings:
            status = Status.MISMATCH
        else:
            status = Status.VERIFIED_WITH_TIES if flips else Status.VERIFIED
        bound = f"a fault of less than {noise.tolerance:.2g} in the logits of a token"
        if any(len(here) < len(key[1]) for key, here in places.items()):
            bound += f", or in fewer than {most_undetected(tokens):.2%} of tokens"
        return AuditCheck(name=GREEDY, status=status, text=text, bound=bound, findings=findings)

    def _asking(self, prompt: Sequence[int]) -> Callable[[], ServerAnswer]:
        return lambda: self.server.answer(prompt, self.plan.gen_len)

    def _check_counters(self) -> AuditCheck:
        """Texts that drafts follow, and answers of a single token, beside all others so far."""
        prompts = [
            repeated(answer.prompt_ids) for found in self.cold.values() for answer in found[:2]
        ]
        before = None if self.server.metrics is None else self.server.counters()
        forced = [self.server.answer(prompt, self.plan.gen_len) for prompt in prompts]
        short = [self.server.answer(prompt, 1) for prompt in prompts]
        alone = [*forced, *(answer for found in self.cold.values() for answer in found)]
        findings = faults_of_answers([*self.answers, *forced, *short], alone)
        self.others += forced
        total = None
        if before is not None:
            counted = count_when_ended(self.server.counters, before, [*forced, *short])
            total = counted.counts
            self.program = counted.program
            findings += faults_of_sums([*forced, *short], total)
        reporting = [answer for answer in alone if answer.counts is not None]
        if not reporting and total is None:
            return AuditCheck(
                name=COUNTERS,
                status=Status.MISMATCH if findings else Status.UNVERIFIED,
                text="the server reports no drafts; give --endpoint_metrics for its counters",
                findings=findings,
            )
        drafted = sum((answer.counts.drafted or 0) for answer in reporting if answer.counts)
        rate = tokens_per_step(alone)
        text = f"{len(reporting)} answers report {drafted} draft tokens"
        if total is not None:
            text += f"; its counters {total.drafted} of {len(forced) + len(short)} answers"
        if rate is not None:
            text += f"; {rate:.2f} tokens a step"
        if not (drafted or (total is not None and total.has_drafts)):
            return AuditCheck(
                name=COUNTERS,
                status=Status.MISMATCH if findings else Status.UNVERIFIED,
                text="nothing was drafted, not even after repeated text",
                findings=findings,
            )
        return AuditCheck(
            name=COUNTERS,
            status=Status.MISMATCH if findings else Status.VERIFIED,
            text=text,
            bound="counts that are wrong in every place alike, and as the steps that were seen",
            findings=findings,
        )

    def _check_states(self) -> AuditCheck:
        states = self._states()
        groups = list[Pairs]()
        shortest = min(self.cold)
        for context, cold in self.cold.items():
            groups.append(states.after_hits(cold, context))
            if self.most_at_once > 1:
                groups.append(states.beside_others(cold, context, self.most_at_once))
        first = self.cold[shortest]
        groups.append(states.again(first, shortest, LATER))
        groups += states.conversations(first, shortest)
        groups.append(states.beside_cancelled(first, shortest))
        groups.append(states.again(first, shortest, LAST))
        findings = list[AuditFinding]()
        for pairs in groups:
            wrong = self._wrong_of(pairs)
            self.states.append(cell_of(pairs, len(wrong)))
            if self.noise is not None:
                found = finding_of(wrong, len(pairs.answers), self.noise)
                findings += [replace(one, name=f"tokens {pairs.state}") for one in found]
        findings += losses_of(groups)
        self.others += [answer for pairs in groups for answer in pairs.answers]
        count = sum(len(pairs.answers) for pairs in groups)
        known = tokens_per_step([answer for pairs in groups for answer in pairs.answers])
        text = f"{count} answers in {len(self.states)} states beside the same prompts without KV"
        if known is None:
            text += "; acceptance is not known"
        is_judged = known is not None or self.judge is not None
        status = Status.VERIFIED if is_judged else Status.UNVERIFIED
        return AuditCheck(
            name=STATE,
            status=Status.MISMATCH if findings else status,
            text=text,
            bound="a loss of less than a tenth of the tokens a step" if known else None,
            findings=findings,
        )

    def _wrong_of(self, pairs: Pairs) -> list[WrongToken]:
        """The wrong tokens of answers that differ from those without KV."""
        if self.judge is None or self.noise is None or not pairs.others:
            return []
        found = self.judge.judge(pairs.others)
        return greedy_cell(pairs.context, pairs.concurrency, pairs.others, found, self.noise)[1]

    def _check_sampling(self) -> AuditCheck:
        judge, noise = self._judged()
        shortest = min(self.cold)
        few = [answer for answer in self.answers if len(answer.prompt_ids) <= 2 * shortest]
        distinct = list(
            {(answer.prompt_ids, *answer.output_ids): answer for answer in few}.values()
        )
        places = open_places(distinct, judge.judge(distinct), self.plan.num_places)
        if not places:
            text = "no place was found at which several tokens can follow a nearly certain one"
            return AuditCheck(name=SAMPLING, status=Status.UNVERIFIED, text=text, findings=[])
        needed = draws_needed(places, self.plan.total_variation)
        self.say(f"{sum(needed)} answers are drawn at {len(places)} places")
        num_drafted: int | None = 0
        for number, (place, count) in enumerate(zip(places, needed, strict=True)):
            sampling = self.plan.samplings[number % len(self.plan.samplings)]
            drawn = draw(self.server, judge, place, count, sampling, self.most_at_once, noise)
            self.sampled += drawn.tested
            here = drawn.num_drafted
            num_drafted = None if here is None or num_drafted is None else num_drafted + here
        findings = faults_of(self.sampled)
        text = f"{sum(needed)} answers at {len(places)} places, {len(self.sampled)} tests"
        text += "" if num_drafted is None else f", {num_drafted} draft tokens judged"
        if num_drafted == 0 and not findings:
            text += ": without drafts they prove nothing"
            return AuditCheck(name=SAMPLING, status=Status.UNVERIFIED, text=text, findings=[])
        return AuditCheck(
            name=SAMPLING,
            status=Status.MISMATCH if findings else Status.VERIFIED,
            text=text,
            bound=f"a distance of less than {self.plan.total_variation:g} (total variation) at the "
            "first token that drafts can be",
            findings=findings,
        )


@dataclass(frozen=True)
class WrongToken:
    """A token that lost to a likelier one by more than noise: `number` of its request, `place` in
    the output."""

    cell: str
    number: int
    place: int
    token: int
    likelier: int
    margin: float

    def __str__(self) -> str:
        return (
            f"{self.cell}, request {self.number}, token {self.place}: {self.token} in place of "
            f"{self.likelier}, which is {self.margin:.2f} likelier"
        )


def greedy_cell(
    context: int,
    concurrency: int,
    answers: Sequence[ServerAnswer],
    found: Sequence[OutputScores],
    noise: Noise,
) -> tuple[GreedyCell, list[WrongToken]]:
    """What was judged of some answers, and their wrong tokens."""
    near = 0
    flips = 0
    wrong = list[WrongToken]()
    largest = 0.0
    name = f"context {context}, {concurrency} at once"
    for number, (answer, places) in enumerate(zip(answers, found, strict=True)):
        for place, scored in sorted(places.items()):
            token = answer.output_ids[place]
            lost = margin(scored, token)
            largest = max(largest, lost)
            near += gap(scored) <= noise.tolerance
            if lost > noise.tolerance:
                wrong.append(WrongToken(name, number, place, token, best(scored), lost))
            elif lost > 0:
                flips += 1
    cell = GreedyCell(
        context=context,
        concurrency=concurrency,
        num_requests=len(answers),
        num_tokens=sum(map(len, found)),
        num_near=near,
        num_flips=flips,
        num_wrong=len(wrong),
        num_wrong_requests=len({token.number for token in wrong}),
        largest_margin=largest,
        tokens_per_step=tokens_per_step(answers),
    )
    return cell, wrong


def distinct_ties(places: ScoresByAnswer, noise: Noise) -> tuple[int, int]:
    """The near ties after distinct texts, and how many of them the likeliest token lost. Answers
    that begin alike, as those to a prompt alone and among others, are no new evidence."""
    lost = dict[tuple[tuple[int, ...], tuple[int, ...]], bool]()
    for (prompt, output), scores in places.items():
        for place, scored in scores.items():
            if gap(scored) <= noise.tolerance:
                text = prompt, output[: place + 1]
                lost[text] = 0 < margin(scored, output[place]) <= noise.tolerance
    return len(lost), sum(lost.values())


def finding_of(wrong: Sequence[WrongToken], num_answers: int, noise: Noise) -> list[AuditFinding]:
    """The finding that tokens are wrong, with the first one of a few answers."""
    if not wrong:
        return []
    firsts = dict[tuple[str, int], WrongToken]()
    for token in wrong:
        firsts.setdefault((token.cell, token.number), token)
    shown = "; ".join(map(str, [*firsts.values()][:SHOWN]))
    text = (
        f"{len(wrong)} tokens of {len(firsts)} of {num_answers} answers are not what a forward "
        f"without drafts chooses, though noise explains {noise.tolerance:.2g} (natural logarithm): "
        f"{shown}"
    )
    return [AuditFinding(name="tokens", text=text)]


def repeated(prompt: Sequence[int]) -> list[int]:
    """A passage several times, as long as the prompt, so that drafts are right."""
    size = max(1, len(prompt) // NUM_REPEATS)
    return ([*prompt[:size]] * (NUM_REPEATS + 1))[: len(prompt)]
