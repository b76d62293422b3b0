"""SamplingMetadata: sampling parameters, seeds and emitted tokens of a batch as tensors, and flaws
found in logits. Made on the host, updated on the device after each step.

Shapes: B rows, R of them with penalties, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.kv.cache import upload
from magicdec.runner.model_runner import sums_of
from magicdec.runner.request import NotFinite, Request, SamplingParams
from magicdec.runner.sampling.randomness import Purpose, uniforms

NO_TOP_K = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Filters:
    """Parameters of filters by row, [B, 1, 1]; None if no row uses one."""

    is_greedy: Tensor  # bool
    temperature: Tensor  # float64; 1 in greedy rows
    top: tuple[Tensor, Tensor] | None  # (top_k int64, off if `NO_TOP_K`; top_p float64, off if 1)
    min_p: Tensor | None  # float64; off if 0

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Filters:
        top = None
        min_p = None
        if any(p.top_k > 0 or p.top_p < 1 for p in params):
            top_k = [min(p.top_k, NO_TOP_K) or NO_TOP_K for p in params]
            top = _per_row(top_k, device, torch.int64), _per_row([p.top_p for p in params], device)
        if any(p.min_p > 0 for p in params):
            min_p = _per_row([p.min_p for p in params], device)
        is_greedy = _per_row([p.is_greedy for p in params], device, torch.bool)
        return cls(is_greedy, _per_row([p.temperature or 1.0 for p in params], device), top, min_p)


@dataclass(frozen=True)
class Draws:
    """The inputs of random sampling. Only coupled sampling counts positions from the prompt's
    begin."""

    filters: Filters
    seeds: Tensor  # int64 [B]
    emitted: Tensor  # int64 [B]: number of tokens emitted so far
    prompt_lens: Tensor | None = None  # int64 [B]; None: sampling is not coupled

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> Draws | None:
        params = [r.sampling for r in requests]
        if all(p.is_greedy for p in params):
            return None
        emitted = upload([len(r.output_ids) for r in requests], device)
        seeds = upload([p.seed for p in params], device)
        lengths = None
        if any(p.is_coupled for p in params):
            assert all(p.is_coupled for p in params), "the requests of a batch sample alike"
            lengths = upload([len(r.prompt_ids) for r in requests], device)
        return cls(Filters.of(params, device), seeds, emitted, lengths)

    def ahead(self, count: int, purpose: Purpose, skip: int = 0) -> Tensor:
        """Random numbers float64 [B, count] of the next output positions after the first `skip`."""
        steps = torch.arange(skip, skip + count, device=self.seeds.device)
        return uniforms(self.seeds, self.emitted.unsqueeze(1) + steps, purpose)


@dataclass(frozen=True)
class Penalties:
    """The penalties of the R rows that have any, at `places` of the batch."""

    places: tuple[int, ...]
    index: Tensor  # int64 [R]: `places` as a tensor
    repetition: Tensor  # float32 [R, 1, 1]
    presence: Tensor  # float32 [R, 1, 1]
    in_prompt: Tensor  # bool [R, V]
    in_output: Tensor  # bool [R, V]

    @classmethod
    def of(
        cls, requests: Sequence[Request], vocab_size: int, device: torch.device
    ) -> Penalties | None:
        places = tuple(i for i, r in enumerate(requests) if r.sampling.has_penalties)
        if not places:
            return None
        rows = [requests[place] for place in places]
        return cls.from_texts(
            [r.sampling for r in rows],
            [r.distinct_prompt_ids for r in rows],
            [r.output_ids for r in rows],
            vocab_size,
            device,
            places,
        )

    @classmethod
    def from_texts(
        cls,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        places: tuple[int, ...] | None = None,
    ) -> Penalties:
        """Penalties of rows with these texts; a single prompt is that of all rows. Default
        `places`: all rows."""
        places = tuple(range(len(outputs))) if places is None else places
        return cls(
            places,
            upload(places, device),
            _per_row([p.repetition_penalty for p in params], device, torch.float32),
            _per_row([p.presence_penalty for p in params], device, torch.float32),
            _seen(prompts, vocab_size, device).expand(len(outputs), -1),
            _seen(outputs, vocab_size, device),
        )

    def take(self, ids: Tensor, is_emitted: Tensor) -> None:
        """Add the tokens ids [B, T] to the outputs where `is_emitted` [B, T]."""
        ids = ids[self.index]
        is_emitted = is_emitted[self.index]
        count = torch.zeros_like(self.in_output, dtype=torch.int64)
        count.scatter_add_(1, ids, is_emitted.long())
        self.in_output.logical_or_(count > 0)


@dataclass(frozen=True)
class SamplingMetadata:
    """The sampling metadata of a batch; by default greedy, without tensors.

    `given` are tokens that sampled drafts take, in place of those that are drawn.

    The flaw of a row is 0, or NaN once logits of it or its drafts were not finite. The device
    computes it without a wait; the host reads it with the tokens (`with_flaws`, `check`)."""

    draws: Draws | None = None
    penalties: Penalties | None = None
    flaws: Tensor | None = field(default=None, compare=False)  # float32 [B, 1]
    given: Tensor | None = None  # int64 [B, drafts]

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
        has_flaws: bool = True,
    ) -> SamplingMetadata:
        """`vocab_size` covers the whole vocabulary. Without `has_flaws`, another place checks
        logits."""
        flaws = torch.zeros(len(requests), 1, device=device) if has_flaws else None
        return cls(Draws.of(requests, device), Penalties.of(requests, vocab_size, device), flaws)

    @property
    def is_greedy(self) -> bool:
        return self.draws is None and self.penalties is None

    @property
    def state(self) -> list[Tensor]:
        draws = [] if self.draws is None else [self.draws.emitted]
        penalties = [] if self.penalties is None else [self.penalties.in_output]
        return draws + penalties + ([] if self.flaws is None else [self.flaws])

    def note(self, logits: Tensor) -> None:
        """Check logits [B, T, V] from which tokens are chosen."""
        if self.flaws is not None:
            self.note_sums(sums_of(logits))

    def note_sums(self, sums: Tensor, places: Tensor | None = None) -> None:
        """Check logits by their sums [B, T] (`sums_of`), or [1, N], of which `places` [B, T] are
        a row's."""
        if self.flaws is None:
            return
        if places is not None:
            sums = sums[0, places]
        if sums.shape[1] > 1:
            sums = sums.sum(dim=1, keepdim=True)
        self.flaws.add_(sums, alpha=0)  # 0 times infinity or NaN is NaN

    def take_flaws(self, others: SamplingMetadata, places: Tensor) -> None:
        if self.flaws is not None and others.flaws is not None:
            self.flaws.index_add_(0, places, others.flaws)

    def spoil(self) -> None:
        if self.flaws is not None:
            self.flaws.fill_(torch.nan)

    def with_flaws(self, columns: Sequence[Tensor]) -> Tensor:
        """int64 [B, 1 + N] for the host: a column for `check`, then the columns."""
        assert self.flaws is not None, "made from requests"
        return torch.cat([self.flaws.view(torch.int32), *columns], dim=1)

    @staticmethod
    def check(request: Request, line: Sequence[int]) -> None:
        """Raise NotFinite if a request's `line` of `with_flaws` has a flaw."""
        if line[0] != 0:  # the bits of a NaN
            raise NotFinite.after(request.request_id, len(request.output_ids))

    def take(self, ids: Tensor, counts: Tensor, active: Tensor) -> None:
        """Record that `active` [B] rows (1 or 0) emitted the first `counts` [B] of ids [B, T]."""
        if self.is_greedy:
            return
        counts = counts * active
        if self.draws is not None:
            self.draws.emitted.add_(counts)
        if self.penalties is not None:
            place = torch.arange(ids.shape[1], device=ids.device)
            self.penalties.take(ids, place < counts.unsqueeze(1))

    def load(self, requests: Sequence[Request | None]) -> None:
        """Set emitted tokens from the host's requests; None is a row without output."""
        outputs = [[] if r is None else r.output_ids for r in requests]
        if self.flaws is not None:
            self.flaws.zero_()
        if self.draws is not None:
            emitted = self.draws.emitted
            emitted.copy_(upload([len(ids) for ids in outputs], emitted.device))
        if self.penalties is not None:
            in_output = self.penalties.in_output
            seen = [outputs[place] for place in self.penalties.places]
            in_output.copy_(_seen(seen, in_output.shape[1], in_output.device))


def _per_row(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    return upload(values, device, dtype).view(-1, 1, 1)


def _seen(token_ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Which tokens below `vocab_size` occur in each row: bool [R, V]."""
    is_seen = torch.zeros(len(token_ids), vocab_size, dtype=torch.bool, device=device)
    for row, ids in enumerate(token_ids):
        is_seen[row, upload([i for i in ids if i < vocab_size], device)] = True
    return is_seen
