"""Whether acceptance and tokens depend on the state of a server: after a cache hit, in later turns
of a conversation, beside requests that are cancelled, beside others, and at the end of the audit.
Each answer is compared with that to the same prompt without any KV of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from magicdec.bench.audit.asking import AuditedServer, ServerAnswer, together
from magicdec.bench.audit.counting import num_steps_of, tokens_per_step
from magicdec.bench.audit.record import AuditFinding, StateCell
from magicdec.records.intervals import FEWEST_PROMPTS, quantile

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
    def others(self) -> list[ServerAnswer]:
        """The answers with other tokens."""
        pairs = zip(self.answers, self.cold, strict=True)
        return [answer for answer, cold in pairs if answer.output_ids != cold.output_ids]


class States:
    """Asks a server in its states. `cold` makes the answers to prompts without any KV of them, one
    after the other."""

    def __init__(self, server: AuditedServer, gen_len: int) -> None:
        self.server = server
        self.gen_len = gen_len

    def cold(self, prompts: Sequence[Sequence[int]]) -> list[ServerAnswer]:
        return [self._ask(prompt, salt=self.server.new_salt()) for prompt in prompts]

    def warm(self, prompts: Sequence[Sequence[int]], concurrency: int = 1) -> list[ServerAnswer]:
        """The answers where the server may have KV of the prompts."""
        return together([self._asking(prompt) for prompt in prompts], concurrency)

    def _ask(self, prompt: Sequence[int], salt: str | None = None) -> ServerAnswer:
        return self.server.answer(prompt, self.gen_len, salt=salt)

    def _asking(self, prompt: Sequence[int]) -> Callable[[], ServerAnswer]:
        return lambda: self._ask(prompt)

    def after_hits(self, cold: Sequence[ServerAnswer], context: int) -> Pairs:
        """Each prompt twice; the second answer counts."""
        prompts = [answer.prompt_ids for answer in cold]
        self.warm(prompts)
        return Pairs(HIT, context, 1, self.warm(prompts), [*cold])

    def again(self, cold: Sequence[ServerAnswer], context: int, state: str) -> Pairs:
        """The prompts once more without any KV of them."""
        prompts = [answer.prompt_ids for answer in cold]
        return Pairs(state, context, 1, self.cold(prompts), [*cold])

    def beside_others(self, cold: Sequence[ServerAnswer], context: int, concurrency: int) -> Pairs:
        prompts = [answer.prompt_ids for answer in cold]
        return Pairs(BESIDE, context, concurrency, self.warm(prompts, concurrency), [*cold])

    def beside_cancelled(self, cold: Sequence[ServerAnswer], context: int) -> Pairs:
        """Each prompt beside the one before, whose connection is closed after a few tokens."""
        found = list[ServerAnswer]()
        for number, answer in enumerate(cold):
            other = cold[number - 1].prompt_ids

            def cancel(prompt: tuple[int, ...] = other) -> ServerAnswer:
                after = CANCELLED_AFTER
                return self.server.answer(prompt, self.gen_len, cancelled_after=after)

            found.append(together([self._asking(answer.prompt_ids), cancel], 2)[0])
        return Pairs(CANCELLED, context, 2, found, [*cold])

    def conversations(self, cold: Sequence[ServerAnswer], context: int) -> list[Pairs]:
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
            warm = self.warm(prompts)
            fresh = self.cold(prompts)
            found.append(Pairs(f"{TURN_WORD}{turn}", context, 1, warm, fresh))
            talks = warm
        return found


def cell_of(pairs: Pairs, num_wrong: int) -> StateCell:
    cached = [answer.cached for answer in pairs.answers]
    known = [amount for amount in cached if amount is not None]
    found = difference_of([pairs])
    return StateCell(
        state=pairs.state,
        context=pairs.context,
        concurrency=pairs.concurrency,
        num_requests=len(pairs.answers),
        tokens_per_step=tokens_per_step(pairs.answers),
        cold_tokens_per_step=tokens_per_step(pairs.cold),
        difference=None if found is None else found[0],
        difference_interval=None if found is None else found[1],
        num_cached=sum(known) if len(known) == len(cached) else None,
        num_different=len(pairs.others),
        num_wrong=num_wrong,
    )


def difference_of(groups: Sequence[Pairs]) -> tuple[float, list[float]] | None:
    """The mean difference of tokens a step, and its 95 % interval by Student's t over pairs."""
    differences = list[float]()
    for pairs in groups:
        for answer, cold in zip(pairs.answers, pairs.cold, strict=True):
            steps = num_steps_of(answer), num_steps_of(cold)
            if not steps[0] or not steps[1]:
                return None
            lengths = len(answer.output_ids) - 1, len(cold.output_ids) - 1
            differences.append(lengths[0] / steps[0] - lengths[1] / steps[1])
    if len(differences) < FEWEST_PROMPTS:
        return None
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = quantile(len(differences) - 1) * error
    return mean, [mean - half, mean + half]


def losses_of(groups: Sequence[Pairs]) -> list[AuditFinding]:
    """The findings that states cost acceptance. One that is lost later for prompts without KV too
    is lost by the number of requests; one that is lost there at the end, for good."""
    by_state = dict[str, list[Pairs]]()
    for pairs in groups:
        state = TURNS if pairs.state.startswith(TURN_WORD) else pairs.state
        by_state.setdefault(state, []).append(pairs)
    lost = {state: lost_acceptance(state, found) for state, found in by_state.items()}
    found = {state: finding for state, finding in lost.items() if finding is not None}
    if LATER in found:
        return [found[LATER]]
    if len(found) > 1 and (last := found.pop(LAST, None)) is not None:
        state, first = next(iter(found.items()))
        found[state] = replace(first, text=f"{first.text}; and for good: at the end {last.text}")
    return list(found.values())


def lost_acceptance(state: str, groups: Sequence[Pairs]) -> AuditFinding | None:
    """The finding that a state, in one or several groups of pairs, costs acceptance."""
    warm = tokens_per_step([answer for pairs in groups for answer in pairs.answers])
    cold = tokens_per_step([answer for pairs in groups for answer in pairs.cold])
    found = difference_of(groups)
    if warm is None or cold is None or found is None:
        return None
    _, ends = found
    if ends[1] >= 0 or warm > (1 - LEAST_LOSS) * cold:
        return None
    text = (
        f"{warm:.2f} tokens a step, {cold:.2f} without KV of the prompt (difference "
        f"{ends[0]:.2f} to {ends[1]:.2f})"
    )
    return AuditFinding(name=f"acceptance {state}", text=text)
