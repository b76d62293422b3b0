"""The verdict on whole runs with faults in their verifications: what honest runs pass, and what
sees which fault. And what is kept of steps of every kind is what they were judged by."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from lossy import ATTACKS, planted, short_run
from recorder import StandInRecorder

from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.check import wider
from magicdec.bench.check.judgement import judge_again
from magicdec.bench.measure import execute
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.distributed.groups import Launch
from magicdec.engine.engine import Engine
from magicdec.records.correctness import Correctness, JudgedAgain
from magicdec.records.pass_record import PassRecord
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.setup.prepare import prepare
from magicdec.speculation.steps.logits_recorder import LogitsRecorder
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy


@cache
def run(dtype: str, attack: str = "nothing") -> PassRecord:
    config = short_run(dtype, num_rows=4)
    config = replace(config, workload=replace(config.workload, prefix_len=96))
    with planted(ATTACKS[attack]("sdpa")):
        return execute(prepare(config, Launch(0, 1, 0, 1))).record


def verdict_of(record: PassRecord) -> Correctness:
    assert record.correctness is not None and (record.metrics is None) == (not record.passed)
    return record.correctness


@pytest.mark.narrow(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_honest_run_passes_and_says_what_could_hide(dtype: str) -> None:
    record = run(dtype)
    found = verdict_of(record)
    judged = found.judged_again
    forwards = found.forwards
    assert record.passed and judged is not None and forwards is not None
    assert judged.num_steps == judged.num_steps_of_all > 60 and judged.num_wrong == 0
    assert judged.num_tokens >= 2 * 4 * 47
    assert forwards.num_positions > 80 and forwards.num_unequal > 50
    assert forwards.decode_error is not None and forwards.hidden_error is not None
    least, most = (0.01, 0.05) if dtype == "bfloat16" else (1e-7, 1e-5)
    assert least < forwards.decode_error < most and forwards.hidden_error < 4 * most


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("dtype", "attack", "part"),
    [
        pytest.param("bfloat16", "accept within 0.06", "judgement", marks=WIDE),
        pytest.param("bfloat16", "noise 0.03", "error_ratio", marks=WIDE),
        pytest.param("bfloat16", "16 KV tokens dropped", "error_ratio", marks=WIDE),
        pytest.param("bfloat16", "a head zeroed", "error_ratio", marks=WIDE),
        ("float32", "accept within 0.06", "judgement"),
        pytest.param("float32", "noise 0.01", "error_ratio", marks=WIDE),
        ("float32", "1 KV token dropped", "error_ratio"),
        pytest.param("float32", "a head 10 % too small", "error_ratio", marks=WIDE),
    ],
)
def test_a_fault_in_verifications_is_seen(dtype: str, attack: str, part: str) -> None:
    record = run(dtype, attack)
    found = verdict_of(record)
    assert record.status == "mismatch" and found.judged_again is not None
    assert found.forwards is not None
    assert (found.judged_again.num_wrong > 0) == (part == "judgement")
    assert (part in found.forwards.alarms) == (part != "judgement")


def decode(
    runner: ModelRunner,
    decoding: DecodingSection,
    recorder: Any = Eager(),
    sampling: SamplingSection = SamplingSection(),
) -> tuple[LogitsRecorder, list[Any], list[list[int]]]:
    """A pass whose steps are all kept."""
    engine = Engine(runner, 64)
    prompts = [(*prompt[:20], *prompt[:20]) for prompt in random_prompts((20, 20, 20), 97)]
    requests = make_requests(prompts, [24, 17, 21], sampling=sampling)
    engine.prefill(requests)
    logits_recorder = LogitsRecorder.of(runner, 3, 8, 24, "1", 8)
    setup = Setup(
        runner,
        decoding,
        KVSection("streaming_llm", 17, num_sink_tokens=2),
        recorder=recorder,
        logits_recorder=logits_recorder,
    )
    strategy = make_strategy("speculative", setup)
    engine.begin(strategy)
    logits_recorder.is_watching = True
    finished = engine.decode(strategy)
    return logits_recorder, finished, [request.output_ids for request in finished]


SELF = DecodingSection("speculative", "self", 3)
KINDS = {
    "chain": SELF,
    "lookups of several lengths": DecodingSection("speculative", "ngram", 5),
    "penalties": SELF,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("trusted_lookups")
def test_steps_of_every_kind_are_judged_again_as_they_were(kind: str) -> None:
    """Every step of every row is kept, and a logit that changes shows."""
    sampling = SamplingSection()
    if kind == "penalties":
        sampling = SamplingSection(repetition_penalty=1.4, presence_penalty=0.3)
    runner = make_runner(tiny_transformer(), 3, 96, NativeBackend())
    recorder, finished, outputs = decode(runner, KINDS[kind], sampling=sampling)
    found = judge_again(recorder, finished, runner)
    assert found.num_wrong == 0 and found.num_steps == found.num_steps_of_all > 3
    assert found.num_tokens >= sum(len(output) - 1 for output in outputs)
    assert any(step.drafts.shape[1] for step in recorder.steps)
    last = recorder.steps.pop()
    logits = last.logits.clone()
    logits[0, 0, (last.verdicts.ids[0][0] + 1) % TINY.vocab_size] = 1e3
    recorder.steps.append(replace(last, logits=logits))
    assert judge_again(recorder, finished, runner).num_wrong == 1


def test_replayed_steps_leave_their_logits() -> None:
    model = tiny_transformer()
    eager, _, outputs = decode(make_runner(model, 3, 96, SDPABackend()), SELF)
    runner = make_runner(model, 3, 96, SDPABackend())
    recorder = StandInRecorder()
    replayed, finished, found = decode(runner, SELF, recorder)
    assert found == outputs and recorder.replayed > 3
    judged = judge_again(replayed, finished, runner)
    assert judged.num_wrong == 0 and judged.num_steps == judged.num_steps_of_all
    assert len(replayed.steps) == len(eager.steps)
    for ours, theirs in zip(replayed.steps, eager.steps, strict=True):
        assert ours.num_output == theirs.num_output and ours.logits.shape == theirs.logits.shape
        assert (ours.logits - theirs.logits).abs().max() < 1e-4


@pytest.mark.wide
def test_a_wider_model_may_be_loaded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few layers and a few positions at a time it says the same."""
    whole = verdict_of(run("float32")).forwards
    monkeypatch.setattr(wider, "PART_BYTES", 1 << 24)
    monkeypatch.setattr(wider, "LOGIT_BYTES", 1 << 20)
    monkeypatch.setattr(wider, "TILE_TOKENS", 40)
    parts = verdict_of(run.__wrapped__("float32")).forwards
    assert whole is not None and parts is not None
    assert parts.num_measured == whole.num_measured
    assert parts.decode_error == pytest.approx(whole.decode_error, rel=1e-6)
    assert parts.verify_error == pytest.approx(whole.verify_error, rel=1e-6)


