"""The second part of the verdict: whether forwards of the requested pass are as right as the
baseline's, by logits that both computed after the same text.

Where bits differ, a wider model (`wider`) says the errors of both at each position. By rounding
alone, a verification's errors are those of a decode step up to chance and ALLOWED, because kernels
for other shapes add in another order. Honest forwards exceed any of three limits with a probability
of ALARM together: of the mean ratio of errors, of the largest ratio, and of the number of positions
whose largest logit changes.

Shapes: P positions, R rows, V vocabulary (rows on this rank until they are gathered).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.bench.check.judgement import walks
from magicdec.bench.check.rounding import changes, most_by_chance
from magicdec.bench.check.wider import WiderTexts
from magicdec.kv.cache import upload
from magicdec.records.correctness import ForwardErrors
from magicdec.records.intervals import quantile
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.request import Request
from magicdec.speculation.steps.logits_recorder import LogitsRecorder

ALARM = 1e-3  # the probability that honest forwards exceed one of the limits
TEST_ALARM = ALARM / 3
SEEN = 0.99  # the probability that errors above `hidden_error` exceed a limit
ALLOWED = {"float32": 3.0, "bfloat16": 1.25}  # by what factor errors of honest kernels differ
BLOCK = 8  # neighbouring positions of a row, whose errors have causes in common
FEWEST_BLOCKS = 4
# Of fewer blocks the spread is not known: then the limit of the mean is this many times ALLOWED.
UNKNOWN_SPREAD = 2.0
FEWEST_POSITIONS = 4  # that have a limit
# The logarithms of honest ratios resemble Student's t of so many degrees of freedom, so many
# spreads wide: of 42,000 in bfloat16 one was 6.9 spreads above the median (docs/log/gate.md).
TAIL_FREEDOM = 8
TAIL_SCALE = 0.94
MOST_POSITIONS = 1024  # that are measured: as many rows as have so many together, at least 4
FEWEST_ROWS = 4
MOST_GROUPS = 4  # of rows that the cache holds at once, for each of which the weights are read
MOST_SHIFTS = 16  # by which the errors of positions are subtracted from each other
SMALLEST = 1e-30  # error, so that ratios are finite
FLOAT = torch.float64

Kept = dict[int, Tensor]
"""This rank's logits [V] after an output token, by its index."""


@dataclass(frozen=True)
class PairedLogits:
    """The logits [V] of both passes after output token `index` of sequence `place`."""

    place: int
    index: int
    decode: Tensor
    verify: Tensor


@dataclass(frozen=True)
class Errors:
    """Errors in logits, float64, in the order of rows and their positions."""

    places: Sequence[int]  # the sequence of each position
    decode: Tensor  # [P]: root of the mean square, over the vocabulary, of the error
    verify: Tensor  # [P]
    is_changed: Tensor  # [P]: 1 where the largest logits of the passes are those of other tokens
    gap: Tensor  # [P]: between the two largest logits of the decode step, there
    wider_gap: Tensor  # [P]: between these two tokens, in the wider model


@torch.inference_mode()
def measure_forwards(
    decode: tuple[LogitsRecorder, Sequence[Request]],
    verify: tuple[LogitsRecorder, Sequence[Request]],
    runner: ModelRunner,
    make_texts: Callable[[], WiderTexts],
    dtype: str,
) -> ForwardErrors:
    """Compares the kept logits of both passes over the same prompts, which `runner` has decoded or
    one with the same shards. Unless all bits are equal, it costs a forward of about MOST_POSITIONS
    tokens in the wider dtype. Every rank of the group calls this."""
    pairs = list(pairs_of(decode, verify, runner))
    num_unequal = count_unequal(pairs, runner)
    if num_unequal == 0:
        return ForwardErrors(num_positions=len(pairs), num_unequal=0)
    texts = make_texts()
    longest = max(len(request.prompt_ids) + len(request.output_ids) for request in decode[1])
    room = texts.room(longest)
    most_rows = min(texts.most_rows(longest), MOST_GROUPS * room)
    measured = chosen(pairs, decode[1], most_rows)
    errors = errors_of(measured, decode[1], texts, room)
    return judge_errors(errors, len(pairs), num_unequal, ALLOWED[dtype])


def count_unequal(pairs: Sequence[PairedLogits], runner: ModelRunner) -> int:
    flags = [int(not torch.equal(pair.decode, pair.verify)) for pair in pairs]
    rank_flags = runner.group.all_gather(upload(flags, runner.device))
    return int(rank_flags.amax(dim=0).sum())


