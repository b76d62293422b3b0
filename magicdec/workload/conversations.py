"""Conversations: questions that a user asks one after the other, each after the answer to the one
before. What a model is given then follows from its own answers, which are not known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from magicdec.workload.chat_template import Frame, Refusal
from magicdec.workload.prompt_sets import ASSISTANT, USER, PromptItem, Roles

Pieces = tuple[tuple[int, ...], ...]
"""Token ids between which answers stand: one piece more than answers."""


@dataclass(frozen=True)
class TurnPlan:
    """When a turn of a conversation comes: once the turns at the places `after` have ended, and
    `wait_s` have gone by, but not before `at_s` since the conversation began. `number`, from 1, is
    its own in its `branch`. `output_len` is None where the load says it, and `num_known` the tokens
    of its prompt that a cache without limits has, where a trace says it."""

    number: int
    after: tuple[int, ...] = ()
    wait_s: float = 0.0
    at_s: float = 0.0
    output_len: int | None = None
    branch: int = 0
    num_known: int | None = None


@dataclass(frozen=True)
class Conversation:
    """The pieces of the prompt of each turn that is asked. The first turn has one, its prompt; the
    prompt of a later one goes on with the answers to all turns before it, or is one piece that is
    known. `num_left_out` counts further questions, which are not asked. Without `plans` each turn
    comes when the one before it has ended."""

    turns: tuple[Pieces, ...]
    num_left_out: int = 0
    plans: tuple[TurnPlan, ...] | None = None

    @property
    def planned(self) -> tuple[TurnPlan, ...]:
        if self.plans is not None:
            return self.plans
        places = range(len(self.turns))
        return tuple(TurnPlan(at + 1, (at - 1,) if at else ()) for at in places)

    def known_prompt(self, place: int) -> tuple[int, ...]:
        """The prompt of a turn that needs no answers; empty of one that does."""
        pieces = self.turns[place]
        return pieces[0] if len(pieces) == 1 else ()

    def prompt_after(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The prompt of the turn that follows these answers, by the ids of each."""
        pieces = self.turns[len(answers)]
        ids = list(pieces[0])
        for answer, piece in zip(answers, pieces[1:], strict=True):
            ids += [*answer, *piece]
        return tuple(ids)

    def waiting(self, wait_s: float) -> Conversation:
        """The same, with so much time between an answer and the next question."""
        plans = (replace(plan, wait_s=wait_s if plan.after else 0.0) for plan in self.planned)
        return replace(self, plans=tuple(plans))


def roles_of_turns(item: PromptItem, most: int) -> list[Roles]:
    """The speakers of the messages before each answer, of at most so many turns."""
    num_later = min(most - 1, len(item.later))
    return [item.roles + (ASSISTANT, USER) * count for count in range(num_later + 1)]


def conversation_of(
    item: PromptItem,
    first: tuple[int, ...],
    texts: Sequence[Sequence[int]],
    later: Sequence[Sequence[int]],
    frames: Mapping[Roles, Frame | Refusal] | None,
    most: int,
    prefix_len: int,
    answer_len: int,
) -> Conversation:
    """The turns of an item, at most `most`, whose prompts are no longer than `prefix_len` after
    answers of `answer_len` tokens; no turn is asked without the one before it.

    `first` is the prompt of the first turn, `texts` and `later` have the ids of the item's messages
    and of its further questions. With `frames` a chat template places them, and a turn that it
    refuses is not asked; without, `later` are what stands between two answers.
    """
    turns: list[Pieces] = [(first,)]
    for count, roles in enumerate(roles_of_turns(item, most)[1:], 1):
        if frames is None:
            pieces: Pieces | None = (first, *map(tuple, later[:count]))
        else:
            pieces = _placed(frames[roles], [*texts, *_after_answers(later[:count])])
        if pieces is None or sum(map(len, pieces)) + count * answer_len > prefix_len:
            break
        turns.append(pieces)
    return Conversation(tuple(turns), len(item.later) + 1 - len(turns))


def _after_answers(questions: Sequence[Sequence[int]]) -> list[Sequence[int] | None]:
    """The messages of an answer, which is not known, and of a question, for each question."""
    return [place for question in questions for place in (None, question)]


def _placed(frame: Frame | Refusal, texts: Sequence[Sequence[int] | None]) -> Pieces | None:
    """The pieces of a prompt; None if the template makes none, or has answers in another order."""
    if isinstance(frame, Refusal):
        return None
    answers = [number for number in frame.order if texts[number] is None]
    return frame.pieces(texts) if answers == sorted(answers) else None
