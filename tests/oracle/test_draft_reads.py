"""The budget bounds what a draft forward reads, under every policy and after any number of tokens;
the tokens of the step itself come on top. The counts say what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import (
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    served_pairs,
    tiny_transformer,
)
from recorder import Recorder

from magicdec.config.sections import KVSection
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.runner import ModelRunner

BUDGET, GAMMA, NUM_NEW = 48, 3, [120, 120, 50]
PAIRS = sorted((d, p) for d, p in served_pairs() if p not in (None, "full"))


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("drafter", "policy"), PAIRS)
def test_a_draft_forward_reads_the_budget_and_its_step(
    drafter: str, policy: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin within the budget and past it. A standalone draft also takes the draft of the
    last step that it has not read itself."""
    reads: list[int] = []
    count = ModelRunner._count

    def spy(runner: ModelRunner, view: Any, rows: Any, is_draft: bool) -> None:
        count(runner, view, rows, is_draft)
        if is_draft and not rows.is_captured:
            reads.extend(view.count_keys().tolist())

    monkeypatch.setattr(ModelRunner, "_count", spy)
    model, kv = tiny_transformer(), KVSection(policy, BUDGET, 4, 8)
    runner = make_runner(model, 3, 100 + max(NUM_NEW) + GAMMA)
    draft = None
    if drafter == "model":
        draft = make_draft(tiny_transformer(seed=1), kv, 3, runner.max_tokens)
    requests = make_requests(random_prompts([100, 20, 60], model.config.vocab_size), NUM_NEW)
    recorder = Recorder() if is_captured else None
    drafting = runner if draft is None or draft.runner is None else draft.runner
    before = drafting.counts.copy()
    how = {"drafter": drafter, "draft": draft, "recorder": recorder, "names": ["speculative"]}
    decode_both(runner, requests, kv, GAMMA, **how)
    used = drafting.counts.minus(before)
    most = BUDGET + GAMMA + (drafter == "model")
    assert used.draft_rows > 0 and used.draft_kv_tokens_read <= most * used.draft_rows
    if not is_captured:
        assert (sum(reads), len(reads)) == (used.draft_kv_tokens_read, used.draft_rows)
        # A choice of whole blocks leaves less than two blocks of the budget unread.
        assert BUDGET - 2 * WEIGHTS_BLOCK < max(reads) <= most
        mean_of_long = torch.tensor(reads[-60:]).float().mean()
        assert mean_of_long > BUDGET - 2 * WEIGHTS_BLOCK, "the budget is used"