def pairs_of(
    decode: tuple[LogitsRecorder, Sequence[Request]],
    verify: tuple[LogitsRecorder, Sequence[Request]],
    runner: ModelRunner,
) -> Iterator[PairedLogits]:
    ours, theirs = (kept_logits(recorder, runner) for recorder, _ in (decode, verify))
    for place, (one, two) in enumerate(zip(decode[1], verify[1], strict=True)):
        if one.prompt_ids != two.prompt_ids:  # turns behind other answers
            continue
        kept = ours.get(one.request_id, {})
        others = theirs.get(two.request_id, {})
        tokens = zip(one.output_ids, two.output_ids, strict=False)
        for index, (expected, found) in enumerate(tokens):
            if expected != found:
                break
            if index in kept and index in others:
                yield PairedLogits(place, index, kept[index], others[index])


def kept_logits(recorder: LogitsRecorder, runner: ModelRunner) -> dict[int, Kept]:
    """The logits along the output of each request, by its id, up to a token that contradicts
    them."""
    found = dict[int, Kept]()
    for step in recorder.steps:
        for walk in walks(step, runner):
            request = step.requests[walk.row]
            first = step.num_output[walk.row]
            request_logits = found.setdefault(request.request_id, {})
            text = request.output_ids[first:]
            for count in range(len(walk.tokens)):
                if walk.tokens[:count] != text[:count]:
                    break
                request_logits[first + count - 1] = step.logits[walk.row, count]
    return found


