"""The verdict on modes of `magicdec serve`: what honest modes pass, what sees which fault, and that
outputs are replayed in the steps of a mode."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, make_runner, random_prompts, tiny_transformer
from lossy import ATTACKS, noisy, planted
from recorder import StandInRecorder
from serving_command import prepare_as

from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.check.forced import ForcedSteps
from magicdec.bench.check.judgement import judge_again
from magicdec.bench.check.replays import engine_pass, unanswered
from magicdec.bench.check.wider import WiderTexts
from magicdec.bench.measure import measure_modes
from magicdec.bench.recording import status_of
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.kv.prefix_cache import Beginning, PrefixCache
from magicdec.output.console import Silent
from magicdec.records.correctness import ForwardErrors
from magicdec.records.describe import verdict_of
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import parse_line
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, SamplingParams, StepOutput
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.logits_recorder import LogitsRecorder
from magicdec.systems.flover.system import Flover
from magicdec.systems.modes import Pass

WORDS = (
    "--model",
    "demo",
    "--attention",
    "sdpa",
    "--linear",
    "torch",
    "--native_steps",
    "off",
    "--draft",
    "self",
    "--kv_policy",
    "streaming_llm",
    "--budget",
    "65",
    "--gamma",
    "4",
    "--num_requests",
    "8",
    "--prefix_len",
    "96",
    "--gen_len",
    "48",
    "--B",
    "4",
    "--arrival",
    "burst",
    "--threads",
    "1",
)
STAGES = (*WORDS[:8], *WORDS[16:])  # without a draft
SHORT = (
    *WORDS[:16],
    "--num_requests",
    "5",
    "--prefix_len",
    "48",
    "--gen_len",
    "16",
    *WORDS[22:],
)


def serve(
    tmp_path: Path, dtype: str, *modes: str, words: Sequence[str] = WORDS, attack: str = "nothing"
) -> list[PassRecord]:
    prepared = prepare_as("serve", tmp_path, *words, "--dtype", dtype, "--modes", *modes)
    records = list[PassRecord]()
    with planted(ATTACKS[attack]("sdpa")):
        measure_modes(prepared, records.append)
    return records


def test_an_honest_mode_passes_where_rounding_makes_tokens_differ(tmp_path: Path) -> None:
    first, drafting = serve(tmp_path, "bfloat16", "inflight", "inflight+draft")
    assert first.status == "verified" and first.correctness is not None
    assert first.correctness.judged_again is not None
    assert first.correctness.judged_again.num_steps > 90  # of both batches
    found = drafting.correctness
    assert drafting.status == "verified_with_ties" and drafting.metrics is not None
    assert found is not None and found.reference == "inflight" and found.num_diverged == 0
    assert 0 < drafting.num_differing == found.num_excused <= found.most_differing
    assert found.judged_again is not None and found.judged_again.num_wrong == 0
    assert found.judged_again.num_steps == found.judged_again.num_steps_of_all > 20
    verdict = verdict_of(drafting)
    assert "verified with ties" in verdict and "steps judged again" in verdict
    forwards = found.forwards
    assert first.correctness.forwards is None and forwards is not None and not forwards.alarms
    assert forwards.num_positions == forwards.num_measured > 250  # of two groups of four rows
    assert 0.01 < forwards.decode_error < 0.05 and forwards.hidden_error < 0.03
    assert f"more than {forwards.hidden_error:.2g} added to them" in verdict


@pytest.mark.parametrize(
    ("dtype", "attack"),
    [
        pytest.param("bfloat16", "accept within 0.03", marks=pytest.mark.wide),
        # Rounding could explain its tokens.
        pytest.param("bfloat16", "noise 0.03", marks=pytest.mark.wide),
        pytest.param("bfloat16", "16 KV tokens dropped", marks=pytest.mark.wide),
        # Its tokens are right by chance.
        pytest.param("float32", "accept within 0.01", marks=pytest.mark.wide),
        ("float32", "noise 0.01"),
        pytest.param("float32", "1 KV token dropped", marks=pytest.mark.wide),
        pytest.param("bfloat16", "a head zeroed", marks=pytest.mark.wide),
    ],
)
def test_a_fault_in_verifications_is_seen(tmp_path: Path, dtype: str, attack: str) -> None:
    first, drafting = serve(tmp_path, dtype, "inflight", "inflight+draft", attack=attack)
    found = drafting.correctness
    assert first.status == "verified" and drafting.status == "mismatch" and drafting.metrics is None
    assert found is not None and found.judged_again is not None
    assert (found.judged_again.num_wrong > 0) == attack.startswith("accept")
    assert found.forwards is not None
    assert ("error_ratio" in found.forwards.alarms) != attack.startswith("accept")
    assert ("TOO LARGE for rounding" in verdict_of(drafting)) != attack.startswith("accept")
    assert "MISMATCH" in verdict_of(drafting)


def test_errors_alone_make_a_mode_diverge(tmp_path: Path) -> None:
    """No token differs and every step is right, but the logits are not those of rounding."""
    records = serve(tmp_path, "float32", "inflight", "inflight+draft", words=SHORT)
    fine = records[1]
    found = fine.correctness
    assert fine.status == "verified" and found is not None and found.forwards is not None
    limit = found.forwards.most_error_ratio
    assert limit is not None
    wrong = replace(found, forwards=replace(found.forwards, error_ratio=1.01 * limit))
    assert status_of(0, found, "float32", False) == "verified"
    assert status_of(0, wrong, "float32", False) == "mismatch"
    diverged = replace(fine, status="mismatch", metrics=None, correctness=wrong)
    assert parse_line(diverged.to_json(), PassRecord).correctness == wrong
    with pytest.raises(AssertionError, match="it is a mismatch, but no tokens differ"):
        replace(diverged, correctness=found)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.wide)])
def test_noise_above_what_could_hide_is_seen(dtype: str, tmp_path: Path) -> None:
    """A little above what the honest pass says; a third of it is rounding."""
    _, honest = serve(tmp_path, dtype, "inflight", "inflight+draft", words=SHORT)
    assert honest.correctness is not None and honest.correctness.forwards is not None
    hidden = honest.correctness.forwards.hidden_error
    assert hidden is not None
    for factor, is_seen in ((1.1, True), (0.3, False)):
        with planted(noisy(factor * hidden, "sdpa")):
            _, found = serve(tmp_path, dtype, "inflight", "inflight+draft", words=SHORT)
        assert (found.status == "mismatch") == is_seen, verdict_of(found)


def test_few_rows_take_turns_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time, of a cache that keeps prefixes, have the errors of all at once; and the
    cache of a mode is given back when another system opens."""
    gone = list[bool]()
    close = Flover.close

    def note(system: Flover) -> None:
        runner = weakref.ref(system.runner)
        close(system)
        gc.collect()
        gone.append(runner() is None)

    monkeypatch.setattr(Flover, "close", note)
    small = ("--prefix_cache", "--block_tokens", "16", "--cache_tokens", "160")
    found = list[ForwardErrors]()
    for words in (SHORT, (*SHORT, *small)):
        _, drafting = serve(tmp_path, "float32", "inflight", "inflight+draft", words=words)
        assert drafting.correctness is not None and drafting.correctness.forwards is not None
        found.append(drafting.correctness.forwards)
    assert gone == [True, True], "what the first pass has kept holds no cache"
    whole, parts = found
    assert whole.num_measured == parts.num_measured == whole.num_positions > 40
    assert whole.decode_error < 1e-5, "the prompts are their own"
    assert parts.decode_error == pytest.approx(whole.decode_error, rel=0.2)
    assert parts.verify_error == pytest.approx(whole.verify_error, rel=0.2)
    assert parts.hidden_error is not None and not parts.alarms


