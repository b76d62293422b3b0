"""Logits that are not finite end every way of decoding, at the step at which they come: greedy and
sampled, with every drafter, of the target or of the draft, in steps that the host starts, in steps
that are replayed, and in native calls."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import (
    TINY,
    Command,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from recorder import StandInRecorder
from test_lossless import SMALL
from torch import Tensor

from magicdec import LLM
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.distributed.channels.message import floats_of
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.model.presets.presets import demo_directory
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, greedy
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.request import NotFinite, Request
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy
from magicdec.systems.pipeinfer.messages import RunLaunch
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import candidate_of, pack_candidate
from magicdec.systems.pipeinfer.run_stage import predict
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler

NAN = float("nan")
INF = float("inf")
KV = KVSection("streaming_llm", 24, 4)
GREEDY = SamplingSection()
WARM = SamplingSection(temperature=0.8)
FILTERED = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
PENALISED = SamplingSection(repetition_penalty=1.2)
PROMPTS = random_prompts([40, 31], TINY.vocab_size)
STEPS = 2  # before the logits overflow


def overflow(model: Transformer) -> None:
    """From now on the logits of the model are infinite or NaN; its weights are finite."""
    model.norm.weight.fill_(3e38)


def decode_until_overflow(
    runner: ModelRunner,
    broken: Transformer,
    drafter: str | None,
    sampling: SamplingSection,
    recorder: Any = Eager(),
    draft: Any = None,
) -> str:
    """What a decoding says in whose third step the logits of `broken` overflow."""
    engine = Engine(runner, 64)
    done = list[float]()
    engine.prefill(make_requests(PROMPTS, 20, sampling=sampling))
    name = "autoregressive" if drafter is None else "speculative"
    section = DecodingSection(name, drafter, 3)
    strategy = make_strategy(name, Setup(runner, section, KV, draft=draft, recorder=recorder))

    def observe(request_ids: object, output: object, seconds: float) -> None:
        done.append(seconds)
        if len(done) == STEPS:
            overflow(broken)

    engine.begin(strategy)
    with pytest.raises(NotFinite) as raised:
        engine.decode(strategy, observe)
    assert len(done) == STEPS
    return str(raised.value)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, FILTERED, PENALISED], ids=str)
@pytest.mark.parametrize("drafter", [None, "self", "ngram", "ngram+self"])
@pytest.mark.parametrize("make_recorder", [Eager, StandInRecorder])
def test_a_decoding_ends_at_the_step(
    drafter: str | None, sampling: SamplingSection, make_recorder: Callable[[], Any]
) -> None:
    model = tiny_transformer()
    runner = make_runner(model, 2, 80, SDPABackend(16))
    found = decode_until_overflow(runner, model, drafter, sampling, make_recorder())
    assert found.startswith(f"decode step {STEPS + 1}: the logits of request 0 after output token")
    assert "are not finite numbers" in found and "\n" not in found


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=str)
@pytest.mark.parametrize("make_recorder", [Eager, StandInRecorder])
@pytest.mark.parametrize("breaks_draft", [True, False])
def test_the_logits_of_a_draft_model_count(
    sampling: SamplingSection, make_recorder: Callable[[], Any], breaks_draft: bool
) -> None:
    """They cannot make a token wrong, but the acceptance would be that of no model."""
    model = tiny_transformer()
    small = tiny_transformer(SMALL, seed=1)
    draft = make_draft(small, KV, 2, 80, SDPABackend(16))
    runner = make_runner(model, 2, 80, SDPABackend(16))
    broken = small if breaks_draft else model
    found = decode_until_overflow(runner, broken, "model", sampling, make_recorder(), draft)
    assert found.startswith(f"decode step {STEPS + 1}: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafter", [None, "self", "ngram"])
def test_native_steps_end_at_the_step(drafter: str | None, dtype: torch.dtype) -> None:
    """Their kernels are compiled for finite numbers alone."""
    model = pack(tiny_transformer(dtype=dtype))
    group = Group((0,), 0)
    executor = Executor(model, group)
    runner = ModelRunner(model, NativeBackend(), group, 2, 80, executor=executor)
    found = decode_until_overflow(runner, model, drafter, GREEDY)
    assert found.startswith(f"decode step {STEPS + 1}: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_native_chain_of_drafts_says_that_its_logits_are_not_finite(dtype: torch.dtype) -> None:
    model = pack(tiny_transformer(dtype=dtype))
    group = Group((0,), 0)
    runner = ModelRunner(model, NativeBackend(), group, 1, 80, executor=Executor(model, group))
    runner.allocate(0)
    batch = ForwardBatch(torch.tensor([[5]]), [0], committed=[0])
    assert runner.draft(batch, 3).shape == (1, 3) and not runner.has_flaws
    overflow(model)
    runner.truncate([0], [0])
    ids = runner.draft(batch, 3)
    assert runner.has_flaws and ((ids >= 0) & (ids < TINY.vocab_size)).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_single_logit_is_enough(value: float) -> None:
    """Also one that is never the largest."""
    logits = torch.zeros(2, 1, 9)
    logits[1, 0, 4] = value
    requests = make_requests(PROMPTS, 4)
    sampling = SamplingMetadata.of(requests, 9, torch.device("cpu"))
    ids, sums = greedy(logits, 0, Group((0,), 0), sampling.flaws)
    assert sums is not None
    sampling.note_sums(sums)
    lines = sampling.with_flaws([ids]).tolist()
    sampling.check(requests[0], lines[0])
    with pytest.raises(NotFinite, match="the logits of request 1 after the prompt"):
        sampling.check(requests[1], lines[1])


@pytest.mark.parametrize("broken_rank", [0, 1, None])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_all_ranks_learn_of_the_logits_of_one(broken_rank: int | None, value: float) -> None:
    """The ids are those of tokens all the same, since the device goes on with them."""

    class Two(Group):
        def all_gather(self, x: Tensor) -> Tensor:
            sent.append(x)
            return torch.stack(sent[-2:]) if len(sent) > 1 else torch.stack([x, x])

    sent = list[Tensor]()
    shards = [torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    if broken_rank is not None:
        shards[broken_rank][1, 2, 3] = value
    none = torch.zeros(2, 1)
    greedy(shards[0], 0, Two((0, 1), 0), none)
    ids, sums = greedy(shards[1], 5, Two((0, 1), 1), none)
    whole = torch.cat(shards, dim=2)
    expected = torch.ones(2, 3, dtype=torch.bool)
    expected[1, 2] = broken_rank is None
    assert sums is not None and torch.equal(sums.isfinite(), expected)
    assert torch.equal(ids[expected], whole.argmax(dim=2)[expected])
    assert ((ids >= 0) & (ids < 10)).all()


def test_a_prompt_whose_logits_overflow_has_no_first_token() -> None:
    model = tiny_transformer()
    runner = make_runner(model, 2, 80)
    overflow(model)
    with pytest.raises(NotFinite, match="prefill: the logits of request 0 after the prompt"):
        Engine(runner, 16).prefill(make_requests(PROMPTS, 4))


def test_pipelined_speculation_commits_no_token_without_a_margin() -> None:
    logits = torch.randn(2, 9)
    logits[1, 3] = INF
    tokens = [1, 3]
    margins = predict(logits, logits.sum(dim=1))[2:]
    scheduler = PipelinedScheduler(Options(mode="pipeline"))
    _, (launch, *_) = scheduler.submit([4, 5], 4)
    assert isinstance(launch, RunLaunch)
    numbers = floats_of(margins)
    assert numbers[0] >= 0 and numbers[1] != numbers[1]
    with pytest.raises(NotFinite, match="the logits of request 0 after the prompt"):
        scheduler.result(launch.run, tokens[1:], numbers[1:])
    with pytest.raises(NotFinite, match="the logits of draft 7 are not finite"):
        candidate_of(pack_candidate(7, (3, NAN)))


def test_an_llm_fails_from_then_on(tiny_checkpoint: Path) -> None:
    llm = LLM(str(tiny_checkpoint), dtype="float32", threads=1, max_tokens=100)
    stream = llm.submit([5, 6, 7], 20, ignore_eos=True)
    first = [next(stream) for _ in range(3)]
    overflow(llm._engine.runner.model)
    for _ in range(2):
        with pytest.raises(NotFinite, match=r"decode step 3: the logits of request 0 after output"):
            llm.step()
    assert stream._request.output_ids == first


def broken_after(directory: Path, num_tokens: int) -> Path:
    """A model with finite weights, the logits of which are NaN from that position on: there two
    finite numbers have an infinite sum. The last norm hides the numbers from the head."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}
    config = transformers.GPT2Config(vocab_size=2048, bos_token_id=1, eos_token_id=2, **sizes)
    model = transformers.GPT2LMHeadModel(config)
    body = model.transformer
    with torch.no_grad():
        body.wte.weight[:, 0] = 3e37
        body.wpe.weight[:, 0] = -3e37
        body.wpe.weight[num_tokens:, 0] = 3.3e38
        body.ln_f.weight[0] = body.ln_f.bias[0] = 0
    model.save_pretrained(directory)
    source = demo_directory("demo") / "tokenizer.model"
    (directory / source.name).write_bytes(source.read_bytes())
    return directory