def chosen(
    pairs: Sequence[PairedLogits], requests: Sequence[Request], most_rows: int
) -> list[PairedLogits]:
    """The pairs of the first tokens of at most `most_rows` rows, about MOST_POSITIONS."""
    longest = max(len(request.output_ids) for request in requests)
    count = min(most_rows, max(FEWEST_ROWS, MOST_POSITIONS // longest))
    places = sorted({pair.place for pair in pairs})[:count]
    first = min(pair.index for pair in pairs if pair.place in places)
    length = max(MOST_POSITIONS // len(places), 1 + first)
    return [pair for pair in pairs if pair.place in places and pair.index < length]


def errors_of(
    pairs: Sequence[PairedLogits], requests: Sequence[Request], texts: WiderTexts, room: int
) -> Errors:
    """The errors of the pairs, of `room` rows at a time."""
    places = sorted({pair.place for pair in pairs})
    measured = list[tuple[int, int, Tensor]]()
    for first in range(0, len(places), room):
        group = places[first : first + room]
        measured += numbers_of([p for p in pairs if p.place in group], requests, texts)
    measured.sort(key=lambda measurement: measurement[:2])
    numbers = torch.stack([row for _, _, row in measured])
    return Errors([place for place, _, _ in measured], *numbers.unbind(1))


def numbers_of(
    pairs: Sequence[PairedLogits], requests: Sequence[Request], texts: WiderTexts
) -> list[tuple[int, int, Tensor]]:
    """For each pair, of rows that the cache holds at once: its place, its index and its numbers, as
    `compare` returns them."""
    runner = texts.source
    places = sorted({pair.place for pair in pairs})
    length = 1 + max(pair.index for pair in pairs)
    ids = [(requests[place].output_ids[:length] + [0] * length)[:length] for place in places]
    rows = texts.hold([requests[place] for place in places])
    prompt_lens = [len(requests[place].prompt_ids) for place in places]
    measured = list[tuple[int, int, Tensor]]()
    for first, wider in texts.logits(rows, prompt_lens, upload(ids, runner.device)):
        here = [pair for pair in pairs if first <= pair.index < first + wider.shape[1]]
        if here:
            wider_logits = [wider[places.index(pair.place), pair.index - first] for pair in here]
            numbers = compare(here, wider_logits, runner)
            measured += [(p.place, p.index, row) for p, row in zip(here, numbers, strict=True)]
    return measured


def compare(pairs: Sequence[PairedLogits], wider: Sequence[Tensor], runner: ModelRunner) -> Tensor:
    """[P, 5] on the host: the numbers of `Errors` for each position."""
    shares = [[pair.decode for pair in pairs], [pair.verify for pair in pairs], wider]
    stacked = torch.stack([torch.stack(list(share)).to(FLOAT) for share in shares])  # [3, P, V]
    decode, verify, true = gather_vocab(stacked, runner.vocab_places, runner.group)
    best = decode.topk(2).indices
    columns = [
        root_mean_square(decode, true),
        root_mean_square(verify, true),
        (decode.argmax(dim=-1) != verify.argmax(dim=-1)).to(FLOAT),
        *(logits.gather(-1, best).diff(dim=-1).neg()[:, 0] for logits in (decode, true)),
    ]
    return torch.stack(columns, dim=1).cpu()


def root_mean_square(logits: Tensor, true: Tensor) -> Tensor:
    """[P] from differences of logits [P, V], where equal ones may be infinite."""
    return torch.where(logits == true, 0.0, logits - true).square().mean(dim=-1).sqrt()


def judge_errors(
    errors: Errors, num_positions: int, num_unequal: int, allowed: float
) -> ForwardErrors:
    """The errors beside their limits; `num_unequal` of `num_positions` differ in a bit."""
    decode, verify = (logits.clamp(min=SMALLEST).log() for logits in (errors.decode, errors.verify))
    ratios = verify - decode
    chances = chances_to_change(errors)
    most, seen = mean_limits(block_means(ratios, errors.places), allowed)
    if most is None and len(ratios) >= FEWEST_POSITIONS:
        most = math.log(UNKNOWN_SPREAD * allowed)
    largest = largest_limit(ratios, allowed)
    typical = decode.mean().exp().item()
    return ForwardErrors(
        num_positions=num_positions,
        num_unequal=num_unequal,
        num_measured=len(ratios),
        decode_error=typical,
        verify_error=verify.mean().exp().item(),
        error_ratio=ratios.mean().exp().item(),
        most_error_ratio=None if most is None else math.exp(most),
        largest_error_ratio=ratios.max().exp().item(),
        most_largest_error_ratio=None if largest is None else math.exp(largest),
        num_changed=int(errors.is_changed.sum()),
        expected_changed=sum(chances),
        most_num_changed=most_by_chance(chances, 1 - TEST_ALARM),
        hidden_error=None if seen is None else typical * math.sqrt(math.expm1(2 * seen)),
    )


def block_means(values: Tensor, places: Sequence[int]) -> Tensor:
    """The means of BLOCK neighbours of a row; a rest counts from half a block on."""
    means = list[Tensor]()
    for place in sorted(set(places)):
        row = values[[i for i, other in enumerate(places) if other == place]]
        parts = [part for part in row.split(BLOCK) if 2 * len(part) >= BLOCK]
        means += [part.mean() for part in parts]
    return torch.stack(means) if means else values.new_empty(0)


def mean_limits(blocks: Tensor, allowed: float) -> tuple[float | None, float | None]:
    """The largest mean logarithm of ratios without alarm, and the true mean that exceeds it with
    the probability SEEN, by one-sided t tests of block means; None for too few."""
    freedom = len(blocks) - 1
    if len(blocks) < FEWEST_BLOCKS:
        return None, None
    error = blocks.std().item() / math.sqrt(len(blocks))
    limit = math.log(allowed) + quantile(freedom, 1 - 2 * TEST_ALARM) * error
    return limit, limit + quantile(freedom, 2 * SEEN - 1) * error


def largest_limit(ratios: Tensor, allowed: float) -> float | None:
    """The logarithm of the largest ratio without alarm, for ratios whose spread is that of the
    smaller half, which faults do not widen; None for too few."""
    if len(ratios) < FEWEST_BLOCKS * BLOCK:
        return None
    middle = ratios.median()
    spread = (middle - ratios[ratios <= middle]).square().mean().sqrt().item()
    deviations = TAIL_SCALE * quantile(TAIL_FREEDOM, 1 - 2 * TEST_ALARM / len(ratios))
    return math.log(allowed) + deviations * spread


def chances_to_change(errors: Errors) -> list[float]:
    """The probability of each position that a verification changes its largest logit. It moves the
    decode step's gap by the difference of two errors, which are those of decode steps, or normal,
    whichever gives the larger probability."""
    gap_changes = errors.gap - errors.wider_gap
    shifts = range(1, min(len(gap_changes), MOST_SHIFTS))
    moves = [
        torch.zeros(1, dtype=FLOAT),
        *((gap_changes - gap_changes.roll(s)).abs() for s in shifts),
    ]
    measured = changes(torch.cat(moves).sort().values, errors.gap.contiguous())
    spread = gap_changes.square().mean().mul(2).sqrt().clamp(min=SMALLEST)  # of a move
    normal = torch.special.ndtr(-errors.gap / spread)
    return torch.maximum(measured, normal).tolist()
