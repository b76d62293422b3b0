"""Whether drafts pay: the cells that were measured of several arms of a server, what follows from
them by context and concurrency, and the schedule of draft lengths by batch size. Imports no torch.

The arms are measured one after the other, and plain decoding once more at the end, so that a change
of the machine shows. The range of a ratio is that over all pairs of rounds: it is on one side of 1
if every round of one arm is faster than every round of the other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from magicdec.output.tables import Column, Table
from magicdec.records.fields import RecordPart, recorded

PLAIN = "plain"
DRAFTS = "drafts"
IDLE = "idle"
REJECTED = "rejected"
ARMS = (PLAIN, DRAFTS, IDLE, REJECTED)
PAYS = "pays"
LOSES = "does not pay"
UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class ArmCell(RecordPart):
    """The answers of one arm at one context with so many requests at once, of which each counted
    round asks for all."""

    arm: str = recorded(
        "`plain`: no drafts; `drafts`: with drafts; `idle`: drafts are loaded, and none are used; "
        "`rejected`: all drafts are rejected",
        choices=ARMS,
    )
    context: int = recorded("tokens of the prompts", "tokens")
    concurrency: int = recorded("requests at once")
    num_requests: int = recorded("answers of each round")
    token_s: list[float] = recorded(
        "by counted round, the time of the answers from the first token to the last over their "
        "tokens after the first",
        "s",
    )
    step_s: list[float] | None = recorded(
        "the same over their decode steps", "s", null="if steps are not known"
    )
    tokens_per_step: float | None = recorded(
        "tokens of the answers after the first, over their decode steps",
        "tokens",
        null="if steps are not known",
    )
    output_tokens_per_s: float = recorded(
        "tokens of an answer over the time from its request to its last token, times the requests "
        "at once, of all answers of the counted rounds",
        "tokens/s",
    )
    first_token_s: float | None = recorded(
        "median time to the first token of a prompt of which the server has no KV, where it can be "
        "asked for that",
        "s",
        null="if no answer shows it",
    )
    num_cached: int | None = recorded(
        "prompt tokens of the counted rounds of which the server had the KV",
        "tokens",
        null="if it does not say it",
    )
    draft_length: int | None = recorded(
        "tokens of a draft: as reported, or one less than the longest step",
        "tokens",
        null="if nothing was drafted, or if it is not known",
    )
    dollars_per_million: float | None = recorded(
        "price of a million output tokens, without that of prompts",
        "dollars",
        null="without `price_per_hour`",
    )
    joules_per_token: float | None = recorded(
        "energy that the machine used in the counted rounds, by its own meters, over the tokens of "
        "all answers",
        "J",
        null="if the server is elsewhere, or if the machine has no meter that can be read",
    )


@dataclass(frozen=True)
class Ratio:
    """A ratio of times, and its range over the pairs of rounds."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        value = statistics.fmean(above) / statistics.fmean(below)
        return cls(value, min(above) / max(below), max(above) / min(below))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def is_decided(self) -> bool:
        """Whether it is on one side of 1."""
        return self.low > 1 or self.high < 1

    @property
    def percent(self) -> str:
        """By how much it is more than 1."""
        value, low, high = (100 * (end - 1) for end in (self.value, self.low, self.high))
        return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


@dataclass(frozen=True)
class ComparedCell:
    """The arms at one context and concurrency, `cells` by arm; plain and drafts are among them.
    Those of an arm that was measured twice are one, with the rounds of both."""

    context: int
    concurrency: int
    cells: Mapping[str, ArmCell]

    @property
    def speedup(self) -> Ratio:
        """Of decoding: the time of a token without drafts over that with them."""
        return Ratio.of(self.cells[PLAIN].token_s, self.cells[DRAFTS].token_s)

    @property
    def needed(self) -> Ratio | None:
        """Tokens that a step with drafts has to emit to be worth its time; None if steps are not
        known."""
        steps = self.cells[DRAFTS].step_s
        return None if steps is None else Ratio.of(steps, self.cells[PLAIN].token_s)

    @property
    def idle(self) -> Ratio | None:
        """The time of a step where drafts are loaded and not used over that without; None if it was
        not measured."""
        cell = self.cells.get(IDLE)
        return None if cell is None else Ratio.of(cell.token_s, self.cells[PLAIN].token_s)

    @property
    def rejected(self) -> Ratio | None:
        """The speedup where all drafts are rejected; None if it was not measured."""
        cell = self.cells.get(REJECTED)
        return None if cell is None else Ratio.of(self.cells[PLAIN].token_s, cell.token_s)

    @property
    def is_plausible(self) -> bool:
        """Whether a step with drafts takes as long as one without, or longer, as far as is
        known."""
        return self.needed is None or self.needed.high >= 1

    @property
    def verdict(self) -> str:
        if not self.speedup.is_decided or not self.is_plausible:
            return UNDECIDED
        return PAYS if self.speedup.value > 1 else LOSES


def compared(cells: Sequence[ArmCell]) -> list[ComparedCell]:
    """The cells that were measured both with drafts and without, by context and concurrency."""
    by_place = dict[tuple[int, int], dict[str, ArmCell]]()
    for cell in cells:
        arms = by_place.setdefault((cell.context, cell.concurrency), {})
        first = arms.get(cell.arm)
        both = cell if first is None else replace(first, token_s=[*first.token_s, *cell.token_s])
        arms[cell.arm] = both
    return [
        ComparedCell(*place, arms)
        for place, arms in sorted(by_place.items())
        if {PLAIN, DRAFTS} <= {*arms}
    ]