def test_the_wider_model_reads_the_prompts_of_the_run() -> None:
    """Its logits are those of the run's own float64 model, whatever the layout of the cache."""
    model = tiny_transformer()
    backend = NativeBackend()
    runner = make_runner(model, 2, 96, backend)
    engine = Engine(runner, 64)
    requests = make_requests(random_prompts((70, 33), 97), 2)
    engine.prefill(requests)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    texts = wider.WiderTexts(runner, lambda part: copy.deepcopy(model).double(), SDPABackend)
    (chunk,) = texts.logits([0, 1], [70, 33], ids)
    expected = runner.forward(ForwardBatch(ids, [0, 1]))
    assert chunk[0] == 0 and chunk[1].dtype == torch.float64
    assert (chunk[1] - expected).abs().max() < 1e-4


def test_the_wider_model_has_as_many_rows_and_layers_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K and V of its rows count, and not the weights alone."""
    runner = make_runner(tiny_transformer(), 2, 96, NativeBackend())
    texts = wider.WiderTexts(runner, lambda part: pytest.fail("nothing is loaded"), SDPABackend)
    shape = runner.cache.shape
    num_layers = runner.model.config.num_layers
    row_bytes = 2 * 8 * shape.num_kv_heads * shape.head_dim * 96
    monkeypatch.setattr(wider, "PART_BYTES", 3 * row_bytes)
    assert texts.most_rows(96) == 3 and texts.most_rows(96 * 4) == 1
    monkeypatch.setattr(wider, "PART_BYTES", 1 << 20)
    assert len(texts.parts(96)) == 1, "all layers fit"
    assert len(texts.parts(1 << 20)) == num_layers, "a layer at a time"


def test_rows_with_unlike_numbers_of_drafts_are_judged_again(
    monkeypatch: pytest.MonkeyPatch, trusted_lookups: None
) -> None:
    """Where a forward is one native call, they are verified together."""
    config = short_run("float32", num_rows=3)
    kept = list[LogitsRecorder]()

    def judge_and_keep(recorder: LogitsRecorder, *more: Any) -> JudgedAgain:
        kept.append(recorder)
        return judge_again(recorder, *more)

    monkeypatch.setattr("magicdec.bench.check.output.judge_again", judge_and_keep)
    config = replace(
        config,
        model=replace(config.model, linear="auto", native_steps="on"),
        attention=replace(config.attention, backend="native"),
        decoding=replace(config.decoding, drafter="ngram", gamma=5),
    )
    found = verdict_of(execute(prepare(config, Launch(0, 1, 0, 1))).record)
    assert found.identical and found.judged_again is not None and found.forwards is not None
    assert found.judged_again.num_wrong == 0 and found.forwards.alarms == []
    assert any(len(set(step.counts)) > 1 for recorder in kept for step in recorder.steps)
