"""Faults planted in verifications, such as a lossy rule which accepts a draft if its logit is near
the best one; and a short run of the demo model in which rounding differs between the shapes of a
run. The faults change verifications alone: prefill and the baseline are right."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from magicdec.attention.backend import backend_class
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.kv.view import Visible
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.sampling import model_tokens
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.steps.steps import DecodeSteps, PendingVerification

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function from a method to the faulty one."""


@dataclass(frozen=True)
class LossyPlace:
    """A method, or function of a module, that a fault replaces."""

    owner: Any
    name: str
    change: Change


Attack = Callable[[str], list[LossyPlace]]
"""The places of a fault, with the name of the attention backend."""


@contextmanager
def planted(places: list[LossyPlace]) -> Iterator[None]:
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(_replaced(place))
        yield


@contextmanager
def _replaced(place: LossyPlace) -> Iterator[None]:
    before = getattr(place.owner, place.name)
    setattr(place.owner, place.name, place.change(before))
    try:
        yield
    finally:
        setattr(place.owner, place.name, before)


def nothing(backend: str) -> list[LossyPlace]:
    return []


def accept_within(
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
    places: Tensor | None = None,
    *,
    exact: Callable[..., Tensor],
    limit: float,
) -> Tensor:
    """The greedy tokens [B, T], but a draft near the best token counts as the target's choice."""
    target = exact(runner, logits, sampling, drafts, places)
    if drafts is None or logits.shape[1] != drafts.shape[1] + 1:  # not a verification
        return target
    whole = gather_vocab(logits, runner.vocab_places, runner.group)[:, :-1]
    near = whole.amax(-1) - whole.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) <= limit
    return torch.cat([torch.where(near, drafts, target[:, :-1]), target[:, -1:]], dim=1)


def lossy(limit: float, backend: str) -> list[LossyPlace]:
    """A verification accepts a draft whose logit is at most `limit` below the best."""

    def change(exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return partial(accept_within, exact=exact, limit=limit)

    return [LossyPlace(model_tokens, "greedy_tokens", change)]


def noisy(size: float, backend: str) -> list[LossyPlace]:
    """The logits of verifications have noise of that standard deviation."""
    generator = torch.Generator().manual_seed(1)

    def change(finish: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def finish_noisily(
            steps: DecodeSteps, verification: PendingVerification, *more: Any
        ) -> Tensor:
            for forward in verification.forwards if verification.proposal.ids.shape[1] else ():
                assert forward.out is not None, "it has been computed"
                noise = size * torch.randn(forward.out.shape, generator=generator)
                forward.out.copy_(forward.out.float() + noise)
            return finish(steps, verification, *more)

        return finish_noisily

    return [LossyPlace(DecodeSteps, "_finish", change)]


class InVerification:
    """Says whether a verification is being launched."""

    def __init__(self) -> None:
        self.is_true = False

    def place(self) -> LossyPlace:
        def change(begin: Callable[..., PendingVerification]) -> Callable[..., PendingVerification]:
            def begin_flagged(steps: DecodeSteps, proposal: Proposal | None) -> PendingVerification:
                self.is_true = proposal is not None
                try:
                    return begin(steps, proposal)
                finally:
                    self.is_true = False

            return begin_flagged

        return LossyPlace(DecodeSteps, "_begin", change)


@dataclass(frozen=True)
class AllBut(Visible):
    """All committed tokens but a few in the middle."""

    num_dropped: int

    def ranges(self, committed: Tensor) -> Tensor:
        zero = torch.zeros_like(committed)
        middle = committed // 2
        first = torch.stack([zero, middle], dim=1)
        last = torch.stack([middle + self.num_dropped, committed], dim=1)
        return torch.stack([first, last], dim=1)

    def num_visible(self, committed: int) -> int:
        return committed - self.num_dropped


def forgetful(num_dropped: int, backend: str) -> list[LossyPlace]:
    """Verifications do not read some tokens in the middle of the context."""
    verifying = InVerification()

    def change(enqueue: Callable[..., Any]) -> Callable[..., Any]:
        def enqueue_less(runner: ModelRunner, batch: ForwardBatch) -> Any:
            if verifying.is_true:
                batch = replace(batch, policy=AllBut(num_dropped))
            return enqueue(runner, batch)

        return enqueue_less

    return [verifying.place(), LossyPlace(ModelRunner, "enqueue", change)]


def one_head(scale: float, backend: str) -> list[LossyPlace]:
    """In verifications, the output of one head of one layer is scaled."""
    verifying = InVerification()

    def change(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run_scaled(backend: Any, layer: int, *more: Any) -> Tensor:
            out = run(backend, layer, *more)
            if verifying.is_true and layer == 2:
                out = out.clone()
                out[:, :, 1] *= scale
            return out

        return run_scaled

    return [verifying.place(), LossyPlace(backend_class(backend), "run", change)]


ATTACKS: dict[str, Attack] = {
    "nothing": nothing,
    "accept within 0.01": partial(lossy, 0.01),
    "accept within 0.03": partial(lossy, 0.03),
    "accept within 0.06": partial(lossy, 0.06),
    "noise 0.01": partial(noisy, 0.01),
    "noise 0.03": partial(noisy, 0.03),
    "1 KV token dropped": partial(forgetful, 1),
    "16 KV tokens dropped": partial(forgetful, 16),
    "a head 10 % too small": partial(one_head, 0.9),
    "a head halved": partial(one_head, 0.5),
    "a head zeroed": partial(one_head, 0.0),
}


def short_run(dtype: str, num_ranks: int = 1, num_rows: int = 16) -> RunConfig:
    """Rows of 48 tokens, by torch's own matrix products and attention. In bfloat16, rounding makes
    about 3 of 16 differ."""
    return RunConfig(
        model=ModelSection("demo", dtype, linear="torch"),
        parallel=ParallelSection(tuple(range(num_ranks)), device="cpu", threads=1),
        attention=AttentionSection("sdpa"),
        kv=KVSection("streaming_llm", 33),
        decoding=DecodingSection("speculative", "self", 4, ignore_eos=True),
        workload=WorkloadSection(
            "demo", batch_size=num_rows, prefix_len=64, gen_len=48, num_batches=1, warmup_batches=0
        ),
    )


def plant(monkeypatch: MonkeyPatch, limit: float) -> None:
    """From now on, verification accepts a draft whose logit is at most `limit` below the best."""
    rule = partial(accept_within, exact=model_tokens.greedy_tokens, limit=limit)
    monkeypatch.setattr(model_tokens, "greedy_tokens", rule)
