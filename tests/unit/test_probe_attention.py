"""`magicdec probe --attention`, also of runs on CUDA, tried on the CPU: what attention reads in a
step of a run, that this is what is measured, which backends are measured, which is the fastest, and
what is said of the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY
from recorder import Recorder
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.cli import probe as command
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch
from magicdec.kv.view import FULL, KVView
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.config import LayerKind, ModelConfig
from magicdec.predict import probe_attention
from magicdec.predict.probe_attention import (
    BackendTime,
    MeasuredAttention,
    Read,
    Step,
    draft_step,
    fastest_of,
    list_candidates,
    measure,
    measure_backends,
    measure_read,
    step_seconds,
    steps_of,
    target_step,
    time_backend,
)
from magicdec.setup.prepare import ResolvedRun
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.policies.verified import VerifiedKV
from magicdec.speculation.steps import recorder as recorder_module
from magicdec.speculation.steps.recorder import Eager

CPU = torch.device("cpu")
MODEL = replace(TINY, head_dim=64)
GPU = Machine(2, has_cuda=True)
ASKED = RunConfig(
    model=ModelSection(dtype="bfloat16"),
    parallel=ParallelSection(rank_group=(0,), device="cuda"),
    decoding=DecodingSection("speculative", "self", cuda_graphs="off"),
    workload=WorkloadSection(batch_size=8, prefix_len=1000),
)
ASKED_STANDALONE = replace(
    ASKED,
    draft=DraftSection(rank_group=(0, 2)),
    decoding=DecodingSection("speculative", "model", cuda_graphs="off"),
)
BFLOAT16 = resolve(ASKED, GPU)
BASELINE = resolve(replace(ASKED, decoding=DecodingSection(cuda_graphs="off")), GPU)
STANDALONE = resolve(ASKED_STANDALONE, GPU)
ONES = (torch.ones(2, 2),)


def run_of(
    config: ResolvedConfig, model: ModelConfig = MODEL, machine: Machine = GPU
) -> ResolvedRun:
    """The run of `config`, whose target has the shape of `model` and no weights."""
    source = ModelSource("plain", model, RandomWeights({}), None, is_random=True)
    return ResolvedRun(config, Launch(), machine, source)


def test_the_fastest_is_that_of_all_layers() -> None:
    """Of both models together, where a standalone draft has other heads and layers."""
    times = [
        BackendTime("sdpa", (3e-3, 3e-3)),
        BackendTime("triton", (1e-3, 2e-3)),
        BackendTime("flash_attn", (2e-3, 1e-3)),
        BackendTime("grouped", obstacle="why"),
    ]
    assert fastest_of(times, [10, 2]).name == "triton"
    assert fastest_of(times, [2, 10]).name == "flash_attn"
    assert step_seconds(times[1], [10, 2]) == pytest.approx(14e-3)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ImportError("no kernel image\nfor this device"), "no kernel image"),
        (AssertionError(), "AssertionError"),
        (
            MeasuredAttention(1e-9, (*ONES, ONES[0] + 0.5)),
            "its output is 5.0e-01 away from that of sdpa",
        ),
        (
            MeasuredAttention(1e-9, (ONES[0] * torch.nan, *ONES)),
            "its output is nan away from that of sdpa",
        ),
    ],
    ids=str,
)
def test_who_fails_or_is_wrong_has_no_time(found: object, why: str) -> None:
    def timer(name: str) -> list[MeasuredAttention]:
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, MeasuredAttention)
        return [found]

    reference = [MeasuredAttention(1.0, ONES * 2)]
    assert time_backend("triton", timer, reference) == BackendTime("triton", obstacle=why)


def test_rounding_of_large_outputs_is_no_disagreement() -> None:
    """Above 4 the neighbours in bfloat16 are further apart than what outputs below 1 may differ."""
    outputs = {"sdpa": (4.0, 0.5), "grouped": (4.0 + 2**-5, 0.5), "triton": (4.0, 0.5 + 2**-4)}

    def timer(name: str) -> list[MeasuredAttention]:
        found = tuple(torch.tensor([x], dtype=torch.bfloat16) for x in outputs[name])
        return [MeasuredAttention(1.0, found)]

    reference = timer("sdpa")
    assert time_backend("grouped", timer, reference).seconds == (1.0,)
    assert "its output is 6.2e-02 away" in time_backend("triton", timer, reference).obstacle


def test_an_error_of_the_reference_is_nobodys_fault_but_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> MeasuredAttention:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(probe_attention, "measure", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(measure_backends(run_of(BFLOAT16), Group((0,), 0), CPU))


def test_candidates_are_what_can_serve() -> None:
    everything = ["sdpa", "grouped", "triton", "flash_attn"]
    assert list_candidates(run_of(BFLOAT16)) == (everything, {})

    float32 = replace(BFLOAT16, model=replace(BFLOAT16.model, dtype="float32"))
    candidates, left_out = list_candidates(run_of(float32))
    assert candidates == ["sdpa", "grouped", "triton"]
    assert left_out["flash_attn"] == "flash_attn is for --dtype bfloat16, not float32"

    verified = replace(BFLOAT16, kv=KVSection("verified"))
    candidates, left_out = list_candidates(run_of(verified))
    assert candidates == ["sdpa", "grouped", "triton"]
    assert left_out["flash_attn"] == "flash_attn does not return attention weights"

    alibi = replace(MODEL, num_kv_heads=6, positions="alibi")
    candidates, left_out = list_candidates(run_of(BFLOAT16, alibi))
    assert "grouped" not in candidates and "too coarse for ALiBi" in left_out["grouped"]

    candidates, left_out = list_candidates(
        run_of(BFLOAT16, replace(MODEL, layer_kinds=(LayerKind(1000),)))
    )
    assert candidates == ["sdpa", "grouped", "triton"]
    assert left_out["flash_attn"] == "flash_attn does not keep to a sliding window"
    wide = replace(MODEL, layer_kinds=(LayerKind(1 << 20),))
    assert list_candidates(run_of(BFLOAT16, wide))[0] == everything

    bare = replace(GPU, missing_backends={"flash_attn": "not installed"})
    candidates, left_out = list_candidates(run_of(BFLOAT16, MODEL, bare))
    assert candidates == everything[:-1] and left_out == {"flash_attn": "not installed"}


class Slow(SDPABackend):
    """By its own clock a layer takes `on_full` seconds or `on_others`; telling the mass, 1 more."""

    def __init__(self, clock: list[float], on_full: float, on_others: float) -> None:
        super().__init__()
        self.clock, self.on_full, self.on_others = clock, on_full, on_others

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        self.clock[0] += self.on_full if view.is_full else self.on_others
        return super().run(layer, q, k, v, view)

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        self.clock[0] += 1.0
        return super().run_with_weights(layer, q, k, v, view)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn` is fast on full views and slow on others, `triton` in between on all."""
    clock = [0.0]
    speeds = {"sdpa": (50.0, 50.0), "flash_attn": (1.0, 3.0), "triton": (2.0, 2.0)}
    monkeypatch.setattr(probe_attention, "make_backend", lambda name: Slow(clock, *speeds[name]))
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])


