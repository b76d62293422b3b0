"""Drafts of EAGLE-3 heads equal those of the definition, written out in float64, from the hidden
states of transformers; and verified drafts are lossless."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from draft_heads import HeadForm, PlainHead, chances, load_head, write_head
from torch import Tensor

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.kv.cache import Lengths
from magicdec.model.checkpoint.weight_map import weight_map
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.transformer import Transformer
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Batch
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.drafter import DraftShape
from magicdec.speculation.head_drafter import HeadDrafter
from magicdec.speculation.steps.speculative import Speculative
from magicdec.speculation.steps.strategy import Setup, make_strategy

TARGET = replace(TINY, num_layers=4)
FORMS = {
    "plain": HeadForm(),
    "states after the last layer": HeadForm(capture=(0, 2, 4)),
    "two states": HeadForm(capture=(1, 3)),
    "norm before fc": HeadForm(norm_before_fc=True),
    "a norm for each state": HeadForm(fc_norm=True, norm_output=True),
    "normed residual": HeadForm(norm_before_residual=True),
    "two layers": HeadForm(num_layers=2),
    "norms of heads": HeadForm(qk_norm=True),
    "the whole vocabulary": HeadForm(draft_vocab=None),
    "an embedding of its own": HeadForm(has_embedding=True),
}
# Whose attention differs, and which have one layer: what a second one caches depends on the chunks
# that saw the window.
WINDOWED = ("plain", "norms of heads", "an embedding of its own")
LENGTHS = (5, 40, 1, 23)
GAMMA = 4


def transformers_states(model: Transformer, token_ids: list[int]) -> list[Tensor]:
    """Hidden states [T, hidden] after 0, 1, ... layers; the last before the final norm."""
    config = transformers.AutoConfig.for_model(**to_hf_config(model.config))
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = model.state_dict()
    weights = {}
    for parameter, pieces in weight_map(model.config, model.shard, model.layers).items():
        rows = [piece.rows[1] - piece.rows[0] for piece in pieces]
        for piece, values in zip(pieces, state[parameter].split(rows), strict=True):
            weights[piece.name] = values
    theirs.load_state_dict(weights, strict=False)
    last = list[Tensor]()
    layer = theirs.model.layers[-1]
    layer.register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        found = theirs(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [*(states[0] for states in found[:-1]), last[0].reshape(len(token_ids), -1)]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native"])
@pytest.mark.parametrize(
    ("name", "sinks_and_newest"),
    [*((name, None) for name in FORMS), *((name, (3, 6)) for name in WINDOWED)],
    ids=[*FORMS, *(f"{name}, a window" for name in WINDOWED)],
)
def test_drafts_equal_the_definition(
    name: str, sinks_and_newest: tuple[int, int] | None, is_native: bool, tmp_path: Path
) -> None:
    """In ragged batches, after steps that accepted all, some or none of the drafts."""
    form = FORMS[name]
    kv = KVSection("full")
    if sinks_and_newest is not None:
        sinks, newest = sinks_and_newest
        kv = KVSection("streaming_llm", sinks + newest, sinks)
    model = tiny_transformer(TARGET, seed=3)
    plain = model.state_dict()["embedding.weight"].clone()
    states_of = {}
    weights = write_head(tmp_path, TARGET, form, seed=1)
    size = len(LENGTHS), max(LENGTHS) + 40 + GAMMA
    prompts = random_prompts(LENGTHS, TARGET.vocab_size, 5)
    texts = reference_texts(model, prompts)
    for number, text in enumerate(texts):
        states_of[number] = transformers_states(model, text)
    head = load_head(tmp_path, model)
    runner = make_runner(model, *size)
    if is_native:
        runner = make_runner(pack(model), *size, NativeBackend())
        runner.executor = Executor(model, Group((0,), 0))
    runner.observers.append(HiddenStates.of(runner, form.capture))
    backend = {"backend": NativeBackend(), "block_size": 64} if is_native else {}
    draft = make_draft(head, kv, *size, **backend)
    if is_native:
        assert draft.runner is not None
        pack(head)
        draft.runner.executor = Executor(head, draft.runner.group)
    decoding = DecodingSection("speculative", "eagle", GAMMA)
    requests = make_requests(prompts, 30)
    engine = Engine(runner, 16)
    engine.prefill(requests)
    strategy = make_strategy("speculative", Setup(runner, decoding, kv, draft=draft))
    assert isinstance(strategy, Speculative) and isinstance(strategy.drafter, HeadDrafter)
    strategy.admit(Batch(tuple(requests)))
    # Of some steps, target tokens stand in for the drafts, so that they are accepted.
    definition = {i: PlainHead(TARGET, form, weights, plain) for i in range(len(LENGTHS))}
    lengths = [len(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        batch = Batch(tuple(requests))
        device_batch = DeviceBatch.of(batch, TARGET.vocab_size, runner.device)
        pending = strategy.drafter.prepare(requests, GAMMA)
        proposal = strategy.drafter.propose(device_batch, DraftShape(GAMMA, pending))
        for row, text in enumerate(texts):
            exact = definition[row]
            states = torch.stack([states_of[row][a] for a in form.capture], dim=1)
            done = len(exact.kv[0])
            for slot in range(done, lengths[row] - 1):
                exact.slot(exact.reduced(states[slot]), text[slot + 1])
            last = lengths[row] - 1
            if sinks_and_newest is not None:
                # The newest of the slots that the head held before this draft; the sinks stand
                # right before them (arXiv 2309.17453, section 3.2).
                first = max(sinks, lengths[row] - pending - newest)
                exact.hidden = range(sinks, first)
            chain = exact.chain(exact.reduced(states[last]), text[last + 1], GAMMA)
            assert proposal.ids[row].tolist() == [token for token, _ in chain], (row, last)
        accepted = torch.randint(0, GAMMA + 1, (len(LENGTHS),), generator=generator).tolist()
        for row, count in enumerate(accepted):
            count = min(count, len(texts[row]) - lengths[row] - 2)
            following = texts[row][lengths[row] : lengths[row] + 1 + count]
            runner.forward(ForwardBatch([following + [0] * (GAMMA - count)], [row]))
            lengths[row] += 1 + count
            runner.truncate([row], [lengths[row]])
            requests[row].output_ids[:] = texts[row][len(prompts[row]) : lengths[row] + 1]
        rows = device_batch.rows
        strategy.drafter.commit(rows, Lengths.of(lengths, runner.device))


SAMPLINGS = {
    "greedy": SamplingSection(),
    "penalties": SamplingSection(repetition_penalty=1.6, presence_penalty=1.5),
    "a low temperature": SamplingSection(temperature=1e-4),
    "sampled with penalties": SamplingSection(
        temperature=0.8, repetition_penalty=1.6, presence_penalty=1.5
    ),
}


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("name", ["plain", "the whole vocabulary"])
def test_a_head_samples_and_is_penalised_in_the_ids_of_its_target(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Each draft by the definition of the head after the drafts before it, and of penalties for
    what these, the prompt and the output have. Where it is not drawn, it is the likeliest."""
    form = FORMS[name]
    sampling = SAMPLINGS[kind]
    model = tiny_transformer(TARGET, seed=3)
    weights = write_head(tmp_path, TARGET, form, seed=1)
    size = len(LENGTHS), max(LENGTHS) + 40 + GAMMA
    runner = make_runner(model, *size)
    runner.observers.append(HiddenStates.of(runner, form.capture))
    draft = make_draft(load_head(tmp_path, model), KVSection("full"), *size)
    prompts = random_prompts(LENGTHS, TARGET.vocab_size, 5)
    requests = make_requests(prompts, 30, sampling=sampling)
    Engine(runner, 16).prefill(requests)
    decoding = DecodingSection("speculative", "eagle", GAMMA)
    strategy = make_strategy("speculative", Setup(runner, decoding, KVSection("full"), draft=draft))
    assert isinstance(strategy, Speculative) and isinstance(strategy.drafter, HeadDrafter)
    strategy.admit(Batch(tuple(requests)))
    batch = DeviceBatch.of(Batch(tuple(requests)), TARGET.vocab_size, runner.device)
    pending = strategy.drafter.prepare(requests, GAMMA)
    proposal = strategy.drafter.propose(batch, DraftShape(GAMMA, pending))
    drafts = proposal.ids.tolist()
    for row, request in enumerate(requests):
        text = [*request.prompt_ids, *request.output_ids]
        exact = PlainHead(TARGET, form, weights, model.state_dict()["embedding.weight"])
        states = torch.stack([transformers_states(model, text)[a] for a in form.capture], dim=1)
        for slot in range(len(text) - 1):
            logits, state = exact.slot(exact.reduced(states[slot]), text[slot + 1])
        for place, token in enumerate(drafts[row]):
            output = [*request.output_ids, *drafts[row][:place]]
            scores = torch.full((TARGET.vocab_size,), -torch.inf, dtype=torch.float64)
            scores[exact.target_ids] = logits
            expected = chances(scores, sampling, request.prompt_ids, output)
            if kind != "sampled with penalties":
                assert token == int(expected.argmax()), (row, place)
            if proposal.probabilities is not None:
                assert torch.allclose(proposal.probabilities[row, place], expected, atol=1e-4)
            logits, state = exact.slot(state, token)
    assert (proposal.probabilities is None) == (sampling.temperature == 0)


