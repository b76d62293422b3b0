"""A draft model on several ranks of `magicdec pipeline`: what is refused, and what each of these
ranks is planned to hold and needs to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from magicdec.cli.serving.pipeline import parse
from magicdec.pipelined_run.prepare import check_files, prepare, stage_plans

from magicdec.console import make_progress
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.memory.plan import Models, max_tokens
from magicdec.model.checkpoint.source import find_model
from magicdec.model.checkpoint.split import split_checkpoint
from magicdec.pipelined_run.layout import make_layout
from magicdec.setup.loading import LoadedModels, make_draft
from magicdec.setup.prepare import Known, find

FLAGS = ("--prefix_len", "100", "--gen_len", "8", "--num_requests", "2", "--device", "cpu")


def prepared(tmp_path: Path, *words: str, world_size: int = 3) -> Any:
    launch = Launch(0, world_size, 0, world_size)
    asked = parse([*FLAGS, "--out", str(tmp_path / "r.jsonl"), *words], launch)
    return prepare(asked.config, asked.options, launch)


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank prepares without what the ranks tell each other."""
    monkeypatch.setattr("magicdec.memory.check.first_refusal", lambda launch, said, topic: said)
    monkeypatch.setattr("magicdec.pipelined_run.prepare.check_agreement", lambda *of: None)
    exchange = "magicdec.pipeline.auto_split.exchange_texts"
    monkeypatch.setattr(exchange, lambda launch, text, topic: [text] * launch.world_size)


@pytest.mark.usefixtures("alone")
def test_native_steps_of_several_ranks_need_collectives_that_they_can_call(tmp_path: Path) -> None:
    """Those of one rank need none."""
    for split, expected in (("1.0/0.5,0.5", "auto: off, --collectives gloo"), ("0,1.0/1.0", None)):
        words = ("--layer_split", split, "--collectives", "gloo", "--dtype", "float32")
        found = prepared(tmp_path, *words)
        choices = [found.drafting.config.draft, found.run.config.model]
        of_draft, of_target = (choice.native_steps_choice.why for choice in choices)
        assert of_draft == (expected or of_target) and "gloo" not in of_target


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", ["full", "streaming_llm"])
def test_the_plan_of_each_rank_of_a_draft_is_what_it_holds(policy: str, tmp_path: Path) -> None:
    words = ("--layer_split", "1.0/0.5,0.5", "--linear", "torch", "--kv_policy", policy)
    found = prepared(tmp_path, *words, "--dtype", "float32")
    run, drafting = found.run, found.drafting
    models = Models(run.source.config, drafting.draft_source.config)
    place = models, found.options, found.layout, range(3)
    plans = [*stage_plans((run.config, drafting.config), *place)]
    assert [plan.draft_weights > 0 for plan in plans] == [False, True, True]
    for index, plan in enumerate(plans[1:]):
        group = Group((1, 2), index)
        groups = ParallelGroups(1 + index, 3, group, draft=group)
        loaded = LoadedModels(torch.device("cpu"), make_progress(False))
        draft = make_draft(drafting, groups, max_tokens(drafting.config), loaded)
        assert draft is not None and draft.runner is not None
        held = sum(p.numel() * p.element_size() for p in draft.runner.model.parameters())
        assert (plan.weights, plan.draft_weights) == (0, held)
        assert (plan.kv, plan.draft_kv) == (0, draft.runner.cache.num_bytes)


def test_every_rank_of_a_draft_needs_the_files_of_the_draft(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    whole = find_model("--model", str(tiny_checkpoint))
    _, second = split_checkpoint(whole, tmp_path / "chunks", [range(1), range(1, 2)])
    second.unlink()
    draft = find_model("--draft", str(tmp_path / "chunks"), is_part=True)
    launch = Launch(0, 3, 0, 3)
    asked = parse([*FLAGS, "--out", str(tmp_path / "r.jsonl")], launch)
    found = replace(find(asked.config, launch, Known(), is_part=True), draft=draft)
    layout = make_layout("1.0/0.5,0.5", 3, found.source.config.num_layers)
    check_files(found, asked.options, layout, 0)
    for rank in layout.draft_ranks:
        with pytest.raises(ValueError, match=second.name):
            check_files(found, asked.options, layout, rank)