def sentences(cells: Sequence[ComparedCell]) -> list[str]:
    """For each concurrency from which context on drafts pay."""
    verdicts = dict[int, dict[int, str]]()
    for cell in cells:
        verdicts.setdefault(cell.concurrency, {})[cell.context] = cell.verdict
    return [sentence(number, verdicts[number]) for number in sorted(verdicts)]


def sentence(concurrency: int, verdicts: Mapping[int, str]) -> str:
    """From which context on drafts pay, by the verdict of each context."""
    contexts = sorted(verdicts)
    paying = [context for context in contexts if verdicts[context] == PAYS]
    if {*verdicts.values()} == {UNDECIDED}:
        return f"undecided at concurrency {concurrency}"
    if not paying:
        text = "pays nowhere"
    elif paying == contexts[-len(paying) :]:
        text = f"pays from context {paying[0]} on"
    elif paying == contexts[: len(paying)]:
        text = f"pays up to context {paying[-1]}"
    else:
        text = f"pays at context {' and '.join(map(str, paying))} alone"
    text += f" at concurrency {concurrency}"
    open_ones = [str(context) for context in contexts if verdicts[context] == UNDECIDED]
    return f"{text} (undecided at {', '.join(open_ones)})" if open_ones else text


def schedule_of(cells: Sequence[ComparedCell]) -> dict[str, Any]:
    """How long drafts are by batch size, at the longest context: none where they do not pay for
    certain. The key `num_speculative_tokens_per_batch_size` is as in vLLM's speculative config;
    SGLang reads the whole file (`--speculative-adaptive-config`), of which it takes the keys that
    are numbers, and the one nearest to a batch size. Raises ValueError if it is not known how long
    drafts were."""
    context = max(cell.context for cell in cells)
    lengths = dict[int, int]()
    for cell in cells:
        if cell.context != context:
            continue
        length = cell.cells[DRAFTS].draft_length if cell.verdict == PAYS else 0
        if length is None:
            raise ValueError(
                f"how long drafts are at concurrency {cell.concurrency} is not known; let the "
                "server report it"
            )
        lengths[cell.concurrency] = length
    ranges = ranges_of(lengths)
    schedule: dict[str, Any] = {"context": context}
    schedule |= {"num_speculative_tokens_per_batch_size": ranges}
    for first, last, length in ranges:
        for size in sorted({first, last}):
            schedule[str(size)] = {"candidate_steps": [length]}
    return schedule


def ranges_of(lengths: Mapping[int, int]) -> list[list[int]]:
    """Ranges [first, last, length] of batch sizes from 1 on. Between two sizes that were measured,
    drafts are as long as at both, or as the shorter."""
    sizes = sorted(lengths)
    parts = [[1, sizes[0], lengths[sizes[0]]]]
    for before, size in pairwise(sizes):
        if size > before + 1:
            parts.append([before + 1, size - 1, min(lengths[before], lengths[size])])
        parts.append([size, size, lengths[size]])
    ranges = parts[:1]
    for first, last, length in parts[1:]:
        if length == ranges[-1][2]:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, length])
    return ranges


def arm_tables(cells: Sequence[ArmCell]) -> list[Table]:
    """Where drafts pay, and what was measured of each arm."""
    both = compared(cells)
    found = [_map(both)] if both else []
    return [*found, _arms(cells)] if cells else []


def _map(cells: Sequence[ComparedCell]) -> Table:
    has_idle = any(cell.idle for cell in cells)
    has_rejected = any(cell.rejected for cell in cells)
    columns: list[Column | str] = ["context", "at once", "plain ms/step", "drafts ms/step"]
    columns += ["tokens a step", "needed", "speedup"]
    columns += ["all rejected"] if has_rejected else []
    columns += ["idle tax"] if has_idle else []
    columns.append(Column("verdict", is_text=True))
    rows = list[list[object]]()
    for cell in cells:
        drafts = cell.cells[DRAFTS]
        rate = drafts.tokens_per_step
        row: list[object] = [cell.context, cell.concurrency, _ms(cell.cells[PLAIN].token_s)]
        row += [_ms(drafts.step_s), None if rate is None else f"{rate:.2f}", cell.needed]
        row.append(cell.speedup)
        row += [cell.rejected] if has_rejected else []
        row += [cell.idle and cell.idle.percent] if has_idle else []
        rows.append([*row, cell.verdict])
    return Table(
        columns,
        rows,
        title="Where drafts pay (speedup of decoding, [ranges over pairs of rounds])",
        below=sentences(cells),
    )


def _arms(cells: Sequence[ArmCell]) -> Table:
    has_price = any(cell.dollars_per_million is not None for cell in cells)
    has_energy = any(cell.joules_per_token is not None for cell in cells)
    columns: list[Column | str] = [Column("arm", is_text=True), "context", "at once", "answers"]
    columns += ["ms/token", "tokens/s", "first token ms", "cached"]
    columns += ["$ a million tokens"] if has_price else []
    columns += ["J a token"] if has_energy else []
    rows = list[list[object]]()
    for cell in sorted(cells, key=lambda cell: (cell.context, cell.concurrency)):
        row: list[object] = [cell.arm, cell.context, cell.concurrency, cell.num_requests]
        row += [_ms(cell.token_s), f"{cell.output_tokens_per_s:.1f}"]
        wait_s = cell.first_token_s
        row += [None if wait_s is None else f"{1e3 * wait_s:.1f}", cell.num_cached]
        price = cell.dollars_per_million
        row += [None if price is None else f"{price:.3f}"] if has_price else []
        energy = cell.joules_per_token
        row += [None if energy is None else f"{energy:.3g}"] if has_energy else []
        rows.append(row)
    return Table(columns, rows, title="The arms, one after the other")


def _ms(seconds: Sequence[float] | None) -> str | None:
    return None if seconds is None else f"{1e3 * statistics.fmean(seconds):.2f}"
