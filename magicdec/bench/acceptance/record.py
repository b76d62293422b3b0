"""The record of `magicdec acceptance`, one for each context and draft, and its tables, from which
docs/record.md is made. Imports no torch.

A draft at a position is judged as in a run. How many of its tokens lead the target's own text is
noted or, of sampled drafts, with which probability the first of them are accepted, and none is
kept. What drafts of fewer tokens would have done follows from that, because they are the beginnings
of the same chains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from magicdec.config.sections import NGRAM
from magicdec.output.tables import RULE, Column, Shown, Table
from magicdec.records.acceptance import Verification, Verifications, members_of
from magicdec.records.comparison.conditions import flags_of_sampling, policy_of, policy_text
from magicdec.records.drafted import EVERY_POSITION, JudgedRecord
from magicdec.records.environment import MemoryRecord
from magicdec.records.fields import Recorded, RecordPart, recorded
from magicdec.records.intervals import Array, interval, with_each_left_out
from magicdec.records.pass_record import missing_key
from magicdec.records.record import margin_field, seal_field
from magicdec.records.workload import WorkloadRecord

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_DRAFTS = len(DIGITS) - 1  # of a position, whose number is one digit
DRAFT_COST = 0.1  # of a draft token, in decode steps, by which the best gamma is chosen
FEW_TEXTS = (
    "with fewer than 4 texts; if the number is the largest or smallest possible, or the same for "
    "every text"
)
NO_STEPS = "if the continuations are sampled and drafts were not made in forks"
ONE_GAMMA = "where drafts of fewer tokens would be others, except of the most"
WHOLE_LOOKUPS = (
    f"{NGRAM}: lookups are judged whole; a run drafts fewer tokens where one promises little"
)
TOKENS = Recorded("", digits=2)
RATE = Recorded("", digits=2)
KINDS_IN_WORDS = {
    "conditional": "of the k-th draft token, where it is drafted and all before it are accepted",
    "cumulative": "of the first k draft tokens, at all positions, drafted or not",
}
KINDS = tuple(KINDS_IN_WORDS)  # of the acceptance by depth


@dataclass(frozen=True, kw_only=True)
class DepthAcceptance(RecordPart):
    """What drafts of so many tokens, and their last token, are worth."""

    depth: int = recorded("number of draft tokens", "tokens")
    tokens_per_step: float | None = recorded(
        "what a run with `depth` draft tokens emits a step: 1 + mean accepted tokens at the "
        "positions where its steps begin, the first and then always where the last step ended; "
        "its `mean_acceptance_length`, of sampled texts its expectation. Lookups are judged whole, "
        "of which a run drafts fewer tokens where one promises little",
        "tokens",
        null=f"{NO_STEPS}; {ONE_GAMMA}",
    )
    tokens_per_step_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "tokens", null=f"{NO_STEPS}; {FEW_TEXTS}; {ONE_GAMMA}"
    )
    tokens_per_position: float | None = recorded(
        "1 + mean accepted tokens of drafts of `depth` tokens over all positions. It is more than "
        "a step of a run emits, because steps begin more often where drafts are rejected",
        "tokens",
        null=ONE_GAMMA,
    )
    tokens_per_position_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "tokens", null=f"{FEW_TEXTS}; {ONE_GAMMA}"
    )
    cumulative: float = recorded(
        "share of all positions at which the first `depth` draft tokens are accepted; of sampled "
        "drafts the mean probability of it",
        "0 to 1",
    )
    cumulative_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "0 to 1", null=FEW_TEXTS
    )
    conditional: float | None = recorded(
        "share of the positions at which the draft token of this depth is accepted, of those "
        "that drafted it and accepted all before it; of sampled drafts each position counts with "
        "the probability of that",
        "0 to 1",
        null="if there is no such position",
    )
    conditional_interval: list[float] | None = recorded(
        "its 95 % interval over texts", "0 to 1", null=FEW_TEXTS
    )

    @property
    def tokens(self) -> float | None:
        """The tokens of a step, or of a position of sampled texts."""
        return self.tokens_per_position if self.tokens_per_step is None else self.tokens_per_step

    @property
    def tokens_interval(self) -> list[float] | None:
        if self.tokens_per_step is None:
            return self.tokens_per_position_interval
        return self.tokens_per_step_interval


@dataclass(frozen=True, kw_only=True)
class AcceptanceRecord(JudgedRecord):
    kind: Literal["acceptance"] = recorded("`acceptance`", default="acceptance")
    status: Literal["ok"] = recorded("`ok`: the target's own text is no claim", default="ok")
    workload: WorkloadRecord = recorded("the texts, and the models")
    seconds: float = recorded("time of all drafts and judgements, without the prefill", "s")
    outputs_sha256: str = recorded(
        "hash over the continuations; drafts of one context with other hashes were judged beside "
        "texts that differ by the rounding of the target's forwards"
    )
    text_hashes: list[str] | None = recorded(
        "for each text the hash of its continuation, as `output_hash` of a request",
        null="in records of earlier versions",
    )
    accepted: list[str] | None = recorded(
        "for each text, a digit for each position of its continuation from the second token on: "
        "the accepted draft tokens, 0 to 9 and a to z",
        null="if the continuations are sampled",
    )
    acceptance_probabilities: list[list[list[float]]] | None = recorded(
        "for each text and likewise each position, to 4 digits: the probabilities with which "
        "speculative sampling accepts the first 1, 2, ... draft tokens. In forks they are those of "
        "a step that has emitted the text: the products of min(1, q / p) of its own tokens. Else "
        "the k-th is that of accepting the k - 1 tokens that were drafted there, times that of "
        "accepting a next one",
        "0 to 1",
        null="if the continuations are greedy",
    )
    drafted: list[str] | None = recorded(
        "for each text likewise the drafted tokens", null="if they are always `decoding.gamma`"
    )
    rows: list[DepthAcceptance] = recorded("by number of draft tokens, from 1 on, as below")
    rows_by_category: dict[str, list[DepthAcceptance]] | None = recorded(
        "the same of the texts of each category of `workload.categories` that have a position, by "
        "its name",
        null="if no text has a category",
    )
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
    margin: float | None = margin_field()
    seal: str | None = seal_field()

    def __post_init__(self) -> None:
        problem = missing_key(self.config) or self._contradiction()
        assert problem is None, problem

    def _contradiction(self) -> str | None:
        """Why the values of the record exclude each other."""
        if self.accepted is None:
            return None
        count = self.workload.num_prompts
        if {len(self.accepted), len(self.output_hashes)} != {count}:
            return "it has not as many texts as prompts"
        drafted = self.accepted if self.drafted is None else self.drafted
        if [*map(len, drafted)] != self.lengths:
            return "it does not say at every position what was drafted"
        return None

    @property
    def command(self) -> tuple[object, ...]:
        """Cells of one model, data set and way of sampling stand in one table, also of a command
        that went on."""
        w = self.workload
        return w.model, w.model_sha256, w.dataset, self.config["model"]["dtype"], self.sampling

    @property
    def mode(self) -> str:
        return EVERY_POSITION

    @property
    def is_judged(self) -> bool:
        """Of sampled texts nothing was counted that could be compared."""
        return self.accepted is not None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Over all positions; None also of sampled texts."""
        found = self.verifications()
        return found.num_accepted / found.num_drafted if found.num_drafted else None

    @property
    def output_hashes(self) -> list[str]:
        """Without those of the texts that of all stands for each."""
        return self.text_hashes or [self.outputs_sha256] * len(self.lengths)

    def verifications(self) -> Verifications:
        """By text one for each position, also where nothing was drafted, which emits one token.
        None of sampled texts."""
        found = Verifications()
        for text, digits in enumerate(self.accepted or ()):
            counts = counts_of(digits)
            drafted = counts_of(self.drafted[text]) if self.drafted else [self.gamma] * len(counts)
            pairs = zip(drafted, counts, strict=True)
            found.by_request[text] = [Verification(*pair, emitted=1) for pair in pairs]
        return found

    @property
    def context(self) -> int:
        return int(self.config["workload"]["prefix_len"])

    @property
    def gamma(self) -> int:
        return int(self.config["decoding"]["gamma"])

    @property
    def sampling(self) -> str:
        """How the continuations were chosen, such as `--temperature 0.8`; empty if greedily."""
        return " ".join(flags_of_sampling(self.config["sampling"]))

    @property
    def lengths(self) -> list[int]:
        """The number of positions of each text."""
        texts: Sequence[Sized] = self.accepted or self.acceptance_probabilities or ()
        return [len(text) for text in texts]

    @property
    def has_steps(self) -> bool:
        """Whether the steps of a run follow from its positions: those of sampled texts do not from
        drafts that were drawn there."""
        return self.accepted is not None or self.is_forked

    @property
    def cumulative_by_text(self) -> list[Array]:
        """For each text [positions, gamma]: whether the first 1, 2, ... draft tokens are accepted,
        or the probability of it."""
        if self.accepted is not None:
            return [cumulative_of_counts(counts_of(text), self.gamma) for text in self.accepted]
        return [cumulative_of(text, self.gamma) for text in self.acceptance_probabilities or ()]

    @property
    def num_positions(self) -> int:
        return sum(self.lengths)

    @property
    def is_judged_whole(self) -> bool:
        """Whether drafts are lookups, of some of which a run drafts fewer tokens."""
        return bool(self.config["decoding"]["drafter"] == NGRAM)

    @property
    def num_short(self) -> int:
        """Texts whose continuation ended early."""
        most = self.config["workload"]["gen_len"] - 1
        return sum(length < most for length in self.lengths)

    def num_texts_of(self, category: str) -> int:
        """Texts of a category that have a position."""
        categories = self.workload.categories or ()
        pairs = zip(categories, self.lengths, strict=True)
        return sum(own == category and length > 0 for own, length in pairs)

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
        return f"{name} {policy_text(policy, self.config['kv'])}"


