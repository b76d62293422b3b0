"""Heads for multi-token prediction in the checkpoints of models with linear attention: each draft
has the logits of the definition, with a layer of transformers; and drafts change no token."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import Command, make_draft, make_requests, pack, random_prompts
from draft_heads import SHARED, chances
from safetensors.torch import load_file, save_file
from tiny_hybrids import (
    KINDS,
    PlainMtpHead,
    check_greedy_tokens,
    save_with_tokenizer,
    the_model,
)
from tiny_mimo import MIMO, PlainMimoHead, a_mimo
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.roofline import weight_bytes
from magicdec.cli import plan
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    KVSection,
    ModelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed.channels.message import Ends, Loopback
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.hardware import costs
from magicdec.hardware.ceiling_file import Hardware
from magicdec.kv.cache import Lengths
from magicdec.llm import LLM
from magicdec.model.checkpoint.mtp_weights import find_mtp_head
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.mtp import MtpHead
from magicdec.model.presets.presets import find_config
from magicdec.model.transformer import Transformer
from magicdec.records.comparison.conditions import flags_of
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.layer_states import StateRoom
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.hidden_states import HiddenStates, ReceivedStates
from magicdec.runner.request import Batch, Request, StepOutput
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.runner.sampling.randomness import derive_seed, exponentials
from magicdec.runner.step_plan import BatchLimits
from magicdec.setup.loading import load_kind, make_received_states
from magicdec.setup.memory_plan import model_plans_of
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import SetupCache, find
from magicdec.speculation.drafter import DraftShape
from magicdec.speculation.head_drafter import HeadDrafter
from magicdec.speculation.steps.speculative import Speculative
from magicdec.speculation.steps.strategy import Setup, make_strategy
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.pipeinfer.messages import RunLaunch
from magicdec.systems.pipeinfer.mtp_path_drafter import MtpPathDrafter
from magicdec.systems.pipeinfer.path_drafter import DraftRequest
from magicdec.systems.pipeinfer.run_stage import LastStates
from magicdec.systems.pipeinfer.system import ENDS
from magicdec.systems.stages.spans import Spans
from magicdec.systems.stages.stage import StageLoop

DENSE = "Qwen3_5ForCausalLM"
MIXTURE = "Qwen3_5MoeForCausalLM"
NEXT = "Qwen3NextForCausalLM"
VOCAB = 97
LENGTHS = (5, 40, 1, 23)
GAMMA = 4
NEW = 40
SAMPLED = SamplingSection(temperature=0.6, repetition_penalty=1.6, presence_penalty=-1.5, seed=3)


def with_head(kind: str, vocab_size: int, **changes: Any) -> tuple[Any, PlainMtpHead]:
    if kind == MIMO:
        mimo = a_mimo(vocab_size, **changes)
        return mimo, PlainMimoHead(mimo)
    target = the_model(vocab_size, kind, **changes)
    return target, PlainMtpHead(target, kind)


def save(target: Any, head: PlainMtpHead, folder: Path) -> Path:
    target.save_pretrained(folder)
    head.add_to(folder)
    return folder


def load(folder: Path) -> tuple[Transformer, MtpHead]:
    source = find_model("--model", str(folder))
    cpu = torch.device("cpu")
    models = []
    for found in (source, find_mtp_head("--draft mtp", source)):
        model = load_transformer(found.config, found.weights, Shard(), None, torch.float32, cpu)
        models.append(model)
    target, head = models
    assert isinstance(head, MtpHead)
    head.share(target)
    return target, head


def started(
    target: Transformer, head: MtpHead, sampling: SamplingSection = SamplingSection()
) -> tuple[list[Request], HeadDrafter]:
    """Ragged requests with their first tokens, which a drafter has admitted."""
    size = len(LENGTHS), max(LENGTHS) + NEW + GAMMA
    group = Group((0,), 0)
    room = StateRoom(GAMMA + 2)
    runner = ModelRunner(target, SDPABackend(16), group, *size, state_room=room)
    runner.observers.append(HiddenStates.of(runner, [target.config.num_layers]))
    kv = KVSection("full")
    draft = make_draft(head, kv, *size)
    requests = make_requests(random_prompts(LENGTHS, VOCAB, 5), NEW, sampling=sampling)
    Engine(runner, 16).prefill(requests)
    decoding = DecodingSection("speculative", "mtp", GAMMA)
    strategy = make_strategy("speculative", Setup(runner, decoding, kv, draft=draft))
    assert isinstance(strategy, Speculative) and isinstance(strategy.drafter, HeadDrafter)
    strategy.admit(Batch(tuple(requests)))
    return requests, strategy.drafter


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", [*KINDS, MIMO])
def test_drafts_have_the_logits_of_the_definition(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches, after steps that accepted all, some or none of the drafts, whose slots the
    head forgets."""
    reference, plain = with_head(kind, VOCAB, tie_word_embeddings=tied)
    target, head = load(save(reference, plain, tmp_path))
    drafted: list[Tensor] = []
    read_out = MtpHead.read_out

    def noted(head: MtpHead, output: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = read_out(head, output)
        drafted.append(logits[:, 0])
        return logits, state

    monkeypatch.setattr(MtpHead, "read_out", noted)
    requests, drafter = started(target, head)
    runner = drafter.target
    texts = [
        [*request.prompt_ids, *request.output_ids, *random_prompts([NEW], VOCAB, number)[0]]
        for number, request in enumerate(requests)
    ]
    lengths = list(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        batch = DeviceBatch.of(Batch(tuple(requests)), VOCAB, runner.device)
        drafted.clear()
        pending = drafter.prepare(requests, GAMMA)
        proposal = drafter.propose(batch, DraftShape(GAMMA, pending))
        found = torch.stack(drafted, dim=1)
        for row, text in enumerate(texts):
            expected = torch.stack(plain.chain(text[: lengths[row] + 1], GAMMA))
            torch.testing.assert_close(found[row], expected, atol=1e-3, rtol=0)
            assert proposal.ids[row].tolist() == expected.argmax(-1).tolist()
        accepted = torch.randint(0, GAMMA + 1, (len(LENGTHS),), generator=generator).tolist()
        for row, count in enumerate(accepted):
            following = texts[row][lengths[row] : lengths[row] + 1 + count]
            runner.forward(ForwardBatch([following + [0] * (GAMMA - count)], [row]))
            lengths[row] += 1 + count
            runner.truncate([row], [lengths[row]])
            requests[row].output_ids[:] = texts[row][LENGTHS[row] : lengths[row] + 1]
        drafter.commit(batch.rows, Lengths.of(lengths, runner.device))


def last_states(target: Transformer, text: list[int]) -> Tensor:
    """[1, T, hidden] of one text, of a forward of the whole model."""
    runner = ModelRunner(
        target, SDPABackend(16), Group((0,), 0), 1, len(text), state_room=StateRoom(1)
    )
    seen = LastStates(target.config.num_layers)
    runner.observers.append(seen)
    runner.allocate(0)
    runner.forward(ForwardBatch([text], [0], is_of_prompt=True))
    assert seen.newest is not None
    return seen.newest


def drawn(logits: Tensor, number: int, prompt: Sequence[int], output: Sequence[int]) -> int:
    """The token that request `number` draws after its output: the first of independent events
    whose rates are the tokens' probabilities."""
    seed = torch.tensor([derive_seed(SAMPLED.seed, number)])
    position = torch.tensor([[len(prompt) + len(output)]])
    times = exponentials(seed, position, torch.arange(VOCAB))[0, 0]
    return int((times / chances(logits, SAMPLED, prompt, output)).argmin())


@pytest.mark.parametrize(
    ("kind", "policy", "sampling"),
    [
        (DENSE, "full", SamplingSection()),
        (DENSE, "streaming_llm", SAMPLED),
        (MIMO, "full", SAMPLED),
        (MIMO, "streaming_llm", SamplingSection()),
    ],
)
def test_path_drafts_have_the_logits_of_the_definition(
    kind: str,
    policy: str,
    sampling: SamplingSection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two lanes in turn: after the prompt, further down a path and along others, after accepted
    drafts and others; and of a lane's next request. States come in parts, those of wrong tokens
    before the right ones. A window as large as the text is the whole cache. A sampled draft has
    the random numbers and penalties of its request and place."""
    reference, plain = with_head(kind, VOCAB)
    target, head = load(save(reference, plain, tmp_path))
    found: list[Tensor] = []
    read_out = MtpHead.read_out

    def noted(head: MtpHead, output: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = read_out(head, output)
        found.append(logits[0, 0])
        return logits, state

    monkeypatch.setattr(MtpHead, "read_out", noted)
    room = 80
    kv = KVSection(policy, room, 2)
    places = ([target.config.num_layers], 2, 2, room, target.config.hidden_size)
    kept = ReceivedStates(*places, torch.float32, torch.device("cpu"))
    draft = make_draft(head, kv, 2, room, max_drafts=40)
    drafter = MtpPathDrafter(draft, kv, kept, CoupledSampling(sampling))
    texts = [list(random_prompts([room], VOCAB, seed)[0]) for seed in range(3)]
    hidden = [last_states(target, text) for text in texts]
    lengths = (20, 20, 20, 21, 24, 50, 50)
    new = random_prompts([4], VOCAB, 9)[0]
    paths = [(), new[:2], new, (5, 9), (texts[0][21], 4), (3,), (9, 9)]
    for lanes in ((0, 1), (1, 0)):
        ends = [0, 0]
        for end, path in zip(lengths, paths, strict=True):
            for lane in lanes:
                number = 2 if (lane, lanes) == (0, (1, 0)) else lane
                text = texts[number][:end]
                begin = max(0, ends[lane] - 1)
                wrong = torch.randn(1, 3, target.config.hidden_size)
                for first, states in (
                    (begin, wrong),
                    (begin, hidden[number][:, begin : end - 1]),
                ):
                    tokens = tuple(texts[number][first : first + states.shape[1]])
                    launch = RunLaunch(0, number, lane, False, 0, 0, first, tokens)
                    drafter.keep_states(launch, states)
                asked = DraftRequest(number, lane, ends[lane], tuple(text[ends[lane] :]), path)
                ends[lane] = end
                candidate = drafter.propose(asked, text)
                expected = plain.chain(text, len(path) + 1, path)[-1]
                torch.testing.assert_close(found[-1], expected, atol=1e-3, rtol=0)
                assert candidate is not None
                if sampling.temperature > 0:
                    output = [*text[lengths[0] :], *path]
                    assert candidate[0] == drawn(expected, number, text[: lengths[0]], output)
                else:
                    best = int(expected.argmax())
                    share = float(expected.softmax(-1)[best])
                    assert candidate == (best, pytest.approx(share, abs=1e-3))


def test_a_ring_accepts_the_drafts_of_the_definition(tmp_path: Path) -> None:
    """Of two stages in threads, with prompts in several chunks, whose states come from the last
    stage: after each text so many as the definition gets right."""
    reference, plain = with_head(DENSE, VOCAB)
    plain.fit()
    folder = save(reference, plain, tmp_path)
    source = find_model("--model", str(folder))
    _, head = load(folder)
    size = len(LENGTHS), max(LENGTHS) + NEW + GAMMA
    runners = []
    for layers, has_ends in ((range(3), True), (range(3, 4), False)):
        part = load_transformer(
            source.config,
            source.weights,
            Shard(),
            layers,
            torch.float32,
            torch.device("cpu"),
            has_ends=has_ends,
        )
        room = StateRoom(GAMMA + 2)
        runners.append(ModelRunner(part, SDPABackend(16), Group((0,), 0), *size, state_room=room))
    first, last = runners
    first.observers.append(ReceivedStates.of(first, [source.config.num_layers]))
    head.share(first.model)
    kv = KVSection("full")
    drafter = HeadDrafter(first, make_draft(head, kv, *size), kv, 0.0, GAMMA)
    there = Loopback()
    back = Loopback()
    last_stage = StageLoop(Stage(last, True, sends_states=True), Ends(there, back), Spans())
    thread = Thread(target=last_stage.serve, daemon=True)
    thread.start()
    chunk = 16
    pipeline = RecurrentPipeline(
        Stage(first, False),
        Ends(back, there),
        2,
        2,
        BatchLimits(size[1], prefill_tokens=2 * chunk, step_tokens=1 + GAMMA),
        chunk,
        speculation=RingSpeculation(first, drafter, GAMMA),
    )
    requests = make_requests(random_prompts(LENGTHS, VOCAB, 5), 20)
    texts = {request.request_id: list(request.prompt_ids) for request in requests}
    steps: list[tuple[int, int, int]] = []

    def observe(ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        for row, number in enumerate(ids):
            if output.num_accepted is not None:
                steps.append((number, len(texts[number]), output.num_accepted[row]))
            texts[number] += output.token_ids[row]

    pipeline.serve(requests, observe)
    pipeline.close()
    thread.join()
    assert sum(accepted for *_, accepted in steps) > 20
    for number, length, accepted in steps:
        text = texts[number]
        drafts = [int(logits.argmax()) for logits in plain.chain(text[:length], GAMMA)]
        following = text[length : length + GAMMA]
        right = [a == b for a, b in zip(drafts, following, strict=False)]
        expected = right.index(False) if False in right else len(right)
        assert min(accepted, len(following)) == expected


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With the tokenizer of the tiny checkpoint, and heads of which some drafts are accepted."""
    vocab_size = find_model("--model", str(tiny_checkpoint)).config.vocab_size
    found = {}
    for kind in [*KINDS, MIMO]:
        target, head = with_head(kind, vocab_size)
        head.fit()
        folder = tmp_path_factory.mktemp("with_head")
        save_with_tokenizer(target, folder, tiny_checkpoint)
        head.add_to(folder)
        found[kind] = folder
    return found


WORKLOAD = "--dtype float32 --dataset demo --prefix_len 70 --gen_len 24 --threads 1 --ignore_eos"
RUNS = {
    "whole cache": (DENSE, "--draft mtp --kv_policy full"),
    "window": (NEXT, "--draft mtp --budget 33 --gamma 6"),
    "mixture": (MIXTURE, "--draft mtp --kv_policy full --gamma 1"),
    "beside lookups": (DENSE, "--draft ngram+mtp --kv_policy full"),
    "chosen length": (DENSE, "--draft mtp --kv_policy full --gamma auto"),
    "chains that stop": (DENSE, "--draft mtp --kv_policy full --pa 0.5"),
    "packed": (DENSE, "--draft mtp --kv_policy full --linear packed"),
    "ranks": (DENSE, "--draft mtp --kv_policy full --nproc 2"),
    "attention in every layer": (MIMO, "--draft mtp --kv_policy full"),
    "attention in every layer, ranks, window": (MIMO, "--draft ngram+mtp --budget 33 --nproc 2"),
    "ranks of a mixture": (NEXT, "--draft mtp --budget 33 --nproc 2"),
}


@pytest.mark.narrow(5)
@pytest.mark.parametrize(("kind", "words"), RUNS.values(), ids=RUNS)
def test_drafts_change_no_token(
    kind: str, words: str, checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    line = ["--model", checkpoints[kind], *WORKLOAD.split(), "--B", "3", "--num_batches", "2"]
    ended = command("run", *line, *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * 2
    assert records[0]["correctness"]["num_tokens"] == 144
    assert records[1]["metrics"]["draft_acceptance_rate"] > 0 or "ngram" in words
    assert "--draft_ranks" not in flags_of(records[1]["config"])


def test_requests_in_flight_have_the_tokens_of_transformers(
    checkpoints: dict[str, Path],
) -> None:
    """Of ragged prompts, greedy."""
    folder = checkpoints[DENSE]
    llm = LLM(str(folder), draft="mtp", kv=KVSection("full"), dtype="float32", threads=1)
    check_greedy_tokens(llm, folder, num_new=24)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_served_requests_have_the_tokens_of_requests_without_drafts(
    num_ranks: int, checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    words = f"{WORKLOAD} --draft mtp --kv_policy full --modes inflight inflight+draft --B 2"
    words += f" --num_requests 5 --nproc {num_ranks}"
    out = tmp_path / "out.jsonl"
    ended = command("serve", "--model", checkpoints[NEXT], *words.split(), "--out", out)
    assert ended.code == 0, ended.err
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(r["status"], r["num_differing"]) for r in records] == [("verified", 0)] * 2
    assert records[1]["metrics"]["draft_acceptance_rate"] > 0


@pytest.mark.parametrize("kind", [DENSE, NEXT])
def test_drafts_after_a_hit_are_those_after_a_prefill(
    kind: str, checkpoints: dict[str, Path]
) -> None:
    """Of conversations that begin where a snapshot of the states was taken, within a block: as many
    drafts are accepted in each step as if each text was prefilled anew."""
    found = []
    for shares in (False, True):
        llm = LLM(
            str(checkpoints[kind]),
            draft="mtp",
            kv=KVSection("full"),
            dtype="float32",
            threads=1,
            max_tokens=400,
            block_tokens=16,
            prefix_cache=shares,
        )
        generator = torch.Generator().manual_seed(4)
        text: list[int] = []
        served = []
        for length in (70, 9, 1, 30):
            text += torch.randint(llm.model.vocab_size, (length,), generator=generator).tolist()
            output = llm.submit(text, 24, ignore_eos=True).result()
            text += output.output_ids
            acceptance = output.metrics.acceptance
            assert acceptance is not None and acceptance.num_accepted_draft_tokens
            served.append((output.output_ids, acceptance.acceptance_histogram))
        found.append(served)
    assert found[0] == found[1]


def test_sampled_drafts_have_the_probabilities_of_the_definition(tmp_path: Path) -> None:
    reference = the_model(VOCAB)
    plain = PlainMtpHead(reference)
    target, head = load(save(reference, plain, tmp_path))
    requests, drafter = started(target, head, SAMPLED)
    batch = DeviceBatch.of(Batch(tuple(requests)), VOCAB, torch.device("cpu"))
    proposal = drafter.propose(batch, DraftShape(GAMMA, drafter.prepare(requests, GAMMA)))
    assert proposal.probabilities is not None
    for row, request in enumerate(requests):
        text = [*request.prompt_ids, *request.output_ids]
        drafts = proposal.ids[row].tolist()
        for place, logits in enumerate(plain.chain(text, GAMMA, drafts)):
            output = [*request.output_ids, *drafts[:place]]
            expected = chances(logits, SAMPLED, request.prompt_ids, output)
            found = proposal.probabilities[row, place]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


STAGES = {
    "ring": (DENSE, "--modes inflight inflight+draft ring+draft --nproc 2 --kv_policy full"),
    "ring, penalties": (
        DENSE,
        "--modes inflight inflight+draft ring+draft --nproc 2 --kv_policy full "
        "--repetition_penalty 1.2 --presence_penalty 0.3",
    ),
    "ring, chunks, window": (
        NEXT,
        "--modes inflight inflight+draft ring+draft --nproc 3 --budget 33 --prefill_chunk 16 "
        "--layer_split auto",
    ),
    "ring, two ranks a stage": (
        MIMO,
        "--modes inflight inflight+draft ring+draft --nproc 4 --kv_policy full --layer_split 1,3",
    ),
    "ring of one": (DENSE, "--modes inflight inflight+draft ring+draft --kv_policy full"),
    "pipelines": (
        DENSE,
        "--modes inflight inflight+draft pipeline+draft pipeinfer --nproc 3 --kv_policy full",
    ),
    "pipelines, chunks, window": (
        MIMO,
        "--modes inflight inflight+draft pipeline+draft pipeinfer --nproc 2 --budget 33 "
        "--prefill_chunk 16",
    ),
    "pipelines, drafts alone": (
        NEXT,
        "--modes inflight inflight+draft pipeline+draft pipeinfer --nproc 3 --kv_policy full "
        "--layer_split 0,0.5,0.5",
    ),
    "pipelines, two ranks a stage": (
        MIMO,
        "--modes inflight inflight+draft pipeline+draft pipeinfer --nproc 4 --kv_policy full "
        "--layer_split 3,1",
    ),
}
AHEAD = "--pa 0 --pr 0 --pd 0"  # which would stop drafts of random models


def served(
    kind: str, words: str, checkpoints: dict[str, Path], command: Command, folder: Path
) -> list[dict[str, Any]]:
    """The records of the modes in `words`."""
    out = folder / "out.jsonl"
    line = ["--num_requests", "5", "--concurrency", "3", "--gamma", "3", "--draft", "mtp"]
    line += [*words.split(), *WORKLOAD.split(), "--out", str(out)]
    line += AHEAD.split() if "pipeinfer" in words else []
    ended = command("serve", "--model", checkpoints[kind], *line)
    assert ended.code == 0, ended.err
    return [json.loads(text) for text in out.read_text().splitlines()]


@pytest.mark.narrow(2)
@pytest.mark.parametrize(("kind", "words"), STAGES.values(), ids=STAGES)
def test_stages_accept_as_many_drafts_as_one_rank(
    kind: str, words: str, checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    """From states that the last stage sends: a wrong one would not change a token, but what is
    accepted. Windows end elsewhere, and drafts that run ahead may come too late for a busy
    machine."""
    records = served(kind, words, checkpoints, command, tmp_path)
    assert [record["status"] for record in records] == ["verified"] * len(records)
    emitted = [record["metrics"]["mean_acceptance_length"] for record in records]
    assert min(emitted[1:3]) > 1.05
    assert emitted[2] == emitted[1] or "--budget" in words


WARM = "--temperature 0.8 --top_p 0.95 --repetition_penalty 1.2 --presence_penalty 0.3"


def test_a_ring_samples_the_tokens_of_one_rank(
    checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    """That rejects and accepts the same drafts by the same random numbers. Without drafts others
    are drawn, of the same distribution, so that nothing else says whether they are right."""
    kind, words = STAGES["ring"]
    records = served(kind, f"{words} {WARM}", checkpoints, command, tmp_path)
    assert [record["status"] for record in records] == ["verified", "unverified", "unverified"]
    _, one_rank, ring = ([r["output_hash"] for r in record["requests"]] for record in records)
    assert ring == one_rank
    emitted = [record["metrics"]["mean_acceptance_length"] for record in records]
    assert emitted[2] == emitted[1] > 3


def test_pipelines_sample_the_tokens_of_a_rank_without_drafts(
    checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    """With its noise, which drafts share: most are right, although any of many tokens is likely."""
    kind, words = STAGES["pipelines"]
    records = served(kind, f"{words} {WARM}", checkpoints, command, tmp_path)
    statuses = {record["name"].partition(",")[0]: record["status"] for record in records}
    assert statuses.pop("inflight+draft") == "unverified"
    assert statuses == dict.fromkeys(("inflight", "pipeline+draft", "pipeinfer"), "verified")
    assert records[2]["metrics"]["mean_acceptance_length"] > 3


def test_the_plan_has_the_bytes_of_what_a_head_shares(checkpoints: dict[str, Path]) -> None:
    """Where no stage is, and of the states that come."""
    cpu = torch.device("cpu")
    for folder in checkpoints.values():
        workload = WorkloadSection(prefix_len=70, gen_len=16, batch_size=3)
        asked = RunConfig(ModelSection(str(folder), "float32"), workload=workload)
        run = find(asked.with_draft("mtp"), Launch(), SetupCache())
        plan = ModelPlan(run.config, run.source.config, (0,), 0, ENDS, row_tokens=90)
        ends = load_kind(run.source, Shard(), plan.kinds, cpu, ENDS)
        assert plan.weight_bytes == sum(x.nbytes for x in ends.parameters()) > 0
        assert plan.kv_bytes == 0
        assert plan.state_bytes == make_received_states(plan, cpu).num_bytes


@pytest.mark.parametrize("linear", ["torch", "packed"])
def test_the_plan_has_the_bytes_of_the_head(linear: str, checkpoints: dict[str, Path]) -> None:
    """Those that it holds without what is the target's, and those that a forward reads with it."""
    for kind, folder in checkpoints.items():
        workload = WorkloadSection(prefix_len=70, gen_len=16, batch_size=3)
        asked = RunConfig(ModelSection(str(folder), "float32", linear), workload=workload)
        run = find(asked.with_draft("mtp"), Launch(), SetupCache())
        assert run.config.draft is not None and run.config.draft.state_layers == (4,)
        _, head_plan = model_plans_of(run.config, run.models, 0)
        target, head = load(folder)
        if linear == "packed":
            pack(target)
            pack(head)
            head.share(target)
        own = [x for name, x in head.named_parameters() if not name.startswith(SHARED)]
        assert head_plan.weight_bytes == sum(x.nbytes for x in own), kind
        assert costs.weight_bytes(head.config, Shard(), 4) == weight_bytes(head)


REFUSED = {
    "run --draft mtp --kv_policy snapkv": "a draft head keeps its whole cache or a window of it",
    "run --draft mtp --draft_weights int8": "--draft_weights int8: the head of --draft mtp",
    "run --draft mtp --draft_ranks 0 --nproc 2": "--draft_ranks 0: the head of --draft mtp is on",
    "run --draft mtp --eagle_layers 1 2": "no EAGLE-3 head drafts here",
    "serve --draft mtp --modes inflight+draft --prefix_cache --kv_offload host": (
        "--kv_offload host: host memory holds no states"
    ),
    "serve --draft ngram+mtp --modes ring+draft --nproc 2": "drafts from one source; choose ngram",
    "plan --draft mtp --draft_weights int8 --acceptance 0.8 --bandwidth 9 --flops 9": (
        "--draft_weights int8: the head of --draft mtp"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_served_is_refused(
    words: str, checkpoints: dict[str, Path], command: Command, tmp_path: Path
) -> None:
    line = [*words.split(), "--model", checkpoints[DENSE]]
    if not words.startswith("plan"):
        line += ["--prefix_len", "70", "--gen_len", "16", "--dtype", "float32"]
    ended = command(*line, "--out", tmp_path / "out.jsonl")
    assert ended.code != 0 and REFUSED[words] in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_model_without_a_head_is_refused(
    tiny_checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    ended = command("run", "--model", tiny_checkpoint, "--draft", "mtp", "--out", tmp_path / "o")
    assert ended.code != 0 and "has no head for multi-token prediction (tensors mtp.*)" in ended.err
    ended = command(
        *("plan", "--model", "demo", "--draft", "mtp", "--acceptance", "0.8"),
        *("--bandwidth", "9", "--flops", "9"),
    )
    assert ended.code != 0 and "demo has 0 layers for multi-token prediction" in ended.err


CONTRADICTIONS = {
    "config says none": ({"mtp_num_hidden_layers": 0}, {}, "are 1 layers .* its config says 0"),
    "config says two": ({"mtp_num_hidden_layers": 2}, {}, "are 1 layers .* its config says 2"),
    "two layers": (
        {"mtp_num_hidden_layers": 2},
        {"mtp.layers.1.input_layernorm.weight": torch.ones(48)},
        "has 2 layers, and only one is served",
    ),
    "an embedding of its own": (
        {"mtp_use_dedicated_embeddings": True},
        {"mtp.embed_tokens.weight": torch.ones(VOCAB, 48)},
        "mtp.embed_tokens.weight of shape .* is not part of the model",
    ),
    "a tensor is missing": ({}, {"mtp.norm.weight": None}, "mtp.norm.weight is missing"),
    "another shape": ({}, {"mtp.fc.weight": torch.ones(48, 48)}, "mtp.fc.weight has shape"),
    "numbers": (
        {},
        {"mtp.fc.weight": torch.ones(48, 96, dtype=torch.int8)},
        "mtp.fc.weight is stored as int8",
    ),
}


@pytest.mark.parametrize(("fields", "tensors", "message"), CONTRADICTIONS.values())
def test_a_head_that_is_not_that_of_its_config_is_refused(
    fields: dict[str, Any], tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """The model itself is found."""
    reference = the_model(VOCAB)
    save(reference, PlainMtpHead(reference), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    stored = load_file(file) | tensors
    save_file({name: x for name, x in stored.items() if x is not None}, file)
    source = find_model("--model", str(tmp_path))
    with pytest.raises(ValueError, match=message) as refusal:
        find_mtp_head("--draft mtp", source)
    assert len(str(refusal.value).splitlines()) == 1


def test_the_head_of_a_checkpoint_that_also_sees(tmp_path: Path) -> None:
    """Its tensors are beside those of the text."""
    reference = the_model(VOCAB)
    _, own = load(save(reference, PlainMtpHead(reference), tmp_path))
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {key: text[key] for key in text if key != "architectures"}
        | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file(
        {name.replace("model.", "model.language_model."): x for name, x in stored.items()}, file
    )
    _, found = load(tmp_path)
    pairs = zip(own.named_parameters(), found.named_parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)


def test_a_random_model_has_a_random_head() -> None:
    config = find_config("--model", "random:qwen3.5-27b")
    weights = RandomWeights(expected_shapes(config))
    source = ModelSource(config.name, config, weights, None, is_random=True)
    head = find_mtp_head("--draft mtp", source)
    assert head.is_random and head.weights.tensors["mtp.fc.weight"].shape == (5120, 10240)
    shapes = [stored.shape for stored in head.weights.tensors.values()]
    assert len(shapes) == 15  # those that the published checkpoint has
    # A forward reads them and the target's matrix of logits, of which an int8 one has a scale for
    # 128 inputs of an output.
    own = sum(math.prod(shape) for shape in shapes)
    logits = 248320 * 5120
    hardware = Hardware(1e9, 1e12)
    for low_bit, logits_bytes in ((None, 2 * logits), ("int8", logits + 2 * logits // 128)):
        target = costs.Deployment(config, hardware, 2, low_bit=low_bit)
        planned = plan.find_mtp_head(plan.PlanSection("qwen3.5-27b", draft="mtp"), target)
        cost = planned.forward(1, 1, 1000)
        assert cost.weight_bytes == 2 * own + logits_bytes
        # A number of a norm multiplies nothing. K and V of 4 heads of 256 numbers.
        in_norms = 5 * 5120 + 2 * 256
        assert cost.linear_flops == 2 * (own - in_norms + logits)
        assert cost.kv_bytes == 1001 * 2 * 4 * 256 * 2
