"""A ring of `magicdec serve`: what is refused before any rank starts, in one line; the predicted
round; and what a stage needs of the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_command import parse_as, prepare_as

from magicdec.bench.prepare import PreparedServing
from magicdec.distributed.groups import Launch
from magicdec.setup.model_plan import max_tokens
from magicdec.systems.mdi_llm.details import DraftCounts, StageUse, ring_metrics
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.mdi_llm.system import MDILLM
from magicdec.systems.mdi_llm.timing import RingTiming
from magicdec.systems.modes import Pass
from magicdec.systems.stages.auto_split import DecodeStep

FOUR = ("--num_requests", "4")


def prepared(tmp_path: Path, *words: str, world_size: int = 2) -> PreparedServing:
    return prepare_as("recurrent", tmp_path, *FOUR, *words, world_size=world_size)


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        (["--layer_split", "3,2"], 2, "--layer_split 3,2 adds up to 5 layers; the model has 6"),
        (["--layer_split", "2,2,2"], 2, "--layer_split 2,2,2 names 3 ranks, but 2 were"),
        (["--layer_split", "2,4"], 3, "start 2, or equally many ranks for each"),
        (["--layer_split", "auto:2"], 3, "--layer_split auto:2 names 2 ranks, but 3 were"),
        (["--layer_split", "auto", "--num_requests", "7"], 7, "--layer_split auto: 7 stages"),
        (["--layer_split", "auto", "--emulate_stage_ms", "5"], 2, "--layer_split auto: with"),
        (["--layer_split", "half"], 1, "--layer_split half is not known"),
        (["--num_requests", "7"], 7, "7 stages cannot share 6 layers"),
        (["--native_steps", "on", "--collectives", "gloo"], 2, "--native_steps on"),
        (["--prefix_len", "1000000"], 2, "exceeds"),
        (["--model", "random:llama-3.1-8b", "--layer_split", "16,15"], 2, "adds up to 31 layers"),
        (["--draft", "model:demo-draft", "--draft_ranks", "0"], 2, "--draft_ranks does nothing"),
        (["--modes", "ring", "--cuda_graphs", "off"], 2, "no mode of --modes ring uses it"),
        (["--layer_split", "1.0/0.5,0.5"], 2, "behind the slash is head, or 1.0 for a rank"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], world_size: int, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as refusal:
        prepared(tmp_path, *words, world_size=world_size)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        "magicdec",
        "model's norm_eps",
        "model's weights",
        "settings of mdi_llm",
        "layers of ring",
        "layers of pipeline",
        "messages of pipeline",
    ],
)
def test_ranks_that_disagree_are_refused(name: str, tmp_path: Path) -> None:
    def exchange(launch: Launch, text: str, topic: str = "") -> list[str]:
        facts = json.loads(text) if text.startswith("{") else {}
        others = dict.fromkeys((fact for fact in facts if fact.startswith(name)), "other")
        return [text, text, json.dumps(facts | others) if facts else text]

    with pytest.raises(ValueError, match=f"{name}.*: rank 0 has .*, rank 2 has other"):
        words = *FOUR, "--modes", "ring", "pipeline"
        prepare_as("recurrent", tmp_path, *words, world_size=3, exchange=exchange)


def test_metrics_of_a_ring() -> None:
    uses = [StageUse(10.0, 1.0, 0.04, 7, 3, 5.0), StageUse(10.0, 5.0, 0.02, 9, 4, 1.0, [0.0005])]
    ring = ring_metrics([1, 2], 1, (2, 3), uses, 64, 80.5)
    assert ring.busy == [0.9, 0.5] and ring.sent_bytes == [7, 9]
    assert ring.queue_depth == [0.5, 0.1] and ring.sent_messages == [3, 4]
    assert ring.decode_ms == [pytest.approx(40), pytest.approx(20)]
    assert ring.predicted_round_ms == pytest.approx(80) and ring.link_ms == pytest.approx(0.5)
    empty = ring_metrics([1], 1, (1, 1), [StageUse(0.0, 0.0, None, 0, 0, 0.0)], 64, None)
    assert empty.busy == [0.0] and empty.decode_ms is empty.predicted_round_ms is None


def test_metrics_of_drafts() -> None:
    counts = DraftCounts(10, 5, 0.02)
    ring = ring_metrics([1], 1, (1, 2), [StageUse(1.0, 0.0, 1.0, 0, 5, 0.0)], 64, None, counts, 33)
    assert ring.tokens_per_round == 3.3 and ring.draft_ms == pytest.approx(4)


def test_a_draft_model_is_on_the_first_rank_in_one_more_pass(tmp_path: Path) -> None:
    words = "--draft", "model:demo-draft", "--gamma", "2"
    system = prepared(tmp_path, *words).system_of(Pass.named("ring"))
    assert [serving_pass.name for serving_pass in system.passes] == ["ring", "ring+draft"]
    plain, drafting = (system.config_of(serving_pass) for serving_pass in system.passes)
    assert plain["draft"] is None and plain["decoding"]["drafter"] is None
    assert drafting["draft"]["rank_group"] == (0,)
    alone = prepared(tmp_path, world_size=1).system_of(Pass.named("ring"))
    assert max_tokens(system.run.config) == max_tokens(alone.run.config) + 2
    first, second = (system.plan(Pass.named("ring+draft"), [rank]) for rank in (0, 1))
    assert first.draft_weights > 0 and first.draft_kv > 0
    assert second.draft_weights == second.draft_kv == 0
    undrafted = system.plan(Pass.named("ring"), [0])
    assert undrafted.draft_weights == undrafted.draft_kv == 0


def test_one_rank_has_no_tensor_parallelism_to_compare_with(tmp_path: Path) -> None:
    for world_size, count in ((1, 3), (2, 4)):
        options = parse_as("recurrent", tmp_path, world_size=world_size).options
        assert len(options.passes) == count and options.passes[-1].name == "ring"


def test_times_of_layers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured has no bounds, so only its order is known: the first stage does more."""
    monkeypatch.setattr("magicdec.systems.stages.auto_split.ROUNDS", 1)
    ring = prepared(tmp_path, "--layer_split", "auto", world_size=1).system_of(Pass.named("ring"))
    assert isinstance(ring, MDILLM)
    assert ring.layer_split == "6" and ring.split == ""
    config = ring.run.config
    threads = torch.get_num_threads()
    step = DecodeStep(rows=2, context=50)
    computed = list[tuple[int, int]]()
    compute = Stage.compute

    def noted(stage: Stage, x: torch.Tensor, *place: Any, **more: Any) -> torch.Tensor:
        computed.append((len(x), len(x[0])))
        return compute(stage, x, *place, **more)

    monkeypatch.setattr(Stage, "compute", noted)
    for drafting, expected in ((None, step), ("ngram", replace(step, gamma=3))):
        decoding = replace(config.decoding, drafter=drafting, gamma=3)
        run = replace(ring.run, config=replace(config, decoding=decoding))
        computed.clear()
        times = RingTiming(run, [(0,)], expected).measure()
        assert set(computed) == {(2, expected.num_tokens)}, "rows and tokens of every timed message"
        assert times.layer_s > 0 and times.own_fixed_s is not None
        assert times.own_fixed_s >= times.fixed_s >= 0
    second = replace(ring.run, launch=Launch(1, 2, 1, 2))
    other = RingTiming(second, [(0,), (1,)], step).measure()
    assert other.layer_s > 0 and other.own_fixed_s is None
    assert torch.get_num_threads() == threads
