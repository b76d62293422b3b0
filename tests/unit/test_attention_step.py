"""What attention reads in a step of a run, and that this is what is measured of every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recorder import Recorder
from test_fastest_backend import BASELINE, BFLOAT16, CPU, GPU, MODEL, STANDALONE
from torch import Tensor

from magicdec import autotune
from magicdec.attention.sdpa import SDPABackend
from magicdec.autotune import (
    Read,
    Step,
    draft_step,
    list_candidates,
    measure,
    measure_read,
    target_step,
)
from magicdec.config.resolve import resolve
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.drafting.policies.verified import VerifiedKV
from magicdec.kv.view import FULL, KVView
from magicdec.latency.forwards import largest_step
from magicdec.latency.record import Grid
from magicdec.model.config import ModelConfig


def test_the_step_is_the_runs_own() -> None:
    """What is read, how often, over how much, by which heads."""
    whole, dtype = FULL, torch.bfloat16
    verification = Read(1, 5, 1000, whole)
    drafts = Read(4, 1, 1000, StreamingLLM(16, 257))
    name = "4 drafts (streaming_llm, budget 257) and a verification of 5 tokens"
    assert target_step(BFLOAT16, MODEL) == Step(
        name, (drafts, verification), 8, 6, 3, 64, dtype, MODEL.num_layers, 64 + 4
    )
    baseline = target_step(BASELINE, MODEL)
    assert (baseline.name, baseline.reads) == ("a decode forward", (Read(1, 1, 1000, whole),))
    for drafter, draft in (("ngram", None), ("model", STANDALONE.draft)):
        decoding = replace(BFLOAT16.decoding, drafter=drafter, num_draft_tokens="auto")
        others = target_step(replace(BFLOAT16, decoding=decoding, draft=draft), MODEL)
        assert others.reads == (Read(1, 9, 1000, whole),)
        assert others.name == "a verification of 9 tokens"

    ranks = replace(BFLOAT16, parallel=replace(BFLOAT16.parallel, rank_group=(0, 1, 2)))
    assert (target_step(ranks, MODEL).num_heads, target_step(ranks, MODEL).num_kv_heads) == (2, 1)
    long = replace(BFLOAT16, workload=replace(BFLOAT16.workload, batch_size=64, prefix_len=1 << 20))
    step = target_step(long, MODEL)
    assert 1 <= step.rows < 64 and step.reads[1].context == 1 << 20


def test_the_reads_follow_the_policy() -> None:
    def reads(kv: KVSection, model: ModelConfig = MODEL) -> tuple[Read, ...]:
        return target_step(replace(BFLOAT16, kv=kv.resolve()), model).reads

    whole, window = FULL, replace(MODEL, sliding_window=500)
    assert reads(KVSection("full"))[0] == Read(4, 1, 1000, whole)
    assert reads(KVSection("snapkv", 257))[0] == Read(4, 1, 257, whole)
    assert reads(KVSection("snapkv", 5000))[0] == Read(4, 1, 1000, whole)
    assert reads(KVSection("verified", 257, 17)) == (
        Read(4, 1, 1000, VerifiedKV(17, 60, 257)),
        Read(1, 5, 1000, whole, returns_weights=True),
    )
    assert [read.window for read in reads(KVSection("streaming_llm", 257), window)] == [500, 500]
    assert [read.window for read in reads(KVSection("snapkv", 257), window)] == [None, 500]
    wide = replace(MODEL, sliding_window=5000)
    assert [read.window for read in reads(KVSection(), wide)] == [None, None]


def test_a_standalone_draft_has_a_step_of_its_own() -> None:
    draft = replace(MODEL, num_heads=4, num_kv_heads=2, sliding_window=500)
    step = draft_step(STANDALONE, draft)
    assert (step.name, step.num_heads, step.num_kv_heads) == (
        "4 drafts (streaming_llm, budget 257)", 2, 1,
    )  # fmt: skip
    assert step.reads == (Read(4, 1, 1000, StreamingLLM(16, 257)),), "rolls: no window"
    full = draft_step(replace(STANDALONE, kv=KVSection("full")), draft)
    assert full.reads == (Read(4, 1, 1000, FULL, 500),) and full.name == "4 drafts (full)"


def test_latency_is_measured_by_the_largest_step_of_its_grid() -> None:
    grid = Grid((2, 8), (100, 1000), (1, 4), (), 1, 1)
    step = target_step(largest_step(BASELINE, grid), MODEL)
    assert (step.rows, step.reads) == (8, (Read(1, 4, 1000, FULL),))
    drafts = (KVSection("streaming_llm", 257), KVSection("verified", 129))
    config = largest_step(BASELINE, replace(grid, drafts=drafts))
    drafted, verification = target_step(config, MODEL).reads
    assert (drafted.times, drafted.policy.num_visible(1000) <= 129) == (3, True)
    assert verification.returns_weights and "flashinfer" not in list_candidates(config, MODEL)[0]
    graphs = resolve(replace(BASELINE.run_config, decoding=DecodingSection(cuda_graphs="on")), GPU)
    assert largest_step(graphs, grid).decoding.cuda_graphs == "on"
    decode = largest_step(BASELINE, replace(grid, new_tokens=(1,)))
    assert target_step(decode, MODEL).name == "a decode forward"


READS = [
    Read(4, 1, 150, StreamingLLM(4, 20)),
    Read(4, 1, 150, VerifiedKV(4, 16, 64)),
    Read(4, 1, 150, VerifiedKV(4, 16, 64), window=120),
    Read(1, 3, 150, FULL, returns_weights=True),
    Read(1, 3, 150, FULL, window=30),
]


@pytest.mark.parametrize(
    "name", ["grouped", "native", pytest.param("triton", marks=pytest.mark.wide)]
)
def test_backends_agree_on_what_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    for times in ("WARMUPS", "REPEATS"):
        monkeypatch.setattr(autotune, times, 1)
    step = Step("a step", tuple(READS), 2, 4, 2, 32, torch.float32, 1, 20)
    device = torch.device("cuda" if torch.cuda.is_available() and name != "native" else "cpu")
    found, reference = measure(name, step, device), measure("sdpa", step, device)
    assert found.seconds > 0
    for read, ours, theirs in zip(READS, found.outputs, reference.outputs, strict=True):
        assert ours.shape == (2, read.num_new, 4, 32)
        assert (ours - theirs).abs().max() < 1e-5
        assert len(set(ours.flatten().tolist())) > 100, "not all the same number"
    assert len({float(output[0, -1, 0, 0]) for output in found.outputs}) == len(READS)


def test_a_recorded_run_is_measured_by_replays() -> None:
    """Over views that know no lengths on the host, but for backends that need these."""
    step = Step("a step", tuple(READS), 2, 4, 2, 32, torch.float32, 2, 20)
    recorder, eager = Recorder(), measure("sdpa", step, CPU)
    replayed = measure("sdpa", step, CPU, recorder)
    assert recorder.recorded == len(READS)
    assert recorder.replayed == len(READS) * autotune.REPEATS
    for ours, theirs in zip(replayed.outputs, eager.outputs, strict=True):
        assert (ours - theirs).abs().max() < 1e-6
    measure("grouped", step, CPU, recorder)
    assert recorder.recorded == len(READS), "it cannot be recorded, and is timed as it runs"


def test_a_recorded_view_is_as_long_as_rows_may_become() -> None:
    lengths = []

    class Watched(SDPABackend):
        def plan(self, view: KVView) -> None:
            lengths.append((view.lengths, view.num_visible, view.is_full))
            super().plan(view)

    step = Step("a step", (), 2, 4, 2, 32, torch.float32, 1, room=100)
    for read in (READS[0], READS[3]):
        measure_read(Watched(), read, step, CPU, Recorder())
    longest = 256  # whole blocks of 64 that hold 150 + 100
    draft = ((longest - 1,) * 2, (20 + 5,) * 2, False)  # the budget, and what a step may draft
    whole = ((longest - 3,) * 2, (longest - 3,) * 2, True)
    calls = autotune.WARMUPS + 1
    assert lengths == [draft] * calls + [whole] * calls


def test_what_is_measured_is_what_is_read() -> None:
    """Views as the run makes them, one plan for the layers, keys that differ by head."""
    seen: list[KVView] = []

    class Watched(SDPABackend):
        def plan(self, view: KVView) -> None:
            seen.append(view)
            super().plan(view)

        def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
            assert view is seen[-1]
            seen.append(view)
            return super().run(layer, q, k, v, view)

    step = Step("a step", (), 2, 4, 2, 32, torch.float32, num_layers=3, room=20)
    for read in READS:
        seen.clear()
        measure_read(Watched(), read, step, CPU)
        calls = autotune.WARMUPS + autotune.REPEATS
        assert len(seen) == calls * (1 + 3), "a plan and three layers each"
        view, policy = seen[0], read.policy
        assert (view.num_new, view.window, view.lengths) == (read.num_new, read.window, (150, 150))
        if isinstance(policy, VerifiedKV):
            policy = replace(policy, sliding_window=read.window)
            shown = view.layer_ranges(0).flatten(0, 1)
            assert view.per_head and len(shown.unique(dim=0)) > 1, "each head looked elsewhere"
        within = read.window or 151  # the next token counts too
        assert set(view.num_visible) == {min(policy.num_visible(150), within - 1)}