def best_of(depths: Sequence[DepthAcceptance]) -> DepthAcceptance:
    """The number of draft tokens with most tokens over time, if each costs `DRAFT_COST`."""
    known = [row for row in depths if row.tokens is not None]
    return max(known, key=lambda row: (row.tokens or 0) / (1 + DRAFT_COST * row.depth))


def digits_of(counts: Sequence[int]) -> str:
    return "".join(DIGITS[count] for count in counts)


def counts_of(digits: str) -> list[int]:
    return [DIGITS.index(digit) for digit in digits]


def cumulative_of_counts(accepted: Sequence[int], gamma: int) -> Array:
    """Whether the first 1, 2, ..., `gamma` drafts were accepted at each position of a text, from
    its counts: [positions, gamma]."""
    counts = np.array(accepted, int).reshape(-1, 1)
    return (counts >= np.arange(1, gamma + 1)).astype(float)


def cumulative_of(probabilities: Sequence[Sequence[float]], gamma: int) -> Array:
    """Probabilities of a text with 0 for what was not drafted, [positions, gamma]."""
    padded = [[*position, *[0.0] * (gamma - len(position))] for position in probabilities]
    return np.array(padded, float).reshape(-1, gamma)


def _sums(by_text: Sequence[Array]) -> Array:
    """[1 + texts, ...]: the sums over the positions of all texts, then without each."""
    return with_each_left_out(np.array([positions.sum(axis=0) for positions in by_text], float))


