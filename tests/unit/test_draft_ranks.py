"""A draft model on several ranks of pipelined speculation: what is refused, and what each of these
ranks is planned to hold and needs to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving_command import prepare_as

from magicdec.console import make_progress
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.model.checkpoint.source import find_model
from magicdec.model.checkpoint.split import split_checkpoint
from magicdec.serving.modes import Pass
from magicdec.serving.speculative_pipeline import SpeculativePipeline
from magicdec.setup.loading import LoadedModels, make_draft

SYNC = Pass.named("sync")


def prepared(
    tmp_path: Path, *words: str, rank: int = 0, world_size: int = 3
) -> SpeculativePipeline:
    words = "--num_requests", "2", *words
    serving = prepare_as("pipeline", tmp_path, *words, rank=rank, world_size=world_size)
    system = serving.system_of(SYNC)
    assert isinstance(system, SpeculativePipeline)
    return system


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "ngram"], "--draft ngram has no layers that 2 ranks could share; give"),
        (["--emulate_acceptance", "1"], "1.0/0.5,0.5: --emulate_acceptance has no layers that 2"),
    ],
)
def test_several_ranks_draft_with_a_model_only(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, "--layer_split", "1.0/0.5,0.5", *words)


def test_a_draft_has_at_most_as_many_ranks_as_heads(tmp_path: Path) -> None:
    split = "1.0/" + ",".join(["0.05"] * 20)
    refused = rf"--layer_split {split}, draft demo-draft: 20 ranks cannot share \d+ attention heads"
    with pytest.raises(ValueError, match=refused):
        prepared(tmp_path, "--layer_split", split, world_size=21)


def test_native_steps_of_several_ranks_need_collectives_that_they_can_call(tmp_path: Path) -> None:
    """Those of one rank need none."""
    for split, expected in (("1.0/0.5,0.5", "auto: off, --collectives gloo"), ("0,1.0/1.0", None)):
        words = ("--layer_split", split, "--collectives", "gloo", "--dtype", "float32")
        system = prepared(tmp_path, *words)
        assert system.drafting is not None and system.drafting.config.draft is not None
        choices = [system.drafting.config.draft, system.run.config.model]
        of_draft, of_target = (choice.native_steps.why for choice in choices)
        assert of_draft == (expected or of_target) and "gloo" not in of_target


@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_the_plan_of_each_rank_of_a_draft_is_what_it_holds(policy: str, tmp_path: Path) -> None:
    words = ("--layer_split", "1.0/0.5,0.5", "--linear", "torch", "--kv_policy", policy)
    system = prepared(tmp_path, *words, "--dtype", "float32")
    drafting, plans = system.drafting, [system.plan(SYNC, [rank]) for rank in range(3)]
    assert drafting is not None
    assert [plan.draft_weights > 0 for plan in plans] == [False, True, True]
    for index, plan in enumerate(plans[1:]):
        group = Group((1, 2), index)
        groups = ParallelGroups(1 + index, 3, group, draft=group)
        loaded = LoadedModels(torch.device("cpu"), make_progress(False))
        draft = make_draft(drafting, groups, loaded)
        assert draft is not None and draft.runner is not None
        held = sum(p.numel() * p.element_size() for p in draft.runner.model.parameters())
        assert (plan.weights, plan.draft_weights) == (0, held)
        assert (plan.kv, plan.draft_kv) == (0, draft.runner.cache.num_bytes)


def test_every_rank_of_a_draft_needs_the_files_of_the_draft(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    whole = find_model("--model", str(tiny_checkpoint))
    _, second = split_checkpoint(whole, tmp_path / "chunks", [range(1), range(1, 2)])
    second.unlink()
    models = "--model", str(tiny_checkpoint), "--draft", f"model:{tmp_path / 'chunks'}"
    words = *models, "--dataset", str(text_file), "--layer_split", "1.0/0.5,0.5"
    prepared(tmp_path, *words)
    for rank in (1, 2):
        with pytest.raises(ValueError, match=second.name):
            prepared(tmp_path, *words, rank=rank)
