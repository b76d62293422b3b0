"""The record of `magicdec acceptance`, one for each context and draft, and its tables, from which
docs/record.md is made. Imports no torch.

A draft at a position is judged as in a run. How many of its tokens lead the target's own text is
noted, and none is kept. What drafts of fewer tokens would have done follows from that, because they
are the beginnings of the same chains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from magicdec.names import FULL_KV_POLICY
from magicdec.output.tables import RULE, Column, Shown, Table
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.environment import MemoryRecord
from magicdec.records.fields import Recorded, RecordPart, recorded
from magicdec.records.intervals import Array, interval, with_each_left_out
from magicdec.records.record import MeasuredRecord
from magicdec.records.workload import WorkloadRecord

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_DRAFTS = len(DIGITS) - 1  # of a position, whose number is one digit
DRAFT_COST = 0.1  # of a draft token, in decode steps, by which the best gamma is chosen
FEW_TEXTS = (
    "with fewer than 4 texts; if the number is the largest or smallest possible, or the same for "
    "every text"
)
ONE_GAMMA = "where drafts of fewer tokens would be others, except of the most"
TOKENS = Recorded("", digits=2)
RATE = Recorded("", digits=3)


@dataclass(frozen=True, kw_only=True)
class DepthAcceptance(RecordPart):
    """What drafts of so many tokens, and their last token, are worth."""

    depth: int = recorded("number of draft tokens", "tokens")
    tokens_per_step: float | None = recorded(
        "1 + mean accepted tokens of drafts of `depth` tokens: what a step with `--gamma` of that "
        "number emits on average",
        "tokens",
        null=ONE_GAMMA,
    )
    tokens_per_step_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "tokens", null=f"{FEW_TEXTS}; {ONE_GAMMA}"
    )
    cumulative: float = recorded(
        "share of all positions at which the first `depth` draft tokens were accepted", "0 to 1"
    )
    cumulative_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "0 to 1", null=FEW_TEXTS
    )
    conditional: float | None = recorded(
        "share of the positions at which the draft token of this depth was accepted, of those "
        "that drafted it and accepted all before it",
        "0 to 1",
        null="if there is no such position",
    )
    conditional_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "0 to 1", null=FEW_TEXTS
    )


@dataclass(frozen=True, kw_only=True)
class AcceptanceRecord(MeasuredRecord):
    kind: Literal["acceptance"] = recorded("`acceptance`", default="acceptance")
    status: Literal["ok"] = recorded("`ok`: the target's own text is no claim", default="ok")
    workload: WorkloadRecord = recorded("the texts, and the models")
    seconds: float = recorded("time of all drafts and judgements, without the prefill", "s")
    outputs_sha256: str = recorded(
        "hash over the continuations; drafts of one context with other hashes were judged beside "
        "texts that differ by the rounding of the target's forwards"
    )
    accepted: list[str] = recorded(
        "for each text, a digit for each position of its continuation from the second token on: "
        "the accepted draft tokens, 0 to 9 and a to z"
    )
    drafted: list[str] | None = recorded(
        "for each text likewise the drafted tokens", null="if they are always `decoding.gamma`"
    )
    rows: list[DepthAcceptance] = recorded("by number of draft tokens, from 1 on, as below")
    is_forked: bool = recorded(
        "whether drafts were made in forks of a decoded text, and compared with how it goes on; "
        "else a forward of the target judged each"
    )
    memory: MemoryRecord = recorded(
        "planned of all contexts and drafts of the command, and the peak so far"
    )
    inexact: str | None = recorded(
        "why a run may draft otherwise at a position", null="if it does not"
    )

    @property
    def command(self) -> tuple[object, ...]:
        """Cells of one model and data set stand in one table, also of a command that went on."""
        w = self.workload
        return w.model, w.model_sha256, w.dataset, self.config["model"]["dtype"]

    @property
    def context(self) -> int:
        return int(self.config["workload"]["prefix_len"])

    @property
    def gamma(self) -> int:
        return int(self.config["decoding"]["gamma"])

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.accepted))

    @property
    def num_short(self) -> int:
        """Texts whose continuation ended early."""
        most = self.config["workload"]["gen_len"] - 1
        return sum(len(text) < most for text in self.accepted)

    @property
    def draft(self) -> str:
        """The draft in words, such as `self:int4 streaming_llm 65`."""
        decoding = self.config["decoding"]
        name: str = decoding["drafter"]
        if self.workload.draft is not None:
            name += f":{self.workload.draft.model}"
        if decoding.get("draft_weights"):
            name += f":{decoding['draft_weights']}"
        policy = policy_of(self.config)
        if policy is None:
            return name
        budget = "" if policy == FULL_KV_POLICY else f" {self.config['kv']['budget']}"
        return f"{name} {policy}{budget}"


def best_of(depths: Sequence[DepthAcceptance]) -> DepthAcceptance:
    """The number of draft tokens with most tokens over time, if each costs `DRAFT_COST`."""
    known = [each for each in depths if each.tokens_per_step is not None]
    return max(known, key=lambda each: (each.tokens_per_step or 0) / (1 + DRAFT_COST * each.depth))


def digits_of(counts: Sequence[int]) -> str:
    return "".join(DIGITS[count] for count in counts)


def counts_of(digits: str) -> list[int]:
    return [DIGITS.index(digit) for digit in digits]


def _sums(of_text: Sequence[Any]) -> Array:
    """[1 + texts, ...]: the sums over the positions of all texts, then without each."""
    return with_each_left_out(np.array([each.sum(axis=0) for each in of_text], float))


def _taken(accepted: Sequence[Sequence[int]], gamma: int) -> tuple[Array, Array]:
    """The positions that accepted at least 1 to `gamma` tokens [1 + texts, gamma], and all
    positions [1 + texts, 1]. Texts without a position do not count."""
    texts: list[Any] = [np.array(text)[:, None] for text in accepted if text]
    depths = np.arange(1, gamma + 1)
    return _sums([text >= depths for text in texts]), _sums([text >= 0 for text in texts])


def lengths_by_depth(accepted: Sequence[Sequence[int]], gamma: int) -> Array:
    """[1 + texts, gamma]: the acceptance lengths of drafts of 1 to `gamma` tokens, of all texts,
    then without each, from the counts of each text and position."""
    taken, positions = _taken(accepted, gamma)
    with np.errstate(invalid="ignore"):  # without the only text
        return np.asarray(1 + (taken / positions).cumsum(axis=1))


def depths_of(
    accepted: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    gamma: int,
    is_chain: bool,
) -> list[DepthAcceptance]:
    """The acceptance by depth from the counts of each text and position. `is_chain`: drafts of
    fewer tokens than `gamma` are the beginnings of those that were judged."""
    texts = [np.array(pair) for pair in zip(accepted, drafted, strict=True) if pair[0]]
    depths = np.arange(1, gamma + 1)
    taken, positions = _taken(accepted, gamma)
    judged = _sums([np.minimum(text[0] + 1, text[1])[:, None] >= depths for text in texts])
    with np.errstate(invalid="ignore"):  # without a position
        cumulative = taken / positions
        conditional = taken / judged
    tokens = lengths_by_depth(accepted, gamma)
    found = []
    for place, depth in enumerate(depths.tolist()):
        has_tokens = is_chain or depth == gamma
        rate = float(conditional[0, place])
        found.append(
            DepthAcceptance(
                depth=depth,
                tokens_per_step=float(tokens[0, place]) if has_tokens else None,
                tokens_per_step_interval=interval(tokens[:, place], 1, 1 + depth)
                if has_tokens
                else None,
                cumulative=float(cumulative[0, place]),
                cumulative_interval=interval(cumulative[:, place], 0, 1),
                conditional=None if math.isnan(rate) else rate,
                conditional_interval=interval(conditional[:, place], 0, 1),
            )
        )
    return found


def shown_gammas(gamma: int) -> list[int]:
    """The fixed numbers of draft tokens that a table has: powers of 2, and the most."""
    return sorted({gamma, *(1 << n for n in range(gamma.bit_length()))})


def tables(records: Sequence[AcceptanceRecord]) -> list[Table]:
    """Tokens a step by draft and context, and acceptance by depth."""
    drafts = list(dict.fromkeys(record.draft for record in records))
    ordered = sorted(records, key=lambda r: (drafts.index(r.draft), r.context))
    return [_tokens_table(ordered), _depth_table(ordered)]


def _tokens_table(records: Sequence[AcceptanceRecord]) -> Table:
    gammas = shown_gammas(max(record.gamma for record in records))
    lines: list[tuple[Any, ...]] = []
    for draft, group in groupby(records, lambda record: record.draft):
        lines += [RULE] if lines else []
        for number, record in enumerate(group):
            best = best_of(record.rows)
            by_depth = {each.depth: each for each in record.rows}
            cells = [_tokens(by_depth.get(gamma)) for gamma in gammas]
            lines.append(
                (
                    None if number else draft,
                    record.context,
                    record.num_positions,
                    best.depth,
                    _tokens(best),
                    *cells,
                )
            )
    columns: list[Column | str] = [Column("draft", is_text=True), "context", "positions"]
    columns += ["best gamma", "tokens a step", *(f"gamma {gamma}" for gamma in gammas)]
    first = records[0]
    title = (
        f"{first.workload.model} ({first.config['model']['dtype']}), {first.workload.text}: tokens "
        f"a step at every position of the model's own continuations of "
        f"{first.workload.num_prompts} texts, with 95 % intervals over texts"
    )
    return Table(columns, lines, title=title, below=_remarks(records))


def _tokens(depth: DepthAcceptance | None) -> object:
    if depth is None or depth.tokens_per_step is None:
        return None
    shown = TOKENS.show_between(depth.tokens_per_step, depth.tokens_per_step_interval)
    return Shown(shown, depth.tokens_per_step)


def _remarks(records: Sequence[AcceptanceRecord]) -> list[str]:
    lines = [f"best gamma: most tokens over time if a draft token takes {DRAFT_COST:g} of a step"]
    reasons = {record.inexact: record.draft for record in records if record.inexact}
    for reason in reasons:
        of = dict.fromkeys(record.draft for record in records if record.inexact == reason)
        lines.append(f"{', '.join(of)}: {reason}")
    for context in dict.fromkeys(record.context for record in records):
        of_context = [record for record in records if record.context == context]
        num_short = max(record.num_short for record in of_context)
        if num_short:
            lines.append(f"context {context}: {num_short} continuations end early")
        if len({record.outputs_sha256 for record in of_context}) > 1:
            lines.append(
                f"context {context}: continuations differ between drafts by rounding; positions "
                "are those of each"
            )
    return lines


def _depth_table(records: Sequence[AcceptanceRecord]) -> Table:
    gamma = max(record.gamma for record in records)
    lines: list[tuple[Any, ...]] = []
    for draft, group in groupby(records, lambda record: record.draft):
        lines += [RULE] if lines else []
        name: str | None = draft
        for record in group:
            for kind in ("conditional", "cumulative"):
                cells = [_rate(each, kind) for each in record.rows]
                cells += [None] * (gamma - len(cells))
                context = record.context if kind == "conditional" else None
                lines.append((name, context, kind, *cells))
                name = None
    columns: list[Column | str] = [Column("draft", is_text=True), "context"]
    columns += [Column("acceptance", is_text=True), *(f"{n + 1}" for n in range(gamma))]
    return Table(columns, lines, title="acceptance by depth: of the k-th draft token")


def _rate(depth: DepthAcceptance, kind: str) -> object:
    value = getattr(depth, kind)
    if value is None:
        return None
    return Shown(RATE.show_between(value, getattr(depth, f"{kind}_interval")), value)