def _cumulative(cumulative_by_text: Sequence[Array]) -> Array:
    """[1 + texts, gamma]: the share of positions that accepted the first 1 to `gamma` tokens, of
    all texts, then without each. Texts without a position do not count."""
    texts = [text for text in cumulative_by_text if len(text)]
    with np.errstate(invalid="ignore"):  # without the only text
        return np.asarray(_sums(texts) / _sums([np.ones((len(text), 1)) for text in texts]))


def steps_of(cumulative: Array, gamma: int) -> tuple[float, float]:
    """The accepted tokens and the steps of a run with `gamma` draft tokens, as expected, from the
    probabilities [positions, gamma or more] that a step at a position of a text accepts the first
    1, 2, ... of them: a step begins at the first position, the others where the last one ended."""
    accepts = cumulative[:, :gamma]
    count = len(accepts)
    # That a step accepts 0, 1, ..., gamma tokens, and ends as many positions and one further on.
    exactly = -np.diff(np.pad(accepts, ((0, 0), (1, 0)), constant_values=1.0), append=0.0)
    begins = np.zeros(count + gamma + 1)  # that a step begins there
    begins[0] = 1
    for position in range(count):
        begins[position + 1 : position + gamma + 2] += begins[position] * exactly[position]
    return float(begins[:count] @ accepts.sum(axis=1)), float(begins[:count].sum())


def lengths_by_depth(cumulative_by_text: Sequence[Array], gamma: int) -> Array:
    """[1 + texts, gamma]: the acceptance lengths of runs with 1 to `gamma` draft tokens, of all
    texts, then without each, from the cumulative acceptance of each text by position. Texts without
    a position do not count."""
    texts = [text for text in cumulative_by_text if len(text)]
    steps = [[steps_of(text, depth) for depth in range(1, gamma + 1)] for text in texts]
    sums = with_each_left_out(np.array(steps, float))  # [1 + texts, gamma, 2]
    with np.errstate(invalid="ignore"):  # without the only text
        return np.asarray(1 + sums[..., 0] / sums[..., 1])


