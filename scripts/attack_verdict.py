r"""What does the verdict of a run see? Plants faults in verifications, one after the other, in runs
of the demo model, and prints for each the status and what has found it.

    python scripts/attack_verdict.py
    python scripts/attack_verdict.py --attack nothing --num_seeds 200 --dtype bfloat16
    TRITON_INTERPRET=1 python scripts/attack_verdict.py --kernels triton --B 1 --prefix_len 96 \
        --gen_len 10

The faults change verifications alone: prefill and the baseline are right. `by tokens` is what the
comparison of the tokens says without the other parts of the verdict.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from magicdec.attention.backend import backend_class
from magicdec.bench.run.run import execute
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.kv.view import Visible
from magicdec.records.correctness import Correctness
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.sampling import model_tokens
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.setup.prepare import prepare
from magicdec.speculation.steps.steps import DecodeSteps, PendingVerification

KERNELS = {
    "torch": ("torch", "sdpa"),
    "native": ("auto", "native"),
    "triton": ("torch", "triton"),
}
Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function from a method to the faulty one."""


@dataclass(frozen=True)
class Place:
    """A method, or function of a module, that a fault replaces."""

    owner: Any
    name: str
    change: Change


Attack = Callable[[str], list[Place]]
"""The places of a fault, with the name of the attention backend."""


@contextmanager
def planted(places: list[Place]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in places:
            stack.enter_context(_replaced(each))
        yield


@contextmanager
def _replaced(place: Place) -> Iterator[None]:
    before = getattr(place.owner, place.name)
    setattr(place.owner, place.name, place.change(before))
    try:
        yield
    finally:
        setattr(place.owner, place.name, before)


def nothing(backend: str) -> list[Place]:
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


def lossy(limit: float, backend: str) -> list[Place]:
    """A verification accepts a draft whose logit is at most `limit` below the best."""

    def change(exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return partial(accept_within, exact=exact, limit=limit)

    return [Place(model_tokens, "greedy_tokens", change)]


def noisy(size: float, backend: str) -> list[Place]:
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

    return [Place(DecodeSteps, "_finish", change)]


class InVerification:
    """Says whether a verification is being launched."""

    def __init__(self) -> None:
        self.is_true = False

    def place(self) -> Place:
        def change(begin: Callable[..., PendingVerification]) -> Callable[..., PendingVerification]:
            def begin_flagged(steps: DecodeSteps, proposal: Proposal | None) -> PendingVerification:
                self.is_true = proposal is not None
                try:
                    return begin(steps, proposal)
                finally:
                    self.is_true = False

            return begin_flagged

        return Place(DecodeSteps, "_begin", change)


@dataclass(frozen=True)
class AllBut(Visible):
    """All committed tokens but a few in the middle."""

    num_dropped: int

    def ranges(self, committed: Tensor) -> Tensor:
        zero, middle = torch.zeros_like(committed), committed // 2
        first = torch.stack([zero, middle], dim=1)
        last = torch.stack([middle + self.num_dropped, committed], dim=1)
        return torch.stack([first, last], dim=1)

    def num_visible(self, committed: int) -> int:
        return committed - self.num_dropped


def forgetful(num_dropped: int, backend: str) -> list[Place]:
    """Verifications do not read some tokens in the middle of the context."""
    verifying = InVerification()

    def change(defer: Callable[..., Any]) -> Callable[..., Any]:
        def defer_less(runner: ModelRunner, x: Any, rows: Any, *more: Any, **named: Any) -> Any:
            if verifying.is_true:
                named["policy"] = AllBut(num_dropped)
            return defer(runner, x, rows, *more, **named)

        return defer_less

    return [verifying.place(), Place(ModelRunner, "defer", change)]


def one_head(scale: float, backend: str) -> list[Place]:
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

    return [verifying.place(), Place(backend_class(backend), "run", change)]


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


def make_config(args: argparse.Namespace, dtype: str, kernels: str, attack: str) -> RunConfig:
    """A layer at a time if a head of one is to be wrong."""
    linear, attention = KERNELS[kernels]
    is_of_layer = ATTACKS[attack] is not nothing and "head" in attack
    native_steps = "off" if is_of_layer else "auto"
    return RunConfig(
        model=ModelSection("demo", dtype, linear=linear, native_steps=native_steps),
        parallel=ParallelSection((0,), device="cpu", threads=1),
        attention=AttentionSection(attention),
        kv=KVSection("streaming_llm", 65),
        decoding=DecodingSection("speculative", "self", 4, ignore_eos=True),
        workload=WorkloadSection(
            "demo", batch_size=args.B, prefix_len=args.prefix_len, gen_len=args.gen_len,
            num_batches=args.num_batches, warmup_batches=0,
        ),
    )  # fmt: skip


def verdict_on(config: RunConfig, attack: str) -> tuple[str, Correctness]:
    """The status of a run with that fault, and its verdict."""
    with planted(ATTACKS[attack](config.attention.backend)):
        record = execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False).record
    assert record.correctness is not None, "the run has not failed"
    return record.status, record.correctness


def by_tokens(found: Correctness) -> str:
    """The status if nothing but the tokens counted."""
    return replace(found, judged_again=None, forwards=None).status


def what_fired(found: Correctness) -> list[str]:
    """The parts of the verdict that the run has not passed."""
    judged, forwards = found.judged_again, found.forwards
    fired = ["tokens"] if found.num_diverged else []
    fired += ["judgement"] if judged is not None and judged.num_wrong else []
    return fired + ([] if forwards is None else forwards.alarms)


def add_row(table: Table, name: list[str], results: list[tuple[str, Correctness]]) -> None:
    count = len(results)
    statuses = Counter(status for status, _ in results)
    plain = Counter(by_tokens(found) for _, found in results)
    fired = Counter(part for _, found in results for part in what_fired(found))
    measured = [f for _, c in results if (f := c.forwards) is not None and f.num_unequal]
    hidden = [f.hidden_error for f in measured if f.hidden_error is not None]
    ratios = [f.error_ratio for f in measured if f.error_ratio is not None]
    table.add_row(
        *name,
        *(", ".join(f"{n} {key}" for key, n in each.items()) for each in (plain, statuses)),
        ", ".join(f"{part} {n}/{count}" for part, n in fired.items()) or "-",
        f"{min(ratios):.3g} to {max(ratios):.3g}" if ratios else "bits equal",
        f"{max(hidden):.2g}" if hidden else "-",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["torch", "native"])
    parser.add_argument("--num_seeds", type=int, default=1)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--B", type=int, default=4)
    parser.add_argument("--prefix_len", type=int, default=256)
    parser.add_argument("--gen_len", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=1)
    args, started = parser.parse_args(), time.perf_counter()
    columns = "kernels", "dtype", "attack", "by tokens", "status", "fired", "error ratio", "hidden"
    table = Table(*columns)
    for kernels in args.kernels:
        for dtype in args.dtype:
            for attack in args.attack:
                config = make_config(args, dtype, kernels, attack)
                numbers = range(args.first_seed, args.first_seed + args.num_seeds)
                seeds = [replace(config.workload, seed=seed) for seed in numbers]
                results = list[tuple[str, Correctness]]()
                for w in seeds:
                    status, found = verdict_on(replace(config, workload=w), attack)
                    results.append((status, found))
                    print(kernels, dtype, attack, w.seed, status, *what_fired(found), flush=True)
                add_row(table, [kernels, dtype, attack], results)
    Console(width=200).print(table)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