def test_prompts_are_measured_in_as_many_rows_as_the_cache_holds() -> None:
    def room(num_tokens: int, num_blocks: int | None) -> int:
        limits = SimpleNamespace(limits=(16, num_blocks))
        source: Any = SimpleNamespace(num_rows=4, caches=limits)
        nothing: Any = None
        return WiderTexts(source, nothing, nothing).room(num_tokens)

    assert [room(tokens, 10) for tokens in (16, 40, 48, 80, 81, 500)] == [4, 3, 3, 2, 1, 1]
    assert room(500, None) == 4


def test_a_lone_mode_with_wrong_steps_diverges(tmp_path: Path) -> None:
    (record,) = serve(tmp_path, "float32", "inflight+draft", attack="accept within 0.03")
    assert record.status == "mismatch" and record.num_differing is None
    assert record.correctness is not None and record.correctness.has_wrong_steps


def test_stages_are_judged_by_the_engine_if_a_mode_is_one(tmp_path: Path) -> None:
    prepared = prepare_as(
        "serve",
        tmp_path,
        *STAGES,
        "--prefix_cache",
        "--modes",
        "ring",
        "pipeline",
        "inflight",
        world_size=2,
    )
    systems = {system.passes[0].mode: system for system in prepared.systems}
    engine = systems["inflight"]
    for mode, rows in (("ring", "inflight"), ("pipeline", "sequential")):
        stands_for = engine_pass(systems[mode], Pass(mode, False), prepared.systems)
        assert stands_for is not None and stands_for.system is engine
        assert (stands_for.mode, stands_for.num_tokens) == (rows, 1)
        assert not stands_for.shares_prefixes
    own = engine_pass(engine, Pass("inflight", False), prepared.systems)
    assert own is not None and own.shares_prefixes, "decode steps computed some of its prompts"
    ring = systems["ring"]
    assert engine_pass(ring, Pass("ring", False), [ring]) is None
    engine.ranks_of_layer = 2  # whose sums are rounded otherwise
    assert engine_pass(ring, Pass("ring", False), prepared.systems) is None