def depths_of(
    cumulative_by_text: Sequence[Array],
    drafted: Sequence[Sequence[int]],
    gamma: int,
    is_chain: bool,
    has_steps: bool = True,
) -> list[DepthAcceptance]:
    """The acceptance by depth of the texts that have a position. `cumulative_by_text`: for each
    text [positions, gamma], whether the first 1, 2, ... drafts were accepted, or the probability of
    it if they are sampled. `is_chain`: drafts of fewer tokens than `gamma` are the beginnings of
    those that were judged. `has_steps`: whether the steps of a run follow."""
    texts = [pair for pair in zip(cumulative_by_text, drafted, strict=True) if len(pair[0])]
    depths = np.arange(1, gamma + 1)
    taken = _sums([text for text, _ in texts])  # [1 + texts, depths]
    judged = _sums([reached(*text) for text in texts])
    with np.errstate(invalid="ignore"):  # without a position
        conditional = taken / judged
    cumulative = _cumulative(cumulative_by_text)
    by_position = 1 + cumulative.cumsum(axis=1)
    by_step: Array | None = None
    if has_steps:
        by_step = lengths_by_depth(cumulative_by_text, gamma)
    found = []
    for place, depth in enumerate(depths.tolist()):
        has_tokens = is_chain or depth == gamma
        mean, mean_interval = _with_interval(by_position if has_tokens else None, place)
        length, length_interval = _with_interval(by_step if has_tokens else None, place)
        rate = float(conditional[0, place])
        found.append(
            DepthAcceptance(
                depth=depth,
                tokens_per_step=length,
                tokens_per_step_interval=length_interval,
                tokens_per_position=mean,
                tokens_per_position_interval=mean_interval,
                cumulative=float(cumulative[0, place]),
                cumulative_interval=interval(cumulative[:, place], 0, 1),
                # Probabilities depend on what was drafted: by chance their ratio may exceed 1.
                conditional=None if math.isnan(rate) else min(1.0, rate),
                conditional_interval=interval(conditional[:, place], 0, 1),
            )
        )
    return found


def _with_interval(lengths: Array | None, place: int) -> tuple[float | None, list[float] | None]:
    """The length of `place` + 1 draft tokens with its interval over texts, if it is known."""
    if lengths is None:
        return None, None
    return float(lengths[0, place]), interval(lengths[:, place], 1, 2 + place)


