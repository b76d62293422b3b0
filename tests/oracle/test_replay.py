"""Steps that are recorded once and replayed, as with CUDA graphs, against steps that the host
starts. They emit the same tokens, whichever rows end at whichever step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from conftest import (
    TINY,
    decode,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    served_pairs,
    tiny_transformer,
)
from recorder import HostTouched, Recorder
from test_lossless import SMALL
from test_varying_gamma import Scripted

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.recorder import CudaGraphs, Eager
from magicdec.decoding.recorder import Recorder as AnyRecorder
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.drafting.draft_length import DraftLength
from magicdec.drafting.drafter import DraftModel
from magicdec.engine import Engine
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.request import Request
from magicdec.runner import ModelRunner

PAIRS = sorted(served_pairs(), key=str)
PROMPTS = [90, 1, 40, 150]
NUM_NEW = [40, 23, 40, 7]  # rows end at different steps
MOST = 8
SCRIPT = (
    3,
    0,
    0,
    0,
    0,
    0,
    0,
    2,
    5,
    0,
    1,
)  # with long pauses of drafting


def section_of(policy: str | None) -> KVSection:
    return KVSection("full") if policy in (None, "full") else KVSection(policy, 48, 4, 8)


def started(
    sliding_window: int | None = None, block_size: int = 16
) -> tuple[Engine, list[Request]]:
    """An engine that has prefilled the prompts, and its snapshots."""
    config = replace(TINY, sliding_window=sliding_window)
    model = tiny_transformer(config)
    runner = make_runner(
        model, len(PROMPTS), max(PROMPTS) + max(NUM_NEW) + MOST, SDPABackend(block_size)
    )
    engine = Engine(runner, 64)
    return engine, engine.prefill(make_requests(random_prompts(PROMPTS, TINY.vocab_size), NUM_NEW))


def draft_for(kv: KVSection, runner: ModelRunner) -> DraftModel:
    dtype = next(runner.model.parameters()).dtype
    model = tiny_transformer(SMALL, seed=1, dtype=dtype).to(runner.device)
    return make_draft(model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))


def run(
    engine: Engine,
    snapshots: Sequence[Request],
    drafter: str | None,
    kv: KVSection,
    gamma: int | str,
    recorder: AnyRecorder | None,
    length: DraftLength | None = None,
) -> tuple[list[list[int]], list[list[int]], ForwardCounts]:
    """The emitted tokens, the accepted drafts of each step, and the counts of the target's
    forwards."""
    runner = engine.runner
    engine.rewind(snapshots)
    name = "autoregressive" if drafter is None else "speculative"
    draft = draft_for(kv, runner) if drafter == "model" else None
    section = DecodingSection(name, drafter, gamma)
    setup = Setup(
        runner, section, kv, draft=draft, draft_length=length, recorder=recorder or Eager()
    )
    accepted: list[list[int]] = []
    before = runner.counts.copy()
    finished = decode(engine, name, setup, lambda out, s: accepted.append(out.num_accepted or []))
    return [list(r.output_ids) for r in finished], accepted, runner.counts.minus(before)


@pytest.mark.parametrize(("drafter", "policy"), [(None, None), *PAIRS], ids=str)
def test_replayed_steps_emit_the_same_tokens(drafter: str | None, policy: str | None) -> None:
    engine, snapshots = started()
    kv, recorder = section_of(policy), Recorder()
    expected, accepted, counts = run(engine, snapshots, drafter, kv, 4, None)
    found, replayed, read = run(engine, snapshots, drafter, kv, 4, recorder)
    assert found == expected and recorder.replayed >= len(replayed)
    assert replayed == accepted
    assert read.num_forwards == counts.num_forwards
    assert read.kv_tokens_read == counts.kv_tokens_read
    assert read.kv_bytes_read == counts.kv_bytes_read


@pytest.mark.narrow("values")
@pytest.mark.parametrize(("drafter", "policy"), PAIRS, ids=str)
def test_replayed_steps_of_any_draft_lengths_emit_the_same_tokens(
    drafter: str, policy: str | None
) -> None:
    """Some steps draft nothing. The measurement of `--gamma auto` comes first."""
    engine, snapshots = started()
    kv, recorder = section_of(policy), Recorder()
    expected, accepted, _ = run(engine, snapshots, drafter, kv, "auto", None, Scripted(SCRIPT))
    found, replayed, _ = run(engine, snapshots, drafter, kv, "auto", recorder, Scripted(SCRIPT))
    assert found == expected == run(engine, snapshots, None, kv, 4, None)[0]
    assert replayed == accepted
    drafts = {"model": 2}.get(drafter, 1)  # a draft model begins with one token or with two
    if (drafter, policy) == (
        "model",
        "streaming_llm",
    ):  # not captured
        drafts = 0
    assert recorder.recorded == 1 + (1 + drafts) * 5


@pytest.mark.parametrize(
    "kv", [KVSection("full"), KVSection("snapkv", 250, window_size=8)], ids=str
)
def test_a_full_replayed_draft_is_accepted_after_any_pause(kv: KVSection) -> None:
    """The draft has the target's own weights, so all its drafts are accepted, however many tokens
    it had to catch up with."""
    engine, snapshots = started()
    runner = engine.runner
    draft = make_draft(runner.model, kv, runner.num_rows, runner.max_tokens, SDPABackend(16))
    engine.rewind(snapshots)
    setup = Setup(
        runner, DecodingSection("speculative", "model", "auto"), kv, draft=draft,
        draft_length=Scripted(SCRIPT), recorder=Recorder(),
    )  # fmt: skip
    steps: list[tuple[int, list[int]]] = []
    decode(
        engine, "speculative", setup,
        lambda out, s: steps.append((out.num_drafted, out.num_accepted or [])),
    )  # fmt: skip
    assert {n for n, _ in steps} == set(SCRIPT)
    assert all(accepted == [n] * len(accepted) for n, accepted in steps)


def test_replayed_steps_of_measured_draft_lengths_emit_the_same_tokens() -> None:
    """The measurement runs one row alone while the others are not active. Then all rows go on."""
    engine, snapshots = started()
    kv, recorder = section_of("streaming_llm"), Recorder()
    expected = run(engine, snapshots, None, kv, 4, None)[0]
    assert run(engine, snapshots, "self", kv, "auto", recorder)[0] == expected
    assert recorder.recorded == 1 + 2 * 8


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_a_row_that_ended_in_its_last_block_writes_into_no_other_row(policy: str) -> None:
    """An ended row is still computed, so the tokens that it appends need room."""
    runner = make_runner(tiny_transformer(), 2, 60 + 7 + 4, SDPABackend(1))
    engine = Engine(runner, 64)
    requests = make_requests(random_prompts([60, 4], TINY.vocab_size), [7, 60])
    snapshots, kv = engine.prefill(requests), replace(section_of(policy), budget=100)
    expected = run(engine, snapshots, "self", kv, 4, None)[0]
    assert max(runner.cache.lengths) == 70 == runner.max_tokens - 1
    assert run(engine, snapshots, "self", kv, 4, Recorder())[0] == expected


@pytest.mark.parametrize(
    ("policy", "reselect_every"),
    [
        pytest.param("full", 0, marks=pytest.mark.wide),
        ("streaming_llm", 0),
        pytest.param("snapkv", 0, marks=pytest.mark.wide),
        ("snapkv", 9),
        pytest.param("verified", 0, marks=pytest.mark.wide),
    ],
)
def test_replayed_steps_follow_windows_and_new_choices(policy: str, reselect_every: int) -> None:
    """The texts grow past the sliding window of the model. SnapKV chooses again between replays."""
    engine, snapshots = started(sliding_window=64)
    kv = replace(section_of(policy), reselect_every=reselect_every)
    expected, accepted, counts = run(engine, snapshots, "self", kv, 3, None)
    found, replayed, read = run(engine, snapshots, "self", kv, 3, Recorder())
    assert found == expected and replayed == accepted
    assert (read.kv_tokens_read, read.num_forwards) == (counts.kv_tokens_read, counts.num_forwards)


def test_replayed_steps_draft_from_an_int8_cache() -> None:
    engine, snapshots = started(block_size=64)
    kv = replace(section_of("snapkv"), draft_kv_dtype="int8")
    expected, accepted, _ = run(engine, snapshots, "self", kv, 4, None)
    assert run(engine, snapshots, "self", kv, 4, Recorder())[:2] == (expected, accepted)


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "branch": lambda x: bool(x.any()),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "from a list": lambda x: x + torch.tensor([1, 2, 3]),
    "by a list": lambda x: x[[0, 1]],
}


@pytest.mark.parametrize("name", TOUCHES)
def test_the_recorder_refuses_what_a_graph_refuses(name: str) -> None:
    x = torch.tensor([1, 2, 3])

    def work() -> torch.Tensor:
        TOUCHES[name](x)
        return x

    with pytest.raises(HostTouched), torch.inference_mode():
        Recorder().record(work)


def test_a_replay_reads_the_present_values_of_tensors() -> None:
    """This holds for updates in place and through views. Values of the host stay as they were when
    it was recorded."""
    x, total, factor = torch.tensor([1, 2, 3]), torch.zeros(1, dtype=torch.int64), [2]

    def work() -> torch.Tensor:
        total.add_(x[1:].sum() * factor[0])
        return total * 1

    replay = Recorder().record(work)
    x += 10
    factor[0] = 100
    assert total.item() == 10 and replay().item() == 10 + 2 * 25 and total.item() == 60


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv", "verified"])
def test_a_step_on_a_gpu_waits_once(policy: str, graphs: bool) -> None:
    """The host waits for the result of the verification. Drafting, views and truncation do not wait
    for the device."""
    device = torch.device("cuda")
    model = tiny_transformer().to(device)
    runner = make_runner(model, 2, 200, SDPABackend(16))
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([90, 60], TINY.vocab_size), 60))
    recorder = CudaGraphs(device) if graphs else None
    section = DecodingSection("speculative", "self", 3)
    setup = Setup(runner, section, section_of(policy), recorder=recorder or Eager())
    strategy = make_strategy("speculative", setup)
    engine.begin(strategy)
    for _ in range(4):
        plan = engine.scheduler.schedule()
        assert plan is not None and plan.decoding is not None
        batch = plan.decoding
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = strategy.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        engine.scheduler.commit(batch, output, 0.0)
        assert len([w for w in waits if "synchronizing" in str(w.message)]) == 1, waits