@pytest.mark.wide
def test_penalties_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay does not apply them."""
    words = (*WORDS, "--repetition_penalty", "1.3")
    records = serve(tmp_path, "bfloat16", "inflight", "inflight+draft", words=words)
    assert records[1].status in ("verified", "unverified")
    assert records[1].correctness is not None and records[1].correctness.num_excused in (0, None)


def known_outputs(runner: ModelRunner) -> list[Request]:
    requests = [
        Request(i, prompt, SamplingParams(length))
        for i, (prompt, length) in enumerate(
            zip(random_prompts((30, 41, 25, 33), TINY.vocab_size), (20, 1, 13, 17), strict=True)
        )
    ]
    serve_by(runner, requests, decoding(runner))
    return requests


def decoding(runner: ModelRunner) -> Any:
    return build_decoder(
        runner, DecodingSection(), KVSection("full"), name="autoregressive", is_in_flight=True
    )


def serve_by(
    runner: ModelRunner, requests: list[Request], strategy: Any, tokens: int = 1
) -> list[int]:
    """The tokens that the steps emitted for each of their requests."""
    shape = runner.cache.shape
    limits = BatchLimits(
        runner.max_tokens, shape.block_size, shape.num_blocks, tokens, prefill_tokens=16
    )
    emitted = list[int]()

    def observe(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        emitted.extend(map(len, output.token_ids))

    Engine(runner, 16, limits).serve(strategy, requests, observe)
    return emitted


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_outputs_are_replayed_in_steps_of_any_size(num_tokens: int) -> None:
    """Ragged rows, of which two run at a time. By default, the best token of each position is the
    one that was emitted; gaps between given tokens are those of steps of one token."""
    runner = make_runner(tiny_transformer(), 2, 96)
    requests = known_outputs(runner)
    outputs = {request.request_id: request.output_ids for request in requests}
    best = ForcedSteps(runner, outputs, num_tokens, None)
    again = unanswered(requests)
    emitted = serve_by(runner, again, best, num_tokens)
    assert [request.output_ids for request in again] == list(outputs.values())
    full = [num_tokens] * sum((len(output) - 1) // num_tokens for output in outputs.values())
    assert [count for count in emitted if count == num_tokens] == full
    pairs = {
        number: torch.randint(TINY.vocab_size, (len(output) - 1, 2))
        for number, output in outputs.items()
    }
    one = ForcedSteps(runner, outputs, 1, pairs)
    serve_by(runner, unanswered(requests), one)
    steps = ForcedSteps(runner, outputs, num_tokens, pairs)
    serve_by(runner, unanswered(requests), steps, num_tokens)
    for number, output in outputs.items():
        chosen, gaps = best.found(number)
        assert chosen[:, 0].tolist() == output[1:] and (gaps > 0).all()
        assert steps.found(number)[0].equal(pairs[number])
        assert torch.allclose(steps.found(number)[1], one.found(number)[1], atol=1e-4, rtol=0)


def test_captured_steps_of_each_set_of_rows_leave_their_logits() -> None:
    """Requests of unequal lengths, so that sets of rows come and go, each with steps of its own."""
    runner = make_runner(tiny_transformer(), 3, 120, SDPABackend(8))
    requests = [
        Request(i, (*prompt, *prompt), SamplingParams(length))
        for i, (prompt, length) in enumerate(
            zip(random_prompts((9,) * 7, TINY.vocab_size), (25, 6, 14, 30, 9, 20, 6), strict=True)
        )
    ]
    logits_recorder = LogitsRecorder.of(runner, 3, 3, 200, "1", 3)
    logits_recorder.is_watching = True
    recorder = StandInRecorder()
    strategy = build_decoder(
        runner,
        DecodingSection("speculative", "self", 3),
        KVSection("streaming_llm", 12, 4),
        recorder=recorder,
        logits_recorder=logits_recorder,
        is_in_flight=True,
    )
    serve_by(runner, requests, strategy, 4)
    found = judge_again(logits_recorder, requests, runner)
    assert found.num_wrong == 0 and found.num_steps == found.num_steps_of_all > 20
    assert recorder.replayed > 20


def test_a_replay_makes_room_for_steps_that_the_pass_had_not(tmp_path: Path) -> None:
    prepared = prepare_as("serve", tmp_path, *STAGES, "--modes", "inflight", "--dtype", "float32")
    (system,) = prepared.systems
    assert isinstance(system, Flover)
    serving_pass = prepared.options.passes[0]
    system.open(serving_pass, torch.device("cpu"), Silent())
    assert system.runner is not None
    room = system.runner.max_tokens
    prompt = prepared.run.workload.prompts[0]
    text = Request(0, prompt, SamplingParams(48))
    made = list[tuple[ModelRunner, ForcedSteps]]()

    def replay(num_tokens: int) -> None:
        def make(runner: ModelRunner) -> ForcedSteps:
            made.append((runner, ForcedSteps(runner, {0: [5] * 48}, num_tokens, None)))
            return made[0][1]

        system.replay("inflight", [replace(text, output_ids=[])], num_tokens, make)

    replay(9)
    runner, steps = made.pop()
    assert runner.max_tokens > room and len(steps.found(0)[1]) == 47
    replay(1)
    assert made[0][0] is system.runner, "no second cache where there is room"
    system.close()


def test_a_replay_shares_prefixes_as_the_pass_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*STAGES, "--modes", "inflight", "--dtype", "float32", "--prefix_cache")
    prepared = prepare_as("serve", tmp_path, *words, "--block_tokens", "16")
    (system,) = prepared.systems
    assert isinstance(system, Flover)
    system.open(prepared.options.passes[0], torch.device("cpu"), Silent())
    runner = system.runner
    assert runner is not None and runner.caches.prefixes is not None
    prompt = prepared.run.workload.prompts[0]
    found = list[int]()
    adopt = PrefixCache.adopt

    def note(prefixes: PrefixCache, row: int, beginning: Beginning) -> None:
        found[-1] += beginning.num_tokens
        adopt(prefixes, row, beginning)

    monkeypatch.setattr(PrefixCache, "adopt", note)
    for shares in (True, False):
        found.append(0)
        texts = [Request(i, prompt, SamplingParams(3)) for i in range(2)]

        def make(runner: ModelRunner) -> ForcedSteps:
            return ForcedSteps(runner, {0: [5] * 3, 1: [5] * 3}, 1, None)

        system.replay("sequential", texts, 1, make, None, shares)
    assert found[0] > 0 == found[1]
    system.close()
