"""A planted lossy rule, which accepts a draft if its logit is near the best one; and a short run of
the demo model in which rounding differs between the shapes of a run."""

from functools import partial

import torch
from pytest import MonkeyPatch
from torch import Tensor

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.runner import ModelRunner, gather_vocab
from magicdec.sampling import model_tokens
from magicdec.sampling.metadata import SamplingMetadata


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


def accept_within(  # type: ignore[no-untyped-def]
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
    is_before: Tensor | None = None,
    places: Tensor | None = None,
    *,
    exact,
    limit: float,
) -> Tensor:
    """The greedy tokens [B, T], but a draft near the best token counts as the target's choice."""
    target: Tensor = exact(runner, logits, sampling, drafts, is_before, places)
    if drafts is None or logits.shape[1] != drafts.shape[1] + 1:  # not a verification
        return target
    whole = gather_vocab(logits, runner.vocab_places, runner.group)[:, :-1]
    near = whole.amax(-1) - whole.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) <= limit
    return torch.cat([torch.where(near, drafts, target[:, :-1]), target[:, -1:]], dim=1)