def reached(cumulative: Array, drafted: Sequence[int]) -> Array:
    """Whether each draft token is judged, because it was drafted and all before it are accepted, or
    the probability of it: [positions, gamma]."""
    before = np.pad(cumulative, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
    is_drafted = np.array(drafted)[:, None] >= np.arange(1, cumulative.shape[1] + 1)
    return np.where(is_drafted, before, 0.0)


def depths_by_category(
    categories: Sequence[str | None],
    cumulative_by_text: Sequence[Array],
    drafted: Sequence[Sequence[int]],
    gamma: int,
    is_chain: bool,
    has_steps: bool = True,
) -> dict[str, list[DepthAcceptance]]:
    """The acceptance by depth of the texts of each category that have a position."""
    found = {}
    for category, places in members_of(categories).items():
        texts = [cumulative_by_text[place] for place in places]
        if any(map(len, texts)):
            counts = [drafted[place] for place in places]
            found[category] = depths_of(texts, counts, gamma, is_chain, has_steps)
    return found


def shown_gammas(gamma: int) -> list[int]:
    """The fixed numbers of draft tokens that a table has: powers of 2, and the most."""
    return sorted({gamma, *(1 << n for n in range(gamma.bit_length()))})


def tables(records: Sequence[AcceptanceRecord]) -> list[Table]:
    """Tokens a step by draft and context, acceptance by depth and, if there are several, by
    category."""
    drafts = list(dict.fromkeys(record.draft for record in records))
    ordered = sorted(records, key=lambda r: (drafts.index(r.draft), r.context))
    found = [_tokens_table(ordered), *(_depth_table(ordered, kind) for kind in KINDS)]
    has_several = any(len(record.rows_by_category or ()) > 1 for record in records)
    return [*found, _category_table(ordered)] if has_several else found


def _tokens_table(records: Sequence[AcceptanceRecord]) -> Table:
    gammas = shown_gammas(max(record.gamma for record in records))
    lines: list[tuple[Any, ...]] = []
    for draft, group in groupby(records, lambda record: record.draft):
        lines += [RULE] if lines else []
        for number, record in enumerate(group):
            best = best_of(record.rows)
            by_depth = {row.depth: row for row in record.rows}
            cells = [_shown(TOKENS, by_depth.get(gamma)) for gamma in gammas]
            name = None if number else draft
            lines.append((name, record.context, best.depth, _tokens(best), *cells))
    columns: list[Column | str] = [Column("draft", is_text=True), "context"]
    columns += ["best", "tokens a step", *map(str, gammas)]
    first = records[0]
    w = first.workload
    what = "tokens a step of a run"
    if first.sampling:
        what += f", as expected ({first.sampling})"
    title = (
        f"{w.model} ({first.config['model']['dtype']}), {w.text}: {what}, from the acceptance at "
        f"every position of the model's own continuations of {w.num_prompts} texts, "
        f"{max(record.num_positions for record in records)} in all: with the best gamma, in "
        f"brackets 95 % intervals over texts, and with gamma {', '.join(map(str, gammas))}"
    )
    return Table(columns, lines, title=title, below=_remarks(records))


def _shown(about: Recorded, row: DepthAcceptance | None) -> object:
    if row is None or row.tokens is None:
        return None
    return Shown(about.show(row.tokens), row.tokens)


def _tokens(row: DepthAcceptance) -> object:
    if row.tokens is None:
        return None
    return Shown(TOKENS.show_between(row.tokens, row.tokens_interval), row.tokens)


def _remarks(records: Sequence[AcceptanceRecord]) -> list[str]:
    lines = [f"best gamma: most tokens over time if a draft token takes {DRAFT_COST:g} of a step"]
    if any(record.is_judged_whole for record in records):
        lines.append(WHOLE_LOOKUPS)
    drawn = dict.fromkeys(record.draft for record in records if not record.has_steps)
    if drawn:
        lines.append(
            f"{', '.join(drawn)}: tokens a position, which are more than those a step, because "
            "steps of sampled texts follow from drafts in forks alone"
        )
    reasons = {record.inexact: record.draft for record in records if record.inexact}
    for reason in reasons:
        drafts = dict.fromkeys(record.draft for record in records if record.inexact == reason)
        lines.append(f"{', '.join(drafts)}: {reason}")
    for context in dict.fromkeys(record.context for record in records):
        context_records = [record for record in records if record.context == context]
        num_short = max(record.num_short for record in context_records)
        if num_short:
            lines.append(f"context {context}: {num_short} continuations end early")
        if len({record.outputs_sha256 for record in context_records}) > 1:
            lines.append(
                f"context {context}: continuations differ between drafts by rounding; positions "
                "are those of each"
            )
    return lines


def _depth_table(records: Sequence[AcceptanceRecord], kind: str) -> Table:
    gamma = max(record.gamma for record in records)
    lines: list[tuple[Any, ...]] = []
    for draft, group in groupby(records, lambda record: record.draft):
        lines += [RULE] if lines else []
        for number, record in enumerate(group):
            values = [getattr(row, kind) for row in record.rows]
            cells = [None if value is None else Shown(RATE.show(value), value) for value in values]
            cells += [None] * (gamma - len(cells))
            lines.append((None if number else draft, record.context, *cells))
    columns: list[Column | str] = [Column("draft", is_text=True), "context"]
    columns += [f"{number + 1}" for number in range(gamma)]
    below = [] if kind == KINDS[0] else ["their intervals are in the records (`magicdec export`)"]
    return Table(columns, lines, title=f"{kind} acceptance: {KINDS_IN_WORDS[kind]}", below=below)


def _category_table(records: Sequence[AcceptanceRecord]) -> Table:
    """By category what the first draft token and the most of them are worth."""
    lines: list[tuple[Any, ...]] = []
    for record in records:
        by_category = record.rows_by_category
        if not by_category:
            continue
        lines += [RULE] if lines else []
        name: str | None = record.draft
        context: int | None = record.context
        num_texts = {category: record.num_texts_of(category) for category in by_category}
        num_texts["all texts"] = sum(length > 0 for length in record.lengths)
        for category, count in num_texts.items():
            rows = by_category.get(category, record.rows)
            first = Shown(RATE.show(rows[0].cumulative), rows[0].cumulative)
            cells = (first, rows[-1].depth, _tokens(rows[-1]))
            lines.append((name, context, category, count, *cells))
            name = context = None
    columns: list[Column | str] = [Column("draft", is_text=True), "context"]
    columns += [Column("category", is_text=True), "texts", "first", "gamma", "tokens a step"]
    title = (
        "acceptance by category, of the first draft token and with all; in brackets 95 % "
        "intervals over its texts, if at least 4"
    )
    return Table(columns, lines, title=title)
