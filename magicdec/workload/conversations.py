"""Conversations: questions that a user asks one after the other, each after the answer to the one
before. What a model is given then follows from its own answers, which are not known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from magicdec.workload.chat_template import Frame, Refusal
from magicdec.workload.prompt_sets import ASSISTANT, USER, PromptItem, Roles

Pieces = tuple[tuple[int, ...], ...]
"""Token ids between which answers stand: one piece more than answers."""


@dataclass(frozen=True)
class Conversation:
    """The pieces of the prompt of each turn that is asked. The first turn has one, its prompt; the
    prompt of a later one goes on with the answers to all turns before it. `num_left_out` counts
    further questions, which are not asked."""

    turns: tuple[Pieces, ...]
    num_left_out: int = 0

    def prompt_after(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The prompt of the turn that follows these answers, by the ids of each."""
        pieces = self.turns[len(answers)]
        ids = list(pieces[0])
        for answer, piece in zip(answers, pieces[1:], strict=True):
            ids += [*answer, *piece]
        return tuple(ids)


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
