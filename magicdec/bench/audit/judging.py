"""Judges greedy tokens by a server's own forwards that do not speculate: each is the likeliest one,
or as near to it as the server's noise explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from magicdec.bench.audit.asking import AuditedServer, NoScores, ServerAnswer, together
from magicdec.bench.audit.record import AuditFinding, WrongToken
from magicdec.systems.servers.server_format import ScoredToken

SHOWN = 3  # first wrong tokens that are named
OutputScores = dict[int, ScoredToken]
"""What is said at places of an output."""


def gap(scored: ScoredToken) -> float:
    """By how much the likeliest token leads the next one."""
    first, second = sorted(scored.logprobs.values(), reverse=True)[:2]
    return first - second


def best(scored: ScoredToken) -> int:
    return max(scored.logprobs, key=lambda token: scored.logprobs[token])


def margin(scored: ScoredToken, token: int) -> float:
    """By how much a token is less likely than the likeliest one; at least, if it is so unlikely
    that the server does not say it."""
    known = scored.logprobs
    return max(known.values()) - known.get(token, min(known.values()))


@dataclass
class Judge:
    """A server that says how likely tokens of answers are, in one request for each text or, where
    it cannot, or if `by_text` says so, in one for each token."""

    server: AuditedServer
    by_text: bool
    concurrency: int
    most_places: int  # that are judged of an answer, if each is a request
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], ScoredToken] = field(default_factory=dict)

    def judge(self, answers: Sequence[ServerAnswer]) -> list[OutputScores]:
        """What is said at places of each answer, by place. The first token comes from the forward
        of the prompt, and is judged as well."""
        jobs = [lambda answer=answer: self._judge_one(answer) for answer in answers]
        return together(jobs, 1 if self.by_text else self.concurrency)

    def _judge_one(self, answer: ServerAnswer) -> OutputScores:
        places = range(len(answer.output_ids))
        if not self.by_text:
            places = spread(len(places), self.most_places)
        missing = [i for i in places if self._key(answer, i) not in self.known]
        if missing and self.by_text:
            scored = self.server.score_text(answer.text_ids, len(answer.prompt_ids))
            for i in places:
                self.known[self._key(answer, i)] = scored[i]
        elif missing:
            for i in missing:
                ids = answer.text_ids[: len(answer.prompt_ids) + i]
                self.known[self._key(answer, i)] = self.server.next_token(ids)
        return {i: self.known[self._key(answer, i)] for i in places}

    def _key(self, answer: ServerAnswer, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # A whole text's score depends on later tokens nowhere, so that answers may share it.
        return answer.prompt_ids, tuple(answer.output_ids[:place])


def spread(count: int, most: int) -> Any:
    """At most so many of the numbers below `count`, evenly."""
    if count <= most:
        return range(count)
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def can_score_texts(server: AuditedServer, answer: ServerAnswer) -> bool:
    """Whether a server scores a text in one request. Raises NoScores if it says no
    log-probabilities in any way."""
    if server.scores_texts:
        try:
            server.score_text(answer.text_ids, len(answer.prompt_ids))
            return True
        except NoScores:
            pass
    server.next_token(answer.prompt_ids)
    return False


class JudgedCell(NamedTuple):
    """Where answers are from: so many requests at once after so many tokens and, but for plain
    greedy answers, the state of the server."""

    context: int
    concurrency: int
    state: str | None = None


def wrong_tokens(
    cell: JudgedCell,
    answers: Sequence[ServerAnswer],
    scores: Sequence[OutputScores],
    tolerance: float,
) -> list[WrongToken]:
    """The tokens of answers that lost by more than `tolerance`."""
    return [
        WrongToken(
            context=cell.context,
            concurrency=cell.concurrency,
            state=cell.state,
            request=number,
            position=place,
            token=token,
            likelier=best(scored),
            margin=lost,
        )
        for number, (answer, places) in enumerate(zip(answers, scores, strict=True))
        for place, scored in sorted(places.items())
        if (lost := margin(scored, token := answer.output_ids[place])) > tolerance
    ]


def first_wrong(wrong: Sequence[WrongToken]) -> list[WrongToken]:
    """The first wrong token of each answer."""
    firsts = dict[tuple[int, int, int], WrongToken]()
    for token in wrong:
        firsts.setdefault((token.context, token.concurrency, token.request), token)
    return [*firsts.values()]


def finding_of(
    wrong: Sequence[WrongToken], num_answers: int, tolerance: float, name: str = "tokens"
) -> list[AuditFinding]:
    """The finding that tokens are wrong, with the first one of a few answers."""
    if not wrong:
        return []
    firsts = first_wrong(wrong)
    shown = "; ".join(map(str, firsts[:SHOWN]))
    text = (
        f"{len(wrong)} tokens of {len(firsts)} of {num_answers} answers are not what a forward "
        f"without drafts chooses, though noise explains {tolerance:.2g} (natural logarithm): "
        f"{shown}"
    )
    return [AuditFinding(name=name, text=text)]
