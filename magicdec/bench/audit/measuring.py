"""Audits a server: one check after the other. A check that a server cannot be judged by says so,
and the others go on.

All prompts are new to the server, or asked for without KV of them, the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from magicdec.bench.audit.asking import AuditedServer, NoScores, ServerAnswer
from magicdec.bench.audit.judging import Judge, can_score_texts
from magicdec.bench.audit.noise import Noise, measure_noise
from magicdec.bench.audit.record import (
    AuditCheck,
    GreedyCell,
    SampledPlace,
    StateCell,
    WrongToken,
)
from magicdec.names import AUDIT_CHECKS, load_object
from magicdec.records.record import Status
from magicdec.systems.servers.server_format import AskedSampling

Say = Callable[[str], None]


@dataclass(frozen=True)
class AuditPlan:
    """What is asked for: `prompts` by context, so many tokens after each, so many requests at once,
    which checks, how tokens are sampled at one place after the other, how far from the right
    distribution they may be, and with how many requests at once the server is to run out of
    cache."""

    prompts: dict[int, list[list[int]]]
    gen_len: int
    concurrency: tuple[int, ...]
    checks: tuple[str, ...]
    samplings: tuple[AskedSampling, ...]
    num_places: int
    total_variation: float
    most_judged: int
    preemption_concurrency: int | None


@dataclass
class Audit:
    """An audit, and what it has found so far: the evidence of each check is in a list of its own.
    `cold` has the answers to prompts without any KV of them, by context; `others` are beside others
    or in states, and `beside` has those of the greedy check by context and concurrency."""

    server: AuditedServer
    plain: AuditedServer | None
    plan: AuditPlan
    say: Say
    checks: list[AuditCheck] = field(default_factory=list)
    noise: Noise | None = None
    greedy: list[GreedyCell] = field(default_factory=list)
    wrong: list[WrongToken] = field(default_factory=list)
    sampled: list[SampledPlace] = field(default_factory=list)
    states: list[StateCell] = field(default_factory=list)
    program: str | None = None
    cold: dict[int, list[ServerAnswer]] = field(default_factory=dict)
    others: list[ServerAnswer] = field(default_factory=list)
    beside: dict[tuple[int, int], list[ServerAnswer]] = field(default_factory=dict)
    judge: Judge | None = None
    unjudged: str = ""  # why there is no judge

    def run(self) -> None:
        """All checks. Raises ValueError if the server fails before anything is known."""
        started_s = time.monotonic()
        for context, prompts in self.plan.prompts.items():
            self.say(f"{len(prompts)} answers after {context} tokens, one after the other")
            self.cold[context] = self.ask(prompts, are_new=True)
        self._prepare_judge()
        for name, place in AUDIT_CHECKS.items():
            if name not in self.plan.checks:
                continue
            self.say(f"{name} ({time.monotonic() - started_s:.0f} s so far)")
            check: Callable[[str, Audit], AuditCheck] = load_object(place)
            try:
                found = check(name, self)
            except NoScores as error:
                found = AuditCheck.of(name, [], str(error), Status.UNVERIFIED)
            except ValueError as error:
                found = AuditCheck.of(name, [], str(error), Status.FAILED)
            self.checks.append(found)

    def ask(
        self, prompts: Sequence[Sequence[int]], concurrency: int = 1, *, are_new: bool = False
    ) -> list[ServerAnswer]:
        """The greedy answers of the audited server, of full length."""
        return self.server.answers(prompts, self.plan.gen_len, concurrency, are_new=are_new)

    @property
    def answers(self) -> list[ServerAnswer]:
        """All greedy answers so far."""
        return [*(answer for found in self.cold.values() for answer in found), *self.others]

    @property
    def reporting_program(self) -> str | None:
        """The program in whose form the server reports drafts."""
        return self.program or next((a.program for a in self.answers if a.program), None)

    @property
    def most_at_once(self) -> int:
        return max(self.plan.concurrency)

    def judged(self) -> tuple[Judge, Noise]:
        """Raises NoScores if there is no judge."""
        if self.judge is None or self.noise is None:
            raise NoScores(self.unjudged)
        return self.judge, self.noise

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
