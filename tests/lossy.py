"""A planted lossy rule, which accepts a draft if its logit is near the best one; and a short run of
the demo model in which rounding differs between the shapes of a run."""

import sys
from functools import partial
from pathlib import Path

from pytest import MonkeyPatch

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.runner.sampling import model_tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from attack_verdict import ATTACKS as ATTACKS
from attack_verdict import accept_within
from attack_verdict import noisy as noisy
from attack_verdict import planted as planted


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