def reference_texts(model: Transformer, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Prompts with any 40 tokens that follow; the first is the target's, which prefill emits."""
    runner = make_runner(model, len(prompts), max(LENGTHS) + 50)
    requests = make_requests(prompts, 40)
    engine = Engine(runner, 64)
    engine.prefill(requests)
    return [
        [*r.prompt_ids, *r.output_ids, *random_prompts([39], TARGET.vocab_size, i)[0]]
        for i, r in enumerate(requests)
    ]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kv", [KVSection("full"), KVSection("streaming_llm", 40, 4)], ids=["full", "window"]
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_native_chain_drafts_the_same(
    form: HeadForm,
    kv: KVSection,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain in one native call has the bits of one that calls each layer."""
    drafted = list[list[list[int]]]()
    propose = HeadDrafter.propose

    def noted(drafter: HeadDrafter, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        proposal = propose(drafter, batch, shape)
        drafted.append(proposal.ids.tolist())
        return proposal

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    write_head(tmp_path, TARGET, form, seed=1)
    size = len(LENGTHS), max(LENGTHS) + 40 + GAMMA
    found = []
    for is_native in (False, True):
        model = pack(tiny_transformer(TARGET, seed=3, dtype=dtype))
        head = load_head(tmp_path, model)
        pack(head)
        runner = make_runner(model, *size, NativeBackend())
        runner.executor = Executor(model, runner.group)
        runner.observers.append(HiddenStates.of(runner, form.capture))
        draft = make_draft(head, kv, *size, NativeBackend(), block_size=64)
        assert draft.runner is not None
        if is_native:
            draft.runner.executor = Executor(head, draft.runner.group)
        requests = make_requests(random_prompts(LENGTHS, TARGET.vocab_size, 5), 30)
        pa = 0.3 if form.norm_output else None
        how = {"drafter": "eagle", "draft": draft, "pa": pa, "names": ["speculative"]}
        decode_both(runner, requests, kv, GAMMA, **how)
        found.append(list(drafted))
        drafted.clear()
    assert found[0] == found[1] and len(found[0]) > 20
