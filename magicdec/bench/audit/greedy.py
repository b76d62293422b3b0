"""Whether greedy tokens are those of a server that does not speculate, alone and among others."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.bench.audit.asking import ServerAnswer
from magicdec.bench.audit.counting import tokens_per_step
from magicdec.bench.audit.judging import (
    JudgedCell,
    OutputScores,
    finding_of,
    first_wrong,
    gap,
    margin,
    wrong_tokens,
)
from magicdec.bench.audit.measuring import Audit
from magicdec.bench.audit.record import AuditCheck, AuditFinding, GreedyCell, WrongToken
from magicdec.bench.audit.statistics import binomial_tail, most_undetected
from magicdec.records.record import Status

FLIP_ALPHA = 1e-3  # chance of a false alarm about how often near ties are lost
ScoresByAnswer = dict[tuple[tuple[int, ...], tuple[int, ...]], OutputScores]
"""What is said of the output of an answer, by its prompt and output."""


def check(name: str, audit: Audit) -> AuditCheck:
    judge, noise = audit.judged()
    findings = list[AuditFinding]()
    if noise.contradictions:
        text = "; ".join(noise.contradictions)
        findings.append(AuditFinding(name="log-probabilities", text=text))
    wrong = list[WrongToken]()
    places = ScoresByAnswer()
    for context, cold in audit.cold.items():
        for concurrency in audit.plan.concurrency:
            answers = cold
            if concurrency > 1:
                answers = audit.ask([answer.prompt_ids for answer in cold], concurrency)
                audit.others += answers
                audit.beside[context, concurrency] = answers
            scores = judge.judge(answers)
            cell = JudgedCell(context, concurrency)
            lost = wrong_tokens(cell, answers, scores, noise.tolerance)
            wrong += lost
            audit.greedy.append(cell_of(cell, answers, scores, lost, noise.tolerance))
            for answer, here in zip(answers, scores, strict=True):
                places[answer.prompt_ids, tuple(answer.output_ids)] = here
    audit.wrong += first_wrong(wrong)
    num_answers = sum(cell.num_requests for cell in audit.greedy)
    findings += finding_of(wrong, num_answers, noise.tolerance)
    flips = sum(cell.num_flips for cell in audit.greedy)
    num_near, num_lost = distinct_ties(places, noise.tolerance)
    if binomial_tail(num_lost, num_near, 0.5) < FLIP_ALPHA:
        text = f"{num_lost} of {num_near} near ties went against the likeliest token, not half"
        findings.append(AuditFinding(name="flips", text=text))
    tokens = sum(cell.num_tokens for cell in audit.greedy)
    text = f"{tokens} tokens of {num_answers} answers are judged "
    text += "by the plain server" if judge.server is not audit.server else "by the server itself"
    text += f"; {flips} lost to near ties" if flips else ""
    bound = f"a fault of less than {noise.tolerance:.2g} in the logits of a token"
    if any(len(here) < len(key[1]) for key, here in places.items()):
        bound += f", or in fewer than {most_undetected(tokens):.2%} of tokens"
    sound = Status.VERIFIED_WITH_TIES if flips else Status.VERIFIED
    return AuditCheck.of(name, findings, text, sound, bound)


def cell_of(
    cell: JudgedCell,
    answers: Sequence[ServerAnswer],
    scores: Sequence[OutputScores],
    wrong: Sequence[WrongToken],
    tolerance: float,
) -> GreedyCell:
    """What was judged of answers, some of whose tokens are `wrong`."""
    gaps = [gap(scored) for places in scores for scored in places.values()]
    lost = [
        margin(scored, answer.output_ids[place])
        for answer, places in zip(answers, scores, strict=True)
        for place, scored in places.items()
    ]
    return GreedyCell(
        context=cell.context,
        concurrency=cell.concurrency,
        num_requests=len(answers),
        num_tokens=len(gaps),
        num_near=sum(amount <= tolerance for amount in gaps),
        num_flips=sum(0 < amount <= tolerance for amount in lost),
        num_wrong=len(wrong),
        num_wrong_requests=len(first_wrong(wrong)),
        largest_margin=max(lost, default=0.0),
        tokens_per_step=tokens_per_step(answers),
    )


def distinct_ties(places: ScoresByAnswer, tolerance: float) -> tuple[int, int]:
    """The near ties after distinct texts, and how many of them the likeliest token lost. Answers
    that begin alike, as those to a prompt alone and among others, are no new evidence."""
    lost = dict[tuple[tuple[int, ...], tuple[int, ...]], bool]()
    for (prompt, output), scores in places.items():
        for place, scored in scores.items():
            if gap(scored) <= tolerance:
                text = prompt, output[: place + 1]
                lost[text] = 0 < margin(scored, output[place]) <= tolerance
    return len(lost), sum(lost.values())
