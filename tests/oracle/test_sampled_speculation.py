"""Sampled speculation through the whole engine, on a toy vocabulary: the emitted tokens have the
distribution of the target. Greedy requests with penalties emit exactly the same tokens."""

from collections import Counter
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from chi_squared import ACCEPTED, p_value
from conftest import (
    TINY,
    decode,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from draft_heads import FITTED, load_head, write_head
from lossless import speculate
from torch import Tensor
from two_stages import serve_with_drafts

from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.engine.engine import Engine
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.eagle import EagleHead
from magicdec.names import EAGLE
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Request
from magicdec.runner.sampling.metadata import Filters, Penalties
from magicdec.runner.sampling.model_tokens import Proposal, confidence
from magicdec.runner.sampling.sampling import make_params, probabilities, process
from magicdec.speculation import draft_kv
from magicdec.speculation.draft_kv import DraftKV, draft_chain
from magicdec.speculation.draft_length import DraftCost, FixedLength
from magicdec.speculation.drafter import DraftPlan
from magicdec.speculation.forecast import Acceptance
from magicdec.speculation.mixed import MixedDrafter
from magicdec.speculation.steps.recorder import Eager, Recorder
from magicdec.speculation.steps.strategy import Setup

TOY = replace(TINY, vocab_size=6, bos_token_id=None, eos_token_ids=())
PROMPT = (3, 1, 4, 1, 5, 5, 3, 0, 2, 4, 4, 1)
SECTION = SamplingSection(temperature=1.7, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3)
NUM_TOKENS = 3
ROWS = 500
ROUNDS = 2


@cache
def exact_distribution(section: SamplingSection) -> dict[tuple[int, ...], float]:
    """The distribution of the first NUM_TOKENS tokens, from the target's own logits."""
    runner = make_runner(tiny_transformer(TOY), 1, 64)
    runner.cache.allocate(0, 64)
    result = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in result.items():
            runner.truncate([0], [0])
            logits = runner.forward(
                ForwardBatch(torch.tensor([[*PROMPT, *tokens]]), [0], num_outputs=1)
            )
            params = make_params(section, NUM_TOKENS, (), 0)
            request = Request(0, PROMPT, params, list(tokens))
            penalties = Penalties.of([request], TOY.vocab_size, runner.device)
            filters = Filters.of([params], runner.device)
            probs = probabilities(process(logits, penalties), filters)[0, 0]
            longer |= {(*tokens, i): mass * p for i, p in enumerate(probs.tolist())}
        result = longer
    return result


@cache
def toy_head() -> EagleHead:
    """A head that does not draft all of the toy's tokens."""
    form = replace(FITTED, draft_vocab=4)
    with TemporaryDirectory() as directory:
        write_head(Path(directory), TOY, form)
        return load_head(Path(directory), tiny_transformer(TOY))


def emitted(
    strategy: str,
    drafter: str,
    kv: KVSection,
    gamma: int,
    recorder: Recorder | None = None,
) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    draft = None
    backend = GroupedBackend() if recorder is None else SDPABackend(16)
    runner = make_runner(tiny_transformer(TOY), ROWS, 32, backend)
    if drafter == "self in int8":
        copy_of_it = low_bit_copy(runner.model, "int8", is_packed=False)
        drafter = "self"
        runner = runner.with_draft_runner(runner.with_model(copy_of_it, None))
    if drafter.endswith(EAGLE):
        runner.observers.append(HiddenStates.of(runner, FITTED.capture))
        head = toy_head()
        draft = make_draft(head, kv, ROWS, 32, copy(backend), max_drafts=16)
    if drafter.endswith("model"):
        size = ROWS, 32
        draft = make_draft(tiny_transformer(TOY, seed=4), kv, *size, copy(backend), max_drafts=16)
    decoding = DecodingSection(strategy, drafter, gamma)
    setup = Setup(runner, decoding, kv, draft=draft, recorder=recorder or Eager())
    for seed in range(ROUNDS):
        engine = Engine(runner, 16)
        section = replace(SECTION, seed=seed)
        engine.prefill(make_requests([PROMPT] * ROWS, NUM_TOKENS, sampling=section))
        finished = decode(engine, strategy, setup)
        counts.update(tuple(r.output_ids) for r in finished)
    return counts


def p_of(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    assert set(counts) <= set(expected)
    return p_value(torch.tensor([counts[k] for k in expected]), torch.tensor([*expected.values()]))


@pytest.mark.narrow(1)
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    ("drafter", "kv", "gamma"),
    [
        ("self", KVSection("streaming_llm", 3, 1), 5),
        pytest.param("self in int8", KVSection("streaming_llm", 6, 2), 3, marks=pytest.mark.wide),
        pytest.param("ngram", KVSection("full"), 4, marks=pytest.mark.wide),
        pytest.param("model", KVSection("streaming_llm", 5, 2), 2, marks=pytest.mark.wide),
        ("ngram+self", KVSection("streaming_llm", 3, 1), 2),
        pytest.param("ngram+model", KVSection("full"), 3, marks=pytest.mark.wide),
        pytest.param("eagle", KVSection("full"), 2, marks=pytest.mark.wide),
        pytest.param("ngram+eagle", KVSection("full"), 2, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_speculation_samples_from_the_targets_distribution(
    drafter: str, kv: KVSection, gamma: int
) -> None:
    counts = emitted("speculative", drafter, kv, gamma)
    assert p_of(counts, exact_distribution(SECTION)) > ACCEPTED


@pytest.mark.usefixtures("trusted_lookups")
def test_rows_with_their_own_number_of_drafts_sample_from_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 4 tokens of a lookup in some rows, beside one of the model in the others."""
    model = pack(tiny_transformer(TOY))
    kv = KVSection("streaming_llm", 3, 1)
    ragged = 0
    plan = MixedDrafter.plan

    def counted(*arguments: Any) -> DraftPlan:
        nonlocal ragged
        planned = plan(*arguments)
        ragged += any(planned.judged) and max(planned.counts) > 1
        return planned

    monkeypatch.setattr(MixedDrafter, "plan", counted)
    runner = make_runner(model, ROWS, 32, NativeBackend())
    runner = replace(runner, executor=Executor(model, runner.group))
    length = FixedLength(1, Acceptance(1))
    counts = Counter[tuple[int, ...]]()
    length.cost = DraftCost(0.0, 0.01)
    decoding = DecodingSection("speculative", "ngram+self", 4)
    for seed in range(ROUNDS):
        engine = Engine(runner, 16)
        section = replace(SECTION, seed=seed)
        engine.prefill(make_requests([PROMPT] * ROWS, NUM_TOKENS, sampling=section))
        setup = Setup(runner, decoding, kv, draft_length=length)
        counts.update(tuple(r.output_ids) for r in decode(engine, "speculative", setup))
    assert ragged and p_of(counts, exact_distribution(SECTION)) > ACCEPTED


def stopping_counts(num_rounds: int, pa: float) -> Counter[tuple[int, ...]]:
    """What single rows emit, each of which stops for itself."""
    runner = make_runner(tiny_transformer(TOY), 1, 32)
    kv = KVSection("streaming_llm", 3, 1)
    setup = Setup(runner, DecodingSection("speculative", "self", 2, pa=pa), kv)
    engine = Engine(runner, 16)
    counts = Counter[tuple[int, ...]]()
    for seed in range(num_rounds):
        section = replace(SECTION, seed=seed)
        engine.prefill(make_requests([PROMPT], NUM_TOKENS, sampling=section))
        counts.update(tuple(r.output_ids) for r in decode(engine, "speculative", setup))
    return counts


def dropping(kv: DraftKV, *arguments: Any) -> Proposal:
    """A wrong rule: a token that was drawn is dropped if it is unlikely itself."""
    *rest, pa = arguments
    proposal = draft_chain(kv, *rest)
    assert proposal.probabilities is not None
    shares = proposal.probabilities.gather(2, proposal.ids.unsqueeze(2))[0, :, 0].tolist()
    count = next((k for k, share in enumerate(shares) if share < pa), len(shares))
    return proposal.first(count)


@pytest.mark.wide
def test_chains_that_stop_sample_from_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the test sees a rule that depends on the token which it drops."""
    expected = exact_distribution(SECTION)
    seen = Counter[bool]()
    pa = 0.3

    def noted(*arguments: Any) -> Tensor:
        share = confidence(*arguments)
        seen[bool(share < pa)] += 1
        return share

    monkeypatch.setattr(draft_kv, "confidence", noted)
    assert p_of(stopping_counts(1000, pa), expected) > ACCEPTED
    assert min(seen.values()) > 200 and len(seen) == 2, seen
    monkeypatch.setattr("magicdec.speculation.model_drafter.draft_chain", dropping)
    assert p_of(stopping_counts(500, pa), expected) < 1e-6


@pytest.mark.wide
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize("drafter", ["ngram", pytest.param("model", marks=pytest.mark.wide)])
def test_drafts_in_a_ring_sample_from_the_targets_distribution(drafter: str) -> None:
    """Two stages, two lanes of many samples."""
    model = tiny_transformer(TOY)
    num_rows = ROWS // 5
    draft = None
    if drafter == "model":
        draft = make_draft(tiny_transformer(TOY, seed=4), KVSection("full", -1), num_rows, 32)
    requests = make_requests([PROMPT] * ROWS * ROUNDS, NUM_TOKENS, sampling=SECTION)
    lanes = (2, num_rows // 2)
    drafted = serve_with_drafts(model, requests, lanes, 32, 2, drafter, draft)
    counts = Counter(tuple(request.output_ids) for request in requests)
    assert p_of(counts, exact_distribution(SECTION)) > ACCEPTED
    assert 0 < drafted.num_accepted < drafted.num_drafted


def test_the_baseline_samples_from_it_and_another_temperature_fails() -> None:
    counts = emitted("autoregressive", "self", KVSection("full"), 1)
    assert p_of(counts, exact_distribution(SECTION)) > ACCEPTED
    other = replace(SECTION, temperature=1.0)
    assert p_of(counts, exact_distribution(other)) < 1e-6


def test_a_request_samples_the_same_tokens_in_any_batch() -> None:
    prompts = random_prompts([9, 20, 5], TINY.vocab_size)
    section = SamplingSection(temperature=1.0, seed=3)
    together = make_requests(prompts, 30, sampling=section)
    runner = make_runner(tiny_transformer(), 3, 60)
    _, sampled, _ = decode_both(runner, together, KVSection("streaming_llm", 8, 2), 3)
    for request, tokens in zip(make_requests(prompts, 30, sampling=section), sampled, strict=True):
        alone = make_runner(tiny_transformer(), 1, 60)
        _, found, _ = decode_both(alone, [request], KVSection("streaming_llm", 8, 2), 3)
        assert found == [tokens]


@pytest.mark.narrow(2)
@pytest.mark.parametrize(("repetition", "presence"), [*product([1.0, 1.3], [0.0, 2.0])])
def test_greedy_requests_with_penalties_emit_the_baselines_tokens(
    repetition: float, presence: float
) -> None:
    section = SamplingSection(repetition_penalty=repetition, presence_penalty=presence)
    model = tiny_transformer()
    kv = KVSection("streaming_llm", 20, 4)
    lengths = [5, 40, 1]
    ours = speculate(model, kv, lengths=lengths, sampling=section)
    assert ours.counts != {0}
    if (repetition, presence) != (1.0, 0.0):
        assert ours.tokens != speculate(model, KVSection("full"), lengths=lengths).tokens
