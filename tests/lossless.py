"""Speculation against the baseline over one prefill, as tests of lossless decoding run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from conftest import (
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    portable_backend,
    random_prompts,
)

from magicdec.attention.backend import AttentionBackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.model.transformer import Transformer
from magicdec.runner.model_runner import ModelRunner
from magicdec.speculation.drafter import DraftModel

RAGGED = (5, 70, 1, 33)


@dataclass(frozen=True)
class Speculated:
    """What speculation emitted, which is what the baseline emits, and what it accepted."""

    tokens: list[list[int]]
    accepted: list[list[int]]  # of each step and row
    gamma: int
    runner: ModelRunner
    draft: DraftModel | None

    @property
    def counts(self) -> set[int]:
        """The numbers of drafts that some step accepted of some row."""
        return {count for step in self.accepted for count in step}

    @property
    def accepts_all(self) -> bool:
        return self.counts == {self.gamma}


def speculate(
    model: Transformer,
    kv: KVSection,
    gamma: int = 4,
    *,
    draft: Transformer | None = None,
    lengths: Sequence[int] = RAGGED,
    num_new: int | Sequence[int] = 40,
    seed: int = 0,
    backend: Callable[[], AttentionBackend] | None = None,
    chunk: int = 64,
    draft_chunk: int = 16,
    block_size: int = 8,
    sampling: SamplingSection = SamplingSection(),
) -> Speculated:
    """Decode random prompts of `lengths` tokens by the baseline and by speculation, and assert that
    both emit the same tokens, as many as asked for. `draft` is the model of a standalone draft."""
    counts = [num_new] * len(lengths) if isinstance(num_new, int) else list(num_new)
    size = len(lengths), max(lengths) + max(counts) + gamma
    backend = backend or partial(portable_backend, kv)
    runner = make_runner(model, *size, backend())
    made = None
    if draft is not None:
        made = make_draft(draft, kv, *size, backend(), draft_chunk, block_size, max(8, gamma))
    prompts = random_prompts(lengths, model.config.vocab_size, seed)
    requests = make_requests(prompts, counts, sampling=sampling)
    drafter = "self" if draft is None else "model"
    baseline, tokens, accepted = decode_both(runner, requests, kv, gamma, chunk, drafter, made)
    assert tokens == baseline
    assert [len(row) for row in tokens] == counts
    return Speculated(tokens, accepted, gamma, runner, made)