@pytest.mark.parametrize(
    ("kv", "gamma", "flash_attn", "triton"),
    [
        (None, 4, 1, 2),
        (KVSection("streaming_llm", 18), 4, 4 * 3 + 1, 5 * 2),
        (KVSection("streaming_llm", 41), 4, 5, 10),  # the budget leaves nothing out
        (KVSection("snapkv", 18, window_size=8), 4, 5, 10),
        (KVSection("verified", 32, 4), 4, 4 * 3 + 1 + 1, 5 * 2 + 1),
    ],
    ids=str,
)
def test_slow_on_what_the_drafts_read_loses_only_where_they_read_it(
    stand_ins: None, kv: KVSection | None, gamma: int, flash_attn: int, triton: int
) -> None:
    drafting = replace(BFLOAT16.decoding, gamma=gamma)
    decoding = drafting if kv else BASELINE.decoding
    config = replace(
        BFLOAT16,
        model=replace(BFLOAT16.model, dtype="float32"),
        decoding=decoding,
        kv=(kv or KVSection()).resolve(),
        workload=replace(BFLOAT16.workload, batch_size=2, prefix_len=40),
    )
    step = target_step(config, MODEL)
    found = {name: measure(name, step, CPU).seconds for name in ("flash_attn", "triton")}
    assert found == pytest.approx({"flash_attn": flash_attn, "triton": triton})