SHORT = ("--prefix_len", 64, "--gen_len", 16, "--dtype", "float32", "--ignore_eos")


@pytest.mark.parametrize(
    "words",
    [("--draft", "none"), ("--draft", "ngram"), ("--budget", 32, "--temperature", 0.7)],
    ids=str,
)
def test_a_run_leaves_a_failed_record(
    words: Sequence[object], tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "records.jsonl"
    model = broken_after(tmp_path / "model", 69)
    ended = command("run", "--model", model, *SHORT, "--B", 1, "--out", out, *words)
    assert ended.code == 1
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["status"] == "failed" and record["metrics"] is None
    error = record["error"].removeprefix("NotFinite: ")
    assert "decode step 6: the logits of request 0 after output token 6" in error
    assert error.startswith("batch 0: warm-up, static: ")
    assert ended.err.splitlines()[-1] == f"magicdec run: {error}"


def test_serving_leaves_a_failed_record(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "records.jsonl"
    model = broken_after(tmp_path / "model", 69)
    ended = command(
        "serve",
        "--model",
        model,
        *SHORT,
        "--num_requests",
        2,
        "--modes",
        "sequential",
        "--out",
        out,
    )
    assert ended.code == 1
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["status"] == "failed" and record["metrics"] is None and not record["requests"]
    assert record["error"].startswith("sequential: decode step 6: the logits of request 0 after")
    shown = command("table", out)
    assert shown.code == 0 and "sequential: FAILED: decode step 6" in shown.out


def test_a_request_that_has_emitted_nothing_names_its_prompt() -> None:
    request: Request = make_requests(PROMPTS, 4)[0]
    with pytest.raises(NotFinite, match="request 0 after the prompt"):
        SamplingMetadata.check(request, [1])


def test_a_rewound_engine_forgets_what_another_pass_has_found() -> None:
    """Passes and runs that share a prefill share its runner."""
    runner = make_runner(tiny_transformer(), 1, 32)
    engine = Engine(runner, 16)
    snapshots = engine.prefill(make_requests(random_prompts([9], 97), 4))
    runner.has_flaws = True
    engine.rewind(snapshots)
    assert not runner.has_flaws
