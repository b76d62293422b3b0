"""Measures several arms of a server, one after the other, and plain decoding once more at the end:
the time of decoding, apart from that of prompts, by context and by requests at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from magicdec.bench.audit.asking import AuditedServer, NoScores, ServerAnswer
from magicdec.bench.audit.counting import num_steps_of, seen_steps, sum_of
from magicdec.bench.audit.noise import ModelScores
from magicdec.bench.audit.pays import (
    DRAFTS,
    IDLE,
    PLAIN,
    REJECTED,
    UNDECIDED,
    ArmCell,
    compared,
    sentences,
)
from magicdec.bench.audit.record import AuditCheck
from magicdec.bench.audit.starting import Arm, Connect, opened
from magicdec.hardware.energy import EnergyMeter, find_meter
from magicdec.names import PAYS_CHECK
from magicdec.records.acceptance import ReportedCounts
from magicdec.records.record import Status

HOUR_S = 3600
MILLION = 1e6
MEANINGS = {
    PLAIN: "it is to have no drafts",
    IDLE: "it is to load drafts and use none",
    REJECTED: "it is to reject all drafts",
}
Prompts = dict[int, list[list[int]]]


@dataclass(frozen=True)
class ArmsPlan:
    """What is compared: so many requests at once, so many tokens of each answer, at least so many
    prompts in a round, so many counted rounds, the price of the machine, if any, and how long a
    server may take to start."""

    arms: tuple[Arm, ...]
    concurrency: tuple[int, ...]
    gen_len: int
    num_requests: int
    rounds: int
    price_per_hour: float | None
    ready_s: float
    model: str | None

    @property
    def num_prompts(self) -> int:
        """The most prompts of a round."""
        return max(self.num_requests, *self.concurrency)


@dataclass
class Arms:
    """Arms of a server, and what was measured of them so far. `make_prompts` makes prompts by
    context with the tokenizer of a server, which is the first arm."""

    plan: ArmsPlan
    connect: Connect
    make_prompts: Callable[[AuditedServer], Prompts]
    say: Callable[[str], None]
    cells: list[ArmCell] = field(default_factory=list)
    num_requests: int = 0
    model: str | None = None
    program: str | None = None  # in whose form a server reports drafts
    scores: ModelScores | None = None  # of the first arm
    meter: EnergyMeter = field(default_factory=find_meter)
    unknown: str = ""  # why it is not known that all arms have its model
    prompts: Prompts = field(default_factory=dict)

    def run(self) -> AuditCheck:
        """The check of all arms: failed if one of them does not start, or fails."""
        if any(arm.is_here for arm in self.plan.arms):
            self.say(f"energy: {self.meter}")
        again = [arm for arm in self.plan.arms if arm.name == PLAIN]
        try:
            for arm in (*self.plan.arms, *again):
                self._measure(arm)
        except ValueError as error:
            return AuditCheck.of(PAYS_CHECK, [], str(error), Status.FAILED)
        return check_of_arms(self.cells, self.unknown)

    def _measure(self, arm: Arm) -> None:
        self.say(f"{arm.option}: {'starts' if arm.url is None else 'is asked'}")
        with opened(arm, self.connect, self.plan.ready_s) as connection:
            server = AuditedServer(connection, self.plan.model, None)
            self.model = self.model or server.model
            self.prompts = self.prompts or self.make_prompts(server)
            try:
                if arm.name not in [cell.arm for cell in self.cells]:
                    self._compare_model(server)
                for context, prompts in self.prompts.items():
                    for concurrency in self.plan.concurrency:
                        self.say(f"{arm.option}: context {context}, {concurrency} at once")
                        count = max(self.plan.num_requests, concurrency)
                        cell = self._cell(server, arm, context, concurrency, prompts[:count])
                        self.cells.append(cell)
            finally:
                self.num_requests += server.num_requests

    def _compare_model(self, server: AuditedServer) -> None:
        """Raises ValueError if a server has another model than that of the first arm."""
        if self.unknown:
            return
        self.say(f"{server.connection.option}: which model it serves")
        try:
            if self.scores is None:
                prompts = self.prompts[min(self.prompts)]
                self.scores = ModelScores.ask(server, prompts, self.plan.gen_len)
            else:
                self.scores.compare(server)
        except NoScores as error:
            self.unknown = str(error)

    def _cell(
        self,
        server: AuditedServer,
        arm: Arm,
        context: int,
        concurrency: int,
        prompts: Sequence[Sequence[int]],
    ) -> ArmCell:
        """The first round warms up and leaves the KV of prompts, so that answers of the others do
        not wait for prompts. Prompts without KV come last."""
        rounds = list[list[ServerAnswer]]()
        joules = list[float | None]()
        meter = self.meter if arm.is_here else EnergyMeter()
        for _ in range(1 + self.plan.rounds):
            before = meter.read()
            rounds.append(server.answers(prompts, self.plan.gen_len, concurrency))
            joules.append(meter.joules(before, meter.read()))
            check_arm(arm, rounds[-1])
            programs = [answer.program for answer in rounds[-1]]
            self.program = self.program or next(filter(None, programs), None)
        firsts = server.answers(prompts, 1, concurrency, are_new=True)
        return cell_of_rounds(
            arm.name, context, concurrency, rounds[1:], firsts, self.plan.price_per_hour, joules[1:]
        )


def check_arm(arm: Arm, answers: Sequence[ServerAnswer]) -> None:
    """Raises ValueError for an arm that does something else than its name says, or whose answers
    cannot be timed."""
    if not any(decode_s(answer) for answer in answers):
        raise ValueError(
            f"{arm.option}: its answers come in one piece each, so that decoding cannot be timed"
        )
    num_drafted = sum_of("drafted", answers) or 0
    num_accepted = sum_of("accepted", answers) or 0
    is_other = num_accepted if arm.name == REJECTED else num_drafted or num_accepted
    if arm.name in MEANINGS and is_other:
        raise ValueError(
            f"{arm.option} reports {num_drafted} draft tokens and {num_accepted} accepted ones, "
            f"but {MEANINGS[arm.name]}; mend its flags, or name it {DRAFTS}"
        )


def decode_s(answer: ServerAnswer) -> float:
    """The time of an answer from its first token to its last; 0 of one that came in one piece."""
    return answer.parts[-1][0] - answer.parts[0][0] if answer.parts else 0.0


def num_steps_in(answers: Sequence[ServerAnswer]) -> int | None:
    """The decode steps of all answers with drafts after their first tokens; None if they are not
    known. Where a step was seen to be one event, all are."""
    steps = [num_steps_of(answer) for answer in answers]
    are_events = any(size > 1 for answer in answers for _, size in answer.parts[1:])
    total = 0
    for answer, count in zip(answers, steps, strict=True):
        if count is None and not are_events:
            return None
        total += len(answer.parts) - 1 if count is None else count
    return total or None


def draft_length(answers: Sequence[ServerAnswer]) -> int | None:
    """How many tokens the drafts of answers have, by what the server reports of steps or of an
    answer or, if it says no such thing, one less than the longest step; None if it is not known."""
    lengths = list[int]()
    for answer in answers:
        counts = answer.counts or ReportedCounts()
        if counts.steps is not None:
            lengths += [drafted for drafted, _ in counts.steps]
        elif counts.verifications and counts.drafted:
            lengths.append(-(-counts.drafted // counts.verifications))
        else:
            lengths += [size - 1 for size in seen_steps(answer) or ()]
    return max(lengths, default=0) or None


def cell_of_rounds(
    name: str,
    context: int,
    concurrency: int,
    rounds: Sequence[Sequence[ServerAnswer]],
    firsts: Sequence[ServerAnswer],
    price_per_hour: float | None,
    joules: Sequence[float | None] = (),
) -> ArmCell:
    """The cell of the counted rounds of the arm `name`, and of answers of one token, the `firsts`.
    `joules`: the energy of each round, where it is known. Answers that came in one piece are not
    timed. All arms but `drafts` emit a token a step."""
    num_requests = len(rounds[0])
    num_tokens = sum(len(answer.output_ids) for found in rounds for answer in found)
    metered = [amount for amount in joules if amount is not None]
    rounds = [[answer for answer in found if answer.parts] for found in rounds]
    answers = [answer for found in rounds for answer in found]
    seconds = [sum(map(decode_s, found)) for found in rounds]
    tokens = [sum(len(answer.output_ids) - 1 for answer in found) for found in rounds]
    waits = [answer.parts[0][0] for answer in firsts if answer.parts]
    whole_s = sum(answer.parts[-1][0] for answer in answers)
    rate = concurrency * sum(len(answer.output_ids) for answer in answers) / whole_s
    steps: list[int] | None = tokens
    if name == DRAFTS:
        known = [num_steps_in(found) for found in rounds]
        counted = [count for count in known if count is not None]
        steps = counted if len(counted) == len(rounds) else None
    cached = [answer.cached for answer in answers if answer.cached is not None]
    return ArmCell(
        arm=name,
        context=context,
        concurrency=concurrency,
        num_requests=num_requests,
        token_s=[time_s / count for time_s, count in zip(seconds, tokens, strict=True)],
        step_s=None
        if steps is None
        else [time_s / count for time_s, count in zip(seconds, steps, strict=True)],
        tokens_per_step=None if steps is None else sum(tokens) / sum(steps),
        output_tokens_per_s=rate,
        first_token_s=statistics.median(waits) if waits else None,
        num_cached=sum(cached) if len(cached) == len(answers) else None,
        draft_length=draft_length(answers) if name == DRAFTS else None,
        dollars_per_million=None
        if price_per_hour is None
        else price_per_hour / HOUR_S / rate * MILLION,
        joules_per_token=sum(metered) / num_tokens if len(metered) == len(rounds) else None,
    )


def check_of_arms(cells: Sequence[ArmCell], unknown: str = "") -> AuditCheck:
    """What all arms together say; not judged if it is not known how many steps drafts took, if no
    draft was accepted, or if nothing is decided. `unknown`: why it is not known that they have one
    model."""
    both = compared(cells)
    text = "; ".join(sentences(both))
    drafts = [cell.cells[DRAFTS] for cell in both]
    taxes = [cell.idle for cell in both if cell.idle is not None]
    if taxes:
        largest = max(taxes, key=lambda tax: tax.value)
        text += f"; drafts that are not used cost up to {largest.percent} of a step"
        text += "" if largest.is_decided else ", which is undecided"
    for cell in both:
        if not cell.is_plausible:
            text += f"; at context {cell.context} and concurrency {cell.concurrency} a step with "
            text += "drafts takes less time than one without, so that something else differs"
    if unknown:
        text += f"; that all arms serve one model is not known: {unknown}"
    status = Status.VERIFIED
    if any(cell.step_s is None for cell in drafts):
        status = Status.UNVERIFIED
        text += "; the steps of drafts are not known, as the server neither reports nor shows them"
    elif all(cell.tokens_per_step == 1 for cell in drafts):
        status = Status.UNVERIFIED
        text += "; no draft was accepted"
    elif all(cell.verdict == UNDECIDED for cell in both):
        status = Status.UNVERIFIED
        text += "; more --rounds or a quieter machine may decide it"
    bound = "a change of the machine that came and went between the first measurement of plain and "
    return AuditCheck.of(PAYS_CHECK, [], text, status, f"{bound}the second")
