"""Whether tokens that a server samples with drafts follow its own distribution: at chosen places
many draws of the next tokens, tested by chi-squared.

The first token of an answer comes from the forward of the prompt and proves nothing. So the text of
a place ends before a token that is nearly certain, and draws that begin with it are tested at the
tokens after it, which drafts can be. The text begins with its own end and one of these tokens, so
that lookups have something to draft. What looks wrong is drawn again, with new seeds, and is wrong
if it is so again: a sound server is drawn from half as often as by one test of that power.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from magicdec.bench.audit.asking import AuditedServer, ServerAnswer, together
from magicdec.bench.audit.counting import sum_of
from magicdec.bench.audit.judging import Judge
from magicdec.bench.audit.measuring import Audit, AuditPlan
from magicdec.bench.audit.noise import Noise
from magicdec.bench.audit.record import AuditCheck, AuditFinding, SampledPlace
from magicdec.bench.audit.statistics import compare_counts, num_draws, rejected
from magicdec.records.record import Status
from magicdec.systems.servers.server_format import AskedSampling, ScoredToken

ALPHA = 1e-3  # of all tests together
POWER = 0.9
SUSPICION = 0.05  # p-value at which a place is drawn from again
CELLS = 10  # that a place usually has, for how many draws are needed
LEAST_DRAWS = 100  # that a test is worth
ENOUGH_DRAWS = 120  # of which hardly ever fewer than LEAST_DRAWS begin as they are to
FORCED = 0.6  # least probability of the token before a place
LEAST_OPEN = 0.15  # to MOST_OPEN: probability of the likeliest token at a place
MOST_OPEN = 0.75
NUM_DEPTHS = 3  # tokens after the first that are tested
LOOKED_UP = (
    12  # tokens of its end with which a text begins, as llama.cpp's lookups match by default
)
MOST_TRIED = 12  # open places that are asked for with other texts before them
LEAST_DRAFTED = 0.25  # share of draws in which drafts were judged, below which they prove nothing
TAIL = -1  # the cell of tokens that are not told apart
LEAST_SLACK = 0.01  # of sums of probabilities at the edge of `top_p`
NUM_ERRORS = 3  # relative errors of a probability that are slack there
MOST_IMPOSSIBLE = 0.002  # share of draws that an edge elsewhere may explain
FirstTokens = tuple[int, ...]
"""The tokens of answers before one that is tested."""


@dataclass(frozen=True)
class OpenPlace:
    """A text and the token that nearly always follows it, after which several can. `likely` are the
    two likeliest of these."""

    ids: tuple[int, ...]
    first: int
    chance: float  # of `first`
    likely: tuple[int, int]

    def looked_up(self, draft: int) -> OpenPlace:
        """The same with a beginning from which lookups draft this token."""
        return replace(self, ids=(*self.ids[-LOOKED_UP:], self.first, draft, *self.ids))


@dataclass(frozen=True)
class Expected:
    """Probabilities of cells, together 1. Draws of the tokens at the `edge` of `top_k` or `top_p`
    are left out; all others are impossible if the cells are all that there can be (`is_closed`),
    and left out too if not."""

    cells: dict[int, float]
    edge: frozenset[int] = frozenset()
    is_closed: bool = False


def check(name: str, audit: Audit) -> AuditCheck:
    judge, noise = audit.judged()
    plan = audit.plan
    places = find_places(audit, judge, noise)
    if not places:
        text = "no place was found at which several tokens can follow a nearly certain one"
        return AuditCheck.of(name, [], text, Status.UNVERIFIED)
    needed = draws_needed(places, plan.total_variation)
    first, again = (sum(amounts) for amounts in zip(*needed, strict=True))
    audit.say(
        f"{first} answers are drawn at {len(places)} places, and {again} where they look wrong"
    )
    drawn = list[DrawnPlace]()
    for number, (place, counts) in enumerate(zip(places, needed, strict=True)):
        sampling = sampling_at(number, plan)
        drawn.append(draw(audit.server, judge, place, counts, sampling, audit.most_at_once, noise))
        audit.sampled += drawn[-1].tested
    findings = faults_of(audit.sampled)
    answers = [answer for found in drawn for answer in found.answers]
    num_drafted = sum_of("drafted", answers)
    text = f"{len(answers)} answers at {len(places)} places, {len(audit.sampled)} tests"
    distance = plan.total_variation
    if num_drafted is not None:
        share = share_drafted(places, drawn)
        text += f", drafts judged in {share:.0%} of draws"
        if share < LEAST_DRAFTED and not findings:
            return AuditCheck.of(name, [], f"{text}: they prove nothing", Status.UNVERIFIED)
        distance /= max(share, LEAST_DRAFTED)
    if not findings and all(found.depth == 1 for found in audit.sampled):
        return AuditCheck.of(name, [], text, Status.UNVERIFIED)
    bound = f"a distance of less than {distance:.2g} (total variation) at the first token that "
    return AuditCheck.of(name, findings, text, bound=f"{bound}drafts can be")


def share_drafted(places: Sequence[OpenPlace], drawn: Sequence[DrawnPlace]) -> float:
    """The share of draws that begin as they are to in which drafts were judged: a fault of these
    changes the distribution of all by so much less."""
    tested = [
        answer
        for place, found in zip(places, drawn, strict=True)
        for answer in found.answers
        if answer.output_ids[0] == place.first
    ]
    drafting = [answer for answer in tested if answer.counts and answer.counts.drafted]
    return len(drafting) / max(1, len(tested))


def sampling_at(number: int, plan: AuditPlan) -> AskedSampling:
    return plan.samplings[number % len(plan.samplings)]


def find_places(audit: Audit, judge: Judge, noise: Noise) -> list[OpenPlace]:
    """The places that are most open, of answers after the shortest context, and then of those in
    other states; first such as lookups draft at."""
    shortest = min(audit.cold)
    few = [answer for answer in audit.others if len(answer.prompt_ids) <= 2 * shortest]
    found = list[OpenPlace]()
    for answers in (audit.cold[shortest], few):
        distinct = [*{(one.prompt_ids, *one.output_ids): one for one in answers}.values()]
        places = open_places(distinct, judge.judge(distinct))[:MOST_TRIED]
        drafted = [place.looked_up(place.likely[rank]) for rank in (0, 1) for place in places]
        for place in [*drafted, *places]:
            if len(found) == audit.plan.num_places:
                return found
            sampling = sampling_at(len(found), audit.plan)
            if (judged := judged_place(judge.server, place, sampling, noise)) is not None:
                found.append(judged)
    return found


def open_places(
    answers: Sequence[ServerAnswer], scored: Sequence[dict[int, ScoredToken]]
) -> list[OpenPlace]:
    """Where greedy answers are open by what is said of their tokens, from the most open place on.
    Of the token before it may be known nothing."""
    found = list[tuple[float, OpenPlace]]()
    for answer, places in zip(answers, scored, strict=True):
        for i, here in places.items():
            if i == 0 or not is_open(here):
                continue
            first = answer.output_ids[i - 1]
            forced = chance_of(first, places[i - 1]) if i - 1 in places else FORCED
            if forced < FORCED:
                continue
            likely = [
                token for token, _ in sorted(here.logprobs.items(), key=lambda pair: -pair[1])
            ]
            ids = tuple(answer.text_ids[: len(answer.prompt_ids) + i - 1])
            place = OpenPlace(ids, first, forced, (likely[0], likely[1]))
            found.append((forced * (1 - abs(chance_of(likely[0], here) - 0.4)), place))
    found.sort(key=lambda option: -option[0])
    return [place for _, place in found]


def judged_place(
    server: AuditedServer, place: OpenPlace, sampling: AskedSampling, noise: Noise
) -> OpenPlace | None:
    """A place as the server sees it; None if several tokens are not likely after one that is nearly
    certain, or if their distribution does not follow."""
    chance = chance_of(place.first, server.next_token(place.ids))
    if chance < FORCED:
        return None
    here = server.next_token([*place.ids, place.first])
    if not is_open(here) or expected_of(here, sampling, noise) is None:
        return None
    return replace(place, chance=chance)


def chance_of(token: int, scored: ScoredToken) -> float:
    return math.exp(scored.logprobs.get(token, -math.inf))


def is_open(scored: ScoredToken) -> bool:
    """Whether several tokens are likely."""
    return LEAST_OPEN <= math.exp(max(scored.logprobs.values())) <= MOST_OPEN


def draws_needed(places: Sequence[OpenPlace], total_variation: float) -> list[tuple[int, int]]:
    """For each place how many answers are drawn, and how many if these look wrong, so that a
    distribution so far from the right one looks wrong, and is found by the others."""
    alpha = ALPHA / max(1, NUM_DEPTHS * len(places))
    power = math.sqrt(POWER)
    first = max(ENOUGH_DRAWS, num_draws(CELLS, total_variation, SUSPICION, power))
    again = num_draws(CELLS, total_variation, alpha / SUSPICION, power)
    return [(math.ceil(first / place.chance), math.ceil(again / place.chance)) for place in places]


def expected_of(scored: ScoredToken, sampling: AskedSampling, noise: Noise) -> Expected | None:
    """The distribution of a token at these settings, from log-probabilities before them. At another
    temperature than 1 it is that among the tokens that the server says, because of others the
    probability does not follow. None if more tokens are in `top_p` than it says."""
    likely = sorted(scored.logprobs.items(), key=lambda item: -item[1])
    weights = {token: math.exp(value / sampling.temperature) for token, value in likely}
    if sampling.top_k is None and sampling.top_p is None:
        if sampling.temperature == 1:
            return Expected(weights | {TAIL: max(0.0, 1 - sum(weights.values()))}, is_closed=True)
        return Expected(_normalised(weights))
    if sampling.top_k is not None:
        edge = _edge_of_top_k(likely, sampling.top_k, noise.tolerance)
        kept = likely[: sampling.top_k]
    else:
        assert sampling.top_p is not None and sampling.temperature == 1, "checked with the flags"
        before = [0.0, *accumulate(weights.values())]
        if before[-1] < sampling.top_p:
            return None
        slack = max(LEAST_SLACK, NUM_ERRORS * noise.relative)
        pairs = list(zip(likely, before[:-1], strict=True))
        edge = {token for (token, _), sum_ in pairs if abs(sum_ - sampling.top_p) <= slack}
        kept = [pair for pair, sum_ in pairs if sum_ < sampling.top_p]
    cells = {token: weights[token] for token, _ in kept if token not in edge}
    return Expected(_normalised(cells), frozenset(edge), is_closed=True)


def _edge_of_top_k(likely: Sequence[tuple[int, float]], top_k: int, tolerance: float) -> set[int]:
    """The tokens that noise may bring into the likeliest ones, and those that may leave them."""
    if top_k >= len(likely):
        return set()
    last = likely[top_k - 1][1]
    next_one = likely[top_k][1]
    coming = {token for token, value in likely[top_k:] if last - value <= tolerance}
    leaving = {token for token, value in likely[:top_k] if value - next_one <= tolerance}
    return coming | leaving


def _normalised(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token: value / total for token, value in weights.items()}


@dataclass(frozen=True)
class DrawnPlace:
    """The answers that were drawn at a place, and what was found at each depth."""

    answers: list[ServerAnswer]
    tested: list[SampledPlace]


def draw(
    server: AuditedServer,
    judge: Judge,
    place: OpenPlace,
    counts: tuple[int, int],
    sampling: AskedSampling,
    concurrency: int,
    noise: Noise,
) -> DrawnPlace:
    """Draw answers at a place and test them, at each depth those that begin alike; and again if a
    test looks wrong."""

    def answers_of(seeds: range) -> list[ServerAnswer]:
        settings = [replace(sampling, seed=seed) for seed in seeds]
        jobs = [partial(server.answer, place.ids, 1 + NUM_DEPTHS, setting) for setting in settings]
        return together(jobs, concurrency)

    first, again = counts
    answers = answers_of(range(1, 1 + first))
    expected = dict[FirstTokens, Expected]()
    for beginning in likely_beginnings(place, answers):
        found = expected_of(judge.server.next_token([*place.ids, *beginning]), sampling, noise)
        if found is not None:
            expected[beginning] = found
    tested = tests_of(place, answers, expected, noise)
    if all(found.p_value > SUSPICION for found in tested.values()):
        return DrawnPlace(answers, [*tested.values()])
    more = answers_of(range(1 + first, 1 + first + again))
    confirmed = tests_of(place, more, expected, noise)
    results = [combined(found, confirmed.get(beginning)) for beginning, found in tested.items()]
    return DrawnPlace([*answers, *more], results)


def combined(first: SampledPlace, again: SampledPlace | None) -> SampledPlace:
    """What two tests of one place say, of which the second counts only if the first looked wrong.
    The p-value is one: right draws look wrong with the probability `SUSPICION`, and then their
    second p-value is below x with the probability x."""
    if first.p_value > SUSPICION:
        return first
    if again is None:
        return replace(first, p_value=SUSPICION)
    return replace(again, p_value=SUSPICION * again.p_value)


def likely_beginnings(place: OpenPlace, answers: Sequence[ServerAnswer]) -> list[FirstTokens]:
    """By depth the tokens with which answers usually begin, as far as enough of them do. The first
    one has none before it: that it is right proves nothing, but some servers draft it, too."""
    beginnings: list[FirstTokens] = [(), (place.first,)]
    while len(beginnings) <= 1 + NUM_DEPTHS:
        drawn = tokens_after(beginnings[-1], answers)
        if len(drawn) < LEAST_DRAWS:
            return beginnings[:-1]
        beginnings.append((*beginnings[-1], Counter(drawn).most_common(1)[0][0]))
    return beginnings[:-1]


def tokens_after(beginning: FirstTokens, answers: Sequence[ServerAnswer]) -> list[int]:
    """The next tokens of the answers that begin so."""
    size = len(beginning)
    return [a.output_ids[size] for a in answers if tuple(a.output_ids[:size]) == beginning]


def tests_of(
    place: OpenPlace,
    answers: Sequence[ServerAnswer],
    expected: Mapping[FirstTokens, Expected],
    noise: Noise,
) -> dict[FirstTokens, SampledPlace]:
    """The tests of the tokens after each beginning, without those that have no two cells."""
    tested = dict[FirstTokens, SampledPlace]()
    for beginning, right in expected.items():
        found = compare_draws(tokens_after(beginning, answers), right, noise.relative)
        if found is not None:
            context = len(place.ids) + len(beginning)
            tested[beginning] = replace(found, context=context, depth=len(beginning) + 1)
    return tested


def compare_draws(drawn: Sequence[int], expected: Expected, error: float) -> SampledPlace | None:
    """The test of drawn tokens; None if they cannot be told apart."""
    counts = Counter(token if token in expected.cells else TAIL for token in drawn)
    num_others = sum(token not in expected.cells and token not in expected.edge for token in drawn)
    cells = list(expected.cells)
    found = compare_counts([counts[cell] for cell in cells], [*expected.cells.values()], error)
    if found is None:
        return None
    has_tail = TAIL in expected.cells
    return SampledPlace(
        context=0,
        depth=0,
        num_draws=found.num_draws,
        num_cells=found.num_cells,
        p_value=found.p_value,
        total_variation=found.total_variation,
        total_variation_interval=list(found.interval),
        total_variation_by_chance=found.by_chance,
        num_impossible=num_others if expected.is_closed and not has_tail else 0,
    )


def faults_of(tested: Sequence[SampledPlace]) -> list[AuditFinding]:
    """What is wrong with draws at all places together."""
    found = list[AuditFinding]()
    are_rejected = rejected([place.p_value for place in tested], ALPHA)
    for place, is_rejected in zip(tested, are_rejected, strict=True):
        where = f"token {place.depth} after {place.context - place.depth + 1} tokens"
        if place.num_impossible > MOST_IMPOSSIBLE * place.num_draws:
            text = f"{where}: {place.num_impossible} draws that --top_k or --top_p exclude"
            found.append(AuditFinding(name="excluded tokens", text=text))
        if is_rejected:
            low, high = place.total_variation_interval
            text = (
                f"{where}: {place.num_draws} draws are {place.total_variation:.3f} "
                f"[{low:.3f}, {high:.3f}] from the server's own distribution (total variation; "
                f"right draws stay below {place.total_variation_by_chance:.3f}; p = "
                f"{place.p_value:.1e})"
            )
            found.append(AuditFinding(name="distribution", text=text))
    return found
