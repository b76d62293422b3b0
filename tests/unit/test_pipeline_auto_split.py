"""`magicdec pipeline --layer_split auto`: what is timed on which rank, and the choice that follows.
Measured times have no bounds, so only what was computed is known; choices are made from given
times."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_command import prepare_as

from magicdec.distributed.groups import Launch
from magicdec.distributed.layout import PipelineLayout, make_layout
from magicdec.systems.modes import Pass
from magicdec.systems.pipeinfer.run_stage import RunStage
from magicdec.systems.pipeinfer.system import PipeInfer, RunTiming
from magicdec.systems.stages.auto_split import STEPS, DecodeStep, RankTimes

WORDS = ("--num_requests", "2", "--threads", "1")
NGRAM = ("--gamma", "3", "--draft", "ngram")


def prepared(tmp_path: Path, *words: str, **place: Any) -> PipeInfer:
    system = prepare_as("pipeline", tmp_path, *WORDS, *words, **place).system_of(
        Pass.named("pipeline")
    )
    assert isinstance(system, PipeInfer)
    return system


@pytest.fixture
def alone(tmp_path: Path) -> PipeInfer:
    """On one rank, where `auto` needs no times."""
    return prepared(tmp_path, "--layer_split", "auto", *NGRAM)


def test_one_stage_needs_no_times(alone: PipeInfer, tmp_path: Path) -> None:
    assert (alone.split, alone.layer_split) == ("", "6")
    other = prepared(tmp_path, "--layer_split", "1.0/head", *NGRAM)
    assert other.layer_split == "1.0/head", "as the user wrote it"


class SplitChoice:
    """What rank 0 chooses, where rank i finds `times[i]` on a host of its own: the split and the
    reason. And what was timed."""

    def __init__(
        self, tmp_path: Path, split: str, times: list[RankTimes | None], *words: str
    ) -> None:
        steps = list[DecodeStep]()

        def find(timing: RunTiming) -> RankTimes | None:
            steps.append(timing.step)
            return times[0]

        def exchange(launch: Launch, text: str, topic: str = "") -> list[str]:
            if topic != "layer split":
                return [text] * launch.world_size
            facts = json.loads(text)
            others = (
                facts
                | {"host": rank, "times": None if stage_times is None else asdict(stage_times)}
                for rank, stage_times in enumerate(times)
            )
            return [text, *map(json.dumps, [*others][1:])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunTiming, "find_times", find)
            place: dict[str, Any] = {"world_size": len(times), "exchange": exchange}
            system = prepared(tmp_path, "--layer_split", split, *words, **place)
        layout = make_layout(split, len(times), 6)
        assert system.layout.stages == layout.stages
        assert system.layout.draft_rank == layout.draft_rank
        (self.step,) = steps
        self.split = system.layer_split
        self.reason = system.split


EMBEDS, PASSES, HEAD = (RankTimes(1e-3, 0.0, own) for own in (1e-4, None, 2.5e-3))


def test_a_slower_rank_and_one_with_the_head_get_fewer_layers(tmp_path: Path) -> None:
    chosen = SplitChoice(tmp_path, "auto/head", [EMBEDS, HEAD], *NGRAM)
    assert chosen.split == "4,2/head" and chosen.step == DecodeStep(1, 104, 3)
    assert chosen.reason == (
        "--layer_split 4,2/head: the stages are predicted to take 4.1, 4.5 ms, from 1 ms a layer "
        "and 0.1, 2.5 ms beside layers (measured for runs of 4 rows after 104 tokens)"
    )
    slow = replace(EMBEDS, layer_s=5e-3)
    assert SplitChoice(tmp_path, "auto/1.0", [slow, HEAD, None], *NGRAM).split == "1,5/1.0"
    assert SplitChoice(tmp_path, "auto/1.0", [EMBEDS, HEAD, None]).split == "4,2/1.0"
    assert SplitChoice(tmp_path, "0,auto", [None, PASSES, HEAD], *NGRAM).split == "0,4,2"
    assert SplitChoice(tmp_path, "auto", [EMBEDS, PASSES, HEAD], *NGRAM).split == "2,3,1"


@pytest.mark.parametrize(
    ("words", "gamma"),
    [(["--modes", "pipeline"], 0), (["--gamma", "99", "--draft", "ngram"], 7)],
)
def test_runs_have_one_row_without_drafts_and_never_more_than_an_output(
    words: list[str], gamma: int, tmp_path: Path
) -> None:
    step = SplitChoice(tmp_path, "auto", [EMBEDS, HEAD], *words).step
    assert step == DecodeStep(1, 104, gamma)


def timing_of(alone: PipeInfer, layout: PipelineLayout) -> RunTiming:
    """Runs of three rows after 50 tokens, on the first rank."""
    return RunTiming(alone.run, [(rank,) for rank in layout.stages], DecodeStep(1, 50, 2))


def test_each_rank_times_a_layer_and_its_own_end_of_the_model(
    alone: PipeInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicdec.systems.stages.auto_split.ROUNDS", 1)
    computed = list[tuple[object, ...]]()
    compute = RunStage.compute

    def noted(part: RunStage, launch: Any, *place: Any) -> Any:
        out = compute(part, launch, *place)
        model = part.runner.model
        assert isinstance(out, tuple) == model.has_head
        assert not model.has_head or len(out) == 2 * launch.num_rows, "tokens and margins"
        assert torch.get_num_threads() == 1, "as in the run"
        assert part.runner.cache.lengths == [53], "50 tokens, and a run that replaces the last one"
        ends = model.has_embedding, model.has_head
        computed.append((part.num_layers, *ends, launch.num_rows, launch.positions[0]))
        return out

    monkeypatch.setattr(RunStage, "compute", noted)
    layout = make_layout("0,auto/1.0", 5, 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    timing = timing_of(alone, layout)
    passing = {(1, False, False, 3, 50), (4, False, False, 3, 50)}
    own = {1: {(1, True, False, 3, 50)}, 2: set[Any](), 3: {(1, False, True, 3, 50)}}
    for rank, passes in own.items():
        computed.clear()
        here = replace(alone.run, launch=Launch(rank, 5, rank, 5))
        times = replace(timing, run=here).measure()
        assert set(computed) == passing | passes
        assert len(computed) % (STEPS + 1) == 0 and times.layer_s > 0
        assert (times.own_fixed_s is None) == (rank == 2)
        assert times.own_fixed_s is None or times.own_fixed_s >= times.fixed_s >= 0
    assert torch.get_num_threads() == 2, "as before"
    torch.set_num_threads(threads)
    computed.clear()
    assert timing.find_times() is None, "the head has no layers"
    assert computed == []