def test_both_models_are_measured_each_with_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(name: str, step: Step, device: torch.device, recorder: object) -> MeasuredAttention:
        return MeasuredAttention({"triton": 1.0}.get(name, 2.0) * step.head_dim, ONES)

    monkeypatch.setattr(probe_attention, "measure", timer)
    draft = ModelSource("d", replace(MODEL, head_dim=32), RandomWeights({}), None, is_random=True)
    config = resolve(replace(ASKED_STANDALONE, draft=DraftSection()), GPU)
    run = replace(run_of(config), draft_source=draft)
    assert [step.name for _, step in steps_of(run)] == [
        "a verification of 5 tokens",
        "4 drafts (streaming_llm, budget 257)",
    ]
    times = list(measure_backends(run, Group((0,), 0), CPU))
    assert times[0].name == "sdpa", "the others are compared with it"
    assert {each.name: each.seconds for each in times}["triton"] == (64.0, 32.0)


@pytest.mark.parametrize("graphs", ["auto", "on", "off"])
def test_recorded_steps_are_measured_recorded(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what no graph can hold is left out then."""
    given = set()

    def timer(name: str, step: Step, device: torch.device, recorder: object) -> MeasuredAttention:
        given.add(recorder)
        return MeasuredAttention(1.0, ONES)

    monkeypatch.setattr(probe_attention, "measure", timer)
    monkeypatch.setattr(recorder_module, "CudaGraphs", lambda device: f"graphs of {device}")
    asked = replace(ASKED, decoding=replace(ASKED.decoding, cuda_graphs=graphs))
    times = list(measure_backends(run_of(resolve(asked, GPU)), Group((0,), 0), CPU))
    assert given == ({Eager()} if graphs == "off" else {"graphs of cpu"})
    grouped = next(each for each in times if each.name == "grouped")
    why = "grouped needs lengths on the host; --cuda_graphs off measures it"
    assert grouped.obstacle == ("" if graphs == "off" else why)


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
    for drafter, draft, tokens in (("ngram", None, 32), ("model", STANDALONE.draft, 9)):
        decoding = replace(BFLOAT16.decoding, drafter=drafter, gamma="auto")
        others = target_step(replace(BFLOAT16, decoding=decoding, draft=draft), MODEL)
        assert others.reads == (Read(1, tokens, 1000, whole),)
        assert others.name == f"a verification of {tokens} tokens"

    kinds = (LayerKind(300), LayerKind(), LayerKind(300), LayerKind(5000))
    mixed = target_step(BFLOAT16, replace(MODEL, num_layers=4, layer_kinds=kinds))
    assert mixed.reads == (
        replace(drafts, share=0.5),
        replace(drafts, share=0.5, window=300),
        replace(verification, share=0.5),
        replace(verification, share=0.5, window=300),
    )
    ranks = replace(BFLOAT16, parallel=replace(BFLOAT16.parallel, rank_group=(0, 1, 2)))
    assert (target_step(ranks, MODEL).num_heads, target_step(ranks, MODEL).num_kv_heads) == (2, 1)
    long = replace(BFLOAT16, workload=replace(BFLOAT16.workload, batch_size=64, prefix_len=1 << 20))
    step = target_step(long, MODEL)
    assert 1 <= step.rows < 64 and step.reads[1].context == 1 << 20


def test_the_reads_follow_the_policy() -> None:
    def reads(kv: KVSection, model: ModelConfig = MODEL) -> tuple[Read, ...]:
        return target_step(replace(BFLOAT16, kv=kv.resolve()), model).reads

    whole, window = FULL, replace(MODEL, layer_kinds=(LayerKind(500),))
    assert reads(KVSection("full"))[0] == Read(4, 1, 1000, whole)
    assert reads(KVSection("snapkv", 257))[0] == Read(4, 1, 257, whole)
    assert reads(KVSection("snapkv", 5000))[0] == Read(4, 1, 1000, whole)
    assert reads(KVSection("verified", 257, 17)) == (
        Read(4, 1, 1000, VerifiedKV(17, 60, 257)),
        Read(1, 5, 1000, whole, returns_weights=True),
    )
    assert [read.window for read in reads(KVSection("streaming_llm", 257), window)] == [500, 500]
    assert [read.window for read in reads(KVSection("snapkv", 257), window)] == [None, 500]
    wide = replace(MODEL, layer_kinds=(LayerKind(5000),))
    assert [read.window for read in reads(KVSection(), wide)] == [None, None]


def test_a_standalone_draft_has_a_step_of_its_own() -> None:
    draft = replace(MODEL, num_heads=4, num_kv_heads=2, layer_kinds=(LayerKind(500),))
    step = draft_step(STANDALONE, draft)
    assert (step.name, step.num_heads, step.num_kv_heads) == (
        "4 drafts (streaming_llm, budget 257)", 2, 1,
    )  # fmt: skip
    assert step.reads == (Read(4, 1, 1000, StreamingLLM(16, 257)),), "rolls: no window"
    full = draft_step(replace(STANDALONE, kv=KVSection("full")), draft)
    assert full.reads == (Read(4, 1, 1000, FULL, 500),) and full.name == "4 drafts (full)"


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
        monkeypatch.setattr(probe_attention, times, 1)
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
    assert recorder.replayed == len(READS) * probe_attention.REPEATS
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
    calls = probe_attention.WARMUPS + 1
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
        calls = probe_attention.WARMUPS + probe_attention.REPEATS
        assert len(seen) == calls * (1 + 3), "a plan and three layers each"
        view, policy = seen[0], read.policy
        assert (view.num_new, view.window, view.lengths) == (read.num_new, read.window, (150, 150))
        if isinstance(policy, VerifiedKV):
            policy = replace(policy, sliding_window=read.window)
            shown = view.layer_ranges(0).flatten(0, 1)
            assert view.per_head and len(shown.unique(dim=0)) > 1, "each head looked elsewhere"
        within = read.window or 151  # the next token counts too
        assert set(view.num_visible) == {min(policy.num_visible(150), within - 1)}


def test_the_command_prints_the_table_and_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It measures what can serve here, and says what auto takes and what is the fastest."""
    for times in ("WARMUPS", "REPEATS"):
        monkeypatch.setattr(probe_attention, times, 1)
    seconds = {"grouped": 0.1, "sdpa": 0.2}
    timed = probe_attention.measure

    def measure_both(name: str, *arguments: Any) -> MeasuredAttention:
        return replace(timed(name, *arguments), seconds=seconds.get(name, 3.0))

    monkeypatch.setattr(probe_attention, "measure", measure_both)
    flags = "--attention --device cpu --dtype float32 --B 2 --prefix_len 90 --gen_len 4 --gamma 2"
    assert command.run([*flags.split(), "--budget", "40", "--threads", "1"], Launch()) == 0
    out = capsys.readouterr().out
    assert "target: 2 drafts (streaming_llm, budget 40) and a verification of 3 tokens" in out
    assert "--attention grouped was the fastest; auto takes " in out
    # The demo model has 6 layers.
    (line,) = (line for line in out.splitlines() if "grouped" in line and "fastest" not in line)
    assert "100.000" in line and "600.000" in line
    assert out.index("grouped") < out.index("sdpa")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--B 4", "--B does nothing here: it describes a run, for --attention"),
        ("--draft self", "--draft does nothing here: it describes a run, for --attention"),
        ("--attention --out m.json", "--out does nothing here: --attention prints what it finds"),
        ("--attention --draft none --gamma 3", "--gamma does nothing here: autoregressive"),
        ("--attention --draft ngram --budget 65", "--budget does nothing here: prompt lookup"),
        ("--attention --draft nonsense", "--draft nonsense is not known; choose from self"),
        ("--attention --kv_policy full --window_size 8", "--window_size does nothing here"),
    ],
)
def test_flags_that_the_measurement_does_not_use_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        command.parse(flags.split())
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
