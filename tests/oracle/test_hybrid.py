"""Models with linear attention (Gated DeltaNet, arXiv 2412.06464) in most layers: logits and tokens
of transformers, states that go back, and lossless drafts. transformers' own cache of such models
does not go back, so that there the oracle is decoding anew."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_hybrids import KINDS, check_greedy_tokens, save_with_tokenizer, the_model
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.check import wider
from magicdec.bench.roofline import bytes_read, weight_bytes
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, WorkloadSection
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.llm import LLM
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.elementwise.delta import (
    CHUNK,
    DeltaTokens,
    convolve,
    in_vectors,
    recur,
    recur_in_chunks,
    write,
)
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.transformer import Transformer
from magicdec.names import ELEMENTWISE, load_named
from magicdec.output.console import make_progress
from magicdec.runner.forward_batch import Cancelled, ForwardBatch
from magicdec.runner.layer_states import LayerStates, StateRoom, StateShape
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, SamplingParams
from magicdec.setup.loading import runner_of as make_runner
from magicdec.setup.memory_plan import model_plans_of
from magicdec.setup.prepare import SetupCache, find
from magicdec.systems.shared_prefill import PromptCaches

MOST = 6  # tokens that go back
SIZES = (2, 4, 8, 16)  # key heads, value heads, sizes of a key and of a value


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_model(97)


@pytest.fixture(scope="module")
def model(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("hybrid")
    reference.save_pretrained(folder)
    source = find_model("--model", str(folder))
    cpu = torch.device("cpu")
    return load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)


@pytest.fixture(scope="module")
def checkpoint(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, vocab_size: int
) -> Path:
    """With the tokenizer of the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("with_tokenizer")
    save_with_tokenizer(the_model(vocab_size), folder, tiny_checkpoint)
    return folder


@pytest.fixture(scope="module")
def vocab_size(tiny_checkpoint: Path) -> int:
    return find_model("--model", str(tiny_checkpoint)).config.vocab_size


def runner_of(model: Transformer, num_rows: int, most: int = MOST) -> ModelRunner:
    place = SDPABackend(16), Group((0,), 0), num_rows, 220
    runner = ModelRunner(model, *place, state_room=StateRoom(most))
    for row in range(num_rows):
        runner.allocate(row)
    return runner


def take(runner: ModelRunner, ids: Tensor, rows: list[int], is_of_prompt: bool = False) -> Tensor:
    return runner.forward(ForwardBatch(ids, rows, is_of_prompt=is_of_prompt))


def logits_of(reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = reference(ids).logits
    return found


@pytest.mark.parametrize("parts", [(150,), (64, 86), (1, 2, 63, 84), (5, 70, 75)], ids=str)
def test_logits_are_those_of_transformers(
    parts: tuple[int, ...], model: Transformer, reference: Any
) -> None:
    """Of prompts in parts, past the ends of chunks, and of tokens one by one after them."""
    ids = torch.randint(97, (2, 160), generator=torch.Generator().manual_seed(1))
    runner = runner_of(model, 2)
    found = [take(runner, part, [0, 1], True) for part in ids[:, :150].split(list(parts), dim=1)]
    found += [take(runner, ids[:, at : at + 1], [0, 1]) for at in range(150, 160)]
    torch.testing.assert_close(torch.cat(found, 1), logits_of(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_experts_of_a_layer_are_stored_as_one(num_ranks: int, tmp_path: Path) -> None:
    """As published in bfloat16, and as transformers has them; it saves a tensor for each."""
    reference = the_model(97, "Qwen3_5MoeForCausalLM")
    reference.save_pretrained(tmp_path)
    stored = {name: x.contiguous() for name, x in reference.state_dict().items()}
    shapes = {name.split(".mlp.")[1]: x.shape for name, x in stored.items() if "experts." in name}
    assert shapes["experts.gate_up_proj"] == (6, 48, 48)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = find_model("--model", str(tmp_path))
    cpu = torch.device("cpu")
    models = [
        load_transformer(source.config, source.weights, shard, None, torch.float32, cpu)
        for shard in (Shard(rank, num_ranks) for rank in range(num_ranks))
    ]
    ids = torch.randint(97, (2, 70), generator=torch.Generator().manual_seed(1))
    found = logits_of_ranks(models, ids)
    torch.testing.assert_close(found, logits_of(reference, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_logits_of_transformers(
    kind: str, num_ranks: int, tmp_path: Path
) -> None:
    """Of mixtures too, and of shards, whose layers' outputs are added up as ranks would; three
    ranks share the value heads of a key head."""
    reference = the_model(97, kind)
    reference.save_pretrained(tmp_path)
    source = find_model("--model", str(tmp_path))
    config = source.config
    cpu = torch.device("cpu")
    ids = torch.randint(97, (2, 70), generator=torch.Generator().manual_seed(1))
    expected = logits_of(reference, ids)
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    models = [
        load_transformer(config, source.weights, shard, None, torch.float32, cpu)
        for shard in shards
    ]
    found = logits_of_ranks(models, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def logits_of_ranks(models: list[Transformer], ids: Tensor) -> Tensor:
    """The logits [B, T, V] of ranks, each in a thread of its own, which add up what all have."""
    barrier = threading.Barrier(len(models))
    parts: list[Tensor | None] = [None] * len(models)

    def compute(rank: int) -> Tensor:
        def reduce(x: Tensor) -> Tensor:
            parts[rank] = x
            barrier.wait()
            total = sum(part for part in parts if part is not None)
            barrier.wait()
            assert isinstance(total, Tensor)
            return total

        group = Group((0,), 0)
        place = SDPABackend(16), group, 2, 220
        runner = ModelRunner(models[rank], *place, state_room=StateRoom(MOST))
        for row in range(2):
            runner.allocate(row)
        object.__setattr__(group, "all_reduce", reduce)
        return take(runner, ids, [0, 1], True)

    with ThreadPoolExecutor(len(models)) as pool:
        return torch.cat(list(pool.map(compute, range(len(models)))), dim=-1)


@dataclass
class CancelAfter:
    """Set before the layer after so many."""

    num_layers: int
    address: int = 0
    value: int = 0

    def is_set(self) -> bool:
        self.num_layers -= 1
        return self.num_layers < 0


@pytest.mark.parametrize("elementwise", ["torch", "native"])
def test_rows_go_back_to_any_token(elementwise: str, model: Transformer, reference: Any) -> None:
    used = model.elementwise
    model.use(load_named(ELEMENTWISE, elementwise)())
    try:
        rows_go_back_to_any_token(model=model, reference=reference)
    finally:
        model.use(used)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def rows_go_back_to_any_token(data: st.DataObject, model: Transformer, reference: Any) -> None:
    """Ragged rows take right and wrong tokens, as drafts that stay uncommitted or as verifications,
    and lose any number of the wrong ones, again and again; so do rows that begin anew, those that
    go back to the end of their prompt, and those of forwards that are cancelled after any layer."""
    length = 100
    ids = torch.randint(97, (3, length), generator=torch.Generator().manual_seed(2))
    expected = logits_of(reference, ids)
    runner = runner_of(model, 3)
    prompts = [data.draw(st.integers(1, 70), label="prompt") for _ in range(3)]
    for row, prompt in enumerate(prompts):
        take(runner, ids[row : row + 1, :prompt], [row], True)
    lengths = list(prompts)
    for _ in range(data.draw(st.integers(2, 6), label="steps")):
        rows = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True))
        if data.draw(st.integers(0, 5)) == 0:
            for row in rows:
                lengths[row] = prompts[row]
            runner.truncate(rows, [prompts[row] for row in rows])
            continue
        held = [lengths[row] for row in rows]
        for number in range(data.draw(st.integers(0, MOST - 1), label="drafts")):
            generator = torch.Generator().manual_seed(number)
            draft = torch.randint(97, (len(rows), 1), generator=generator)
            runner.forward(ForwardBatch(draft, rows, committed=held))
        runner.truncate(rows, held)
        if data.draw(st.booleans(), label="is cancelled"):
            lost = torch.randint(97, (len(rows), data.draw(st.integers(1, MOST), label="lost")))
            after = CancelAfter(data.draw(st.integers(0, 3), label="layers"))
            with pytest.raises(Cancelled):
                runner.forward(ForwardBatch(lost, rows, committed=held, cancellation=after))
        T = data.draw(st.integers(1, MOST), label="T")
        right = data.draw(st.integers(1, T), label="right")
        if max(held) + right > length:
            break
        tokens = torch.stack(
            [torch.cat([ids[row, lengths[row] : lengths[row] + right]]) for row in rows]
        )
        wrong = (tokens[:, :1] + 1 + torch.arange(T - right)) % 97
        out = take(runner, torch.cat([tokens, wrong], dim=1), rows)
        for place, row in enumerate(rows):
            true = expected[row, lengths[row] : lengths[row] + right]
            torch.testing.assert_close(out[place, :right], true, atol=1e-4, rtol=0)
            lengths[row] += right
        runner.truncate(rows, [lengths[row] for row in rows])


def test_a_second_pass_begins_at_the_ends_of_prompts(model: Transformer, reference: Any) -> None:
    """After more tokens than a step takes back, and also before the last tokens of the prompts, as
    a policy that sees them again."""
    ids = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(5))
    expected = logits_of(reference, ids)
    runner = runner_of(model, 2)
    prompts = [40, 33]
    for row, prompt in enumerate(prompts):
        take(runner, ids[row : row + 1, :prompt], [row], True)
    for first in (0, 0, 4):
        starts = [prompt - first for prompt in prompts]
        runner.truncate([0, 1], starts)
        for number in range(MOST + 10):
            at = torch.tensor([start + number for start in starts])
            out = take(runner, ids.gather(1, at[:, None]), [0, 1])
            true = expected[[0, 1], at]
            torch.testing.assert_close(out[:, 0], true, atol=1e-4, rtol=0)


def test_a_prompt_that_begins_a_longer_one_is_prefilled_anew(model: Transformer) -> None:
    """Of other models the longer one is cut."""
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(6)).tolist()
    params = SamplingParams(max_new_tokens=8)
    first_tokens = []
    for lengths in ((60, 41), (41,)):
        caches = PromptCaches(lambda: runner_of(model, 1), 16, make_progress(False), False)
        caches.engine.runner.release(0)
        for length in lengths:
            kept = caches.keep(0, [Request(0, tuple(ids[:length]), params)], "prefill")
        first_tokens.append([request.output_ids for request in kept.snapshots])
    assert first_tokens[0] == first_tokens[1]


def test_a_state_is_the_same_bits_however_its_tokens_came() -> None:
    """One by one, together, or from what they wrote."""
    G, H, D, E = SIZES
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 5, G, D, generator=generator) for _ in "qk")
    v = torch.randn(2, 5, H, E, generator=generator)
    decay = -torch.rand(2, 5, H, generator=generator)
    rate = torch.rand(2, 5, H, generator=generator)
    tokens = DeltaTokens(torch.zeros(2, 5, 1), torch.zeros(1, 4), decay, rate, SIZES)
    state = torch.randn(2, H, D, E, generator=generator)
    together, written = recur(state, q, k, v, tokens)
    outputs = []
    for t in range(5):
        one = slice(t, t + 1)
        out, own = recur(state, q[:, one], k[:, one], v[:, one], tokens.part(one))
        outputs.append(out)
        assert torch.equal(own[:, 0], written[:, t])
        state = write(state, k[:, t], own[:, 0], decay[:, t])
    assert torch.equal(torch.cat(outputs, dim=1), together)


def test_too_many_drafts_are_an_error_of_ours(model: Transformer) -> None:
    runner = runner_of(model, 1)
    take(runner, torch.ones(1, 20, dtype=torch.int64), [0], True)
    with pytest.raises(AssertionError, match="room for"):
        for _ in range(MOST + 1):
            one = torch.ones(1, 1, dtype=torch.int64)
            runner.forward(ForwardBatch(one, [0], committed=[20]))


def by_definition(state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens) -> Tensor:
    """The rule of arXiv 2412.06464, equation 10, head by head in float64."""
    out = torch.zeros_like(v)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            S = state[row, head].clone()
            key_head = head * k.shape[2] // v.shape[2]
            for t in range(v.shape[1]):
                key = k[row, t, key_head]
                value = v[row, t, head]
                S = tokens.decay[row, t, head].exp() * S
                S = S + torch.outer(key, tokens.rate[row, t, head] * (value - S.T @ key))
                out[row, t, head] = S.T @ q[row, t, key_head]
            state[row, head] = S
    return out


@pytest.mark.parametrize("num_new", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_both_forms_are_the_rule(num_new: int) -> None:
    G, H, D, E = SIZES
    generator = torch.Generator().manual_seed(num_new)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    tokens = DeltaTokens(
        channels=numbers(2, num_new, 2 * G * D + H * E),
        weight=numbers(2 * G * D + H * E, 4),
        decay=-numbers(2, num_new, H).abs(),
        rate=numbers(2, num_new, H).sigmoid(),
        sizes=SIZES,
    )
    before = numbers(2, 3, 2 * G * D + H * E)
    whole = torch.cat([before, tokens.channels], dim=1).transpose(1, 2)
    mixed = torch.nn.functional.conv1d(
        whole, tokens.weight.unsqueeze(1), groups=whole.shape[1]
    ).transpose(1, 2)
    q, k, v = torch.nn.functional.silu(mixed).split([G * D, G * D, H * E], dim=-1)
    parts = convolve(tokens, before)
    unit = [torch.nn.functional.normalize(x.unflatten(-1, (G, D)), dim=-1) for x in (q, k)]
    expected = (unit[0] / D**0.5, unit[1], v.unflatten(-1, (H, E)))
    for found, true in zip(parts, expected, strict=True):
        torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-5)
    state = numbers(2, H, D, E)
    after = state.clone()
    true = by_definition(after, *parts, tokens)
    out, written = recur(state, *parts, tokens)
    torch.testing.assert_close(out, true, atol=1e-10, rtol=0)
    replayed = state
    for t in range(num_new):
        replayed = write(replayed, parts[1][:, t], written[:, t], tokens.decay[:, t])
    torch.testing.assert_close(replayed, after, atol=1e-10, rtol=0)
    out, chunked = recur_in_chunks(state, *parts, tokens)
    torch.testing.assert_close(out, true, atol=1e-10, rtol=0)
    torch.testing.assert_close(chunked, after, atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [5, 34, 48, 258, 1024])
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, F.silu, F.softplus])
def test_elementwise_functions_have_the_same_bits_among_others(function: Any, size: int) -> None:
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(0))
    for count in range(1, 8):
        torch.testing.assert_close(in_vectors(function, x[:count]), function(x[:count]))
        for row in range(count):
            assert torch.equal(in_vectors(function, x[:count])[row], in_vectors(function, x[row]))


IMPLEMENTATIONS = [
    *(("native", sizes) for sizes in (SIZES, (2, 8, 6, 43), (1, 2, 64, 32))),
    ("triton", (1, 3, 5, 34)),
]


def implementation(kind: str) -> tuple[Elementwise, torch.device]:
    """That of linear attention by name, and where it computes here."""
    is_on_gpu = kind == "triton" and torch.cuda.is_available()
    return load_named(ELEMENTWISE, kind)(), torch.device("cuda" if is_on_gpu else "cpu")


def with_parts(tokens: DeltaTokens, function: Callable[[Tensor], Tensor]) -> DeltaTokens:
    parts = ("channels", "weight", "decay", "rate")
    return replace(tokens, **{name: function(getattr(tokens, name)) for name in parts})


def random_tokens(
    sizes: tuple[int, int, int, int], num_new: int, generator: torch.Generator
) -> tuple[DeltaTokens, Tensor]:
    """New tokens of two rows, and the channels of those before."""
    G, H, D, E = sizes

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    channels = 2 * G * D + H * E
    tokens = DeltaTokens(
        channels=numbers(2, num_new, channels),
        weight=numbers(channels, 4),
        decay=-numbers(2, num_new, H).abs(),
        rate=numbers(2, num_new, H).sigmoid(),
        sizes=sizes,
    )
    return tokens, numbers(2, 3, channels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32", "16"])
@pytest.mark.parametrize(("kind", "sizes"), IMPLEMENTATIONS, ids=str)
def test_kernels_convolve_as_torch(
    kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """A token has the same bits alone and among others."""
    ours, device = implementation(kind)
    generator = torch.Generator().manual_seed(0)
    for num_new in (1, 5, 19):
        tokens, before = random_tokens(sizes, num_new, generator)
        tokens = replace(tokens, weight=tokens.weight.to(dtype))
        true = convolve(with_parts(tokens, Tensor.double), before.double())
        given = with_parts(tokens, lambda x: x.to(device))
        parts = ours.delta_convolve(given, before.to(device))
        last = given.part(slice(num_new - 1, None))
        old = torch.cat([before, tokens.channels], dim=1)[:, num_new - 1 : num_new + 2]
        lone = ours.delta_convolve(last, old.to(device))
        for own, found, expected in zip(lone, parts, true, strict=True):
            torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(own[:, 0], found[:, -1])


@pytest.mark.parametrize(("kind", "sizes"), IMPLEMENTATIONS, ids=str)
def test_prompts_of_kernels_are_the_rule(kind: str, sizes: tuple[int, int, int, int]) -> None:
    """Past a border of chunks, from a state of their own."""
    ours, device = implementation(kind)
    generator = torch.Generator().manual_seed(0)
    _, H, D, E = sizes
    for num_new in (1, CHUNK, CHUNK + 3):
        tokens, before = random_tokens(sizes, num_new, generator)
        parts = convolve(tokens, before)
        state = torch.randn(2, H, D, E, generator=generator)
        whole = state.double()
        wide = with_parts(tokens, Tensor.double)
        expected = by_definition(whole, *(x.double() for x in parts), wide)
        given = (x.to(device) for x in (state, *parts))
        out, after = ours.delta_chunks(*given, with_parts(tokens, lambda x: x.to(device)))
        torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after.cpu().double(), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.two_threads
def test_a_row_whose_heads_threads_divide_has_the_same_bits() -> None:
    """What many rows compute for all value heads of a key head, few compute for each."""
    ours, _ = implementation("native")
    sizes = (1, 3, 6, 43)
    tokens, before = random_tokens(sizes, CHUNK + 3, torch.Generator().manual_seed(0))
    many = with_parts(tokens, lambda x: x.repeat(4, *[1] * (x.ndim - 1)))
    many = replace(many, weight=tokens.weight)
    one = replace(many, decay=many.decay[:1], rate=many.rate[:1])
    q, k, v = convolve(many, before.repeat(4, 1, 1))
    state = torch.randn(1, 3, 6, 43)
    outs, afters = ours.delta_chunks(state.repeat(8, 1, 1, 1), q, k, v, many)
    out, after = ours.delta_chunks(state, q[:1], k[:1], v[:1], one)
    assert torch.equal(outs[:1], out) and torch.equal(afters[:1], after)


@pytest.mark.parametrize("kind", ["torch", "native", "triton"])
def test_a_prompt_that_repeats_a_key_is_the_rule(kind: str) -> None:
    """Corrections stay small, where powers of the matrix that they solve have entries of 10^17."""
    ours, device = implementation(kind)
    generator = torch.Generator().manual_seed(0)
    key = F.normalize(torch.randn(8, generator=generator), dim=0)
    q = torch.randn(1, CHUNK, 1, 8, generator=generator)
    k = key.repeat(1, CHUNK, 1, 1)
    v = torch.randn(1, CHUNK, 1, 8, generator=generator)
    none = torch.zeros(1, CHUNK, 1)
    tokens = DeltaTokens(q, none, decay=none, rate=none + 1, sizes=(1, 1, 8, 8))
    state = torch.zeros(1, 1, 8, 8)
    whole = state.double()
    wide = with_parts(tokens, Tensor.double)
    expected = by_definition(whole, q.double(), k.double(), v.double(), wide)
    given = (x.to(device) for x in (state, q, k, v))
    out, after = ours.delta_chunks(*given, with_parts(tokens, lambda x: x.to(device)))
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.cpu().double(), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "sizes"), IMPLEMENTATIONS, ids=str)
def test_steps_of_kernels_are_those_of_torch(kind: str, sizes: tuple[int, int, int, int]) -> None:
    """Of ragged rows that go back: outputs and all that is kept, beside torch's form in float64,
    which is the rule. With the same bits in a batch and alone."""
    G, H, D, E = sizes
    shape = StateShape(G, H, D, E, 4)
    most = 6
    generator = torch.Generator().manual_seed(0)

    def states(num_rows: int, dtype: torch.dtype = torch.float32, rerun: int = 0) -> LayerStates:
        room = StateRoom(most + rerun, rerun)
        return LayerStates(shape, 1, num_rows, room, dtype, device)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    ours, device = implementation(kind)
    exact = states(3, torch.float64)
    fast = states(3)
    lagging = states(3, rerun=5)
    alone = states(1)
    weight = numbers(shape.channels, 4)
    rows = torch.tensor([0, 2], device=device)
    lengths = torch.zeros(2, dtype=torch.int64, device=device)
    # All of a prompt stays, and of the most new tokens, which write where those before are read.
    for step, num_new in enumerate((20, most, most, 1, 3, 2, 5, 1, most, 4, most, 2)):
        tokens = DeltaTokens(
            channels=numbers(2, num_new, shape.channels),
            weight=weight,
            decay=-numbers(2, num_new, H).abs(),
            rate=numbers(2, num_new, H).sigmoid(),
            sizes=sizes,
        )
        parts = {"channels": tokens.channels, "decay": tokens.decay, "rate": tokens.rate}
        wide = replace(tokens, **{name: part.double() for name, part in parts.items()})
        one = replace(tokens, **{name: part[1:] for name, part in parts.items()})
        at = rows, lengths, lengths, num_new, step == 0
        expected = exact.forward(*at, Elementwise()).run(0, wide).float()
        found = fast.forward(*at, ours).run(0, tokens)
        again = lagging.forward(*at, ours).run(0, tokens)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(again, expected, atol=1e-6, rtol=1e-5)
        for own, true in zip(fast.now.by_layer, exact.now.by_layer, strict=True):
            torch.testing.assert_close(own, true.to(own.dtype), atol=1e-6, rtol=1e-5)
        lone = torch.tensor([0], device=device)
        if step == 0:  # whose products of matrices have other bits
            alone.copy_prompts(lone, fast, rows[1:], [0])
        else:
            last = lone, lengths[1:], lengths[1:], num_new, False
            assert torch.equal(alone.forward(*last, ours).run(0, one)[0], found[1])
        if num_new in (20, most):
            lengths = lengths + num_new
        else:
            kept = torch.randint(1, num_new + 1, (2,), generator=generator)
            lengths = lengths + kept.to(device)


WORKLOAD = "--dtype float32 --dataset demo --prefix_len 70 --gen_len 16 --threads 1 --ignore_eos"
DRAFTS = {
    "self streaming_llm": "--draft self --budget 33",
    "self snapkv": "--draft self --kv_policy snapkv --budget 48",
    "self snapkv chosen anew": "--draft self --kv_policy snapkv --budget 48 --reselect_every 5",
    "self retrieval": "--draft self --kv_policy retrieval --budget 49",
    "self verified": "--draft self --kv_policy verified --budget 65",
    "self quantised": "--draft self --kv_policy quantised",
    "self:int8": "--draft self --draft_weights int8 --budget 33",
    "ngram": "--draft ngram",
    "ngram+self": "--draft ngram+self --budget 33",
    "the model": "--draft model:{} --kv_policy full",
}


@pytest.mark.narrow(3)
@pytest.mark.parametrize("words", DRAFTS.values(), ids=DRAFTS)
def test_drafts_change_no_token(
    words: str, checkpoint: Path, command: Command, tmp_path: Path, reference: Any
) -> None:
    out = tmp_path / "out.jsonl"
    ended = command(
        "run",
        "--model",
        checkpoint,
        *WORKLOAD.split(),
        *("--B", "3", "--num_batches", "2", "--out", out, "--save_tokens", tmp_path / "t.jsonl"),
        *words.format(checkpoint).split(),
    )
    assert ended.code == 0, ended.err
    assert "verified: the other pass has the 96 tokens of static" in ended.out


AGAIN = ("--kv_policy verified", "--kv_policy snapkv --reselect_every 5 --window_size 7")


@pytest.mark.parametrize("words", AGAIN)
def test_newest_tokens_run_again(
    words: str, checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    """Those of a prompt whose last part is shorter, and of texts that grow."""
    line = [*WORKLOAD.split(), "--B", "2", "--num_batches", "1", "--draft", "self"]
    line += ["--prefix_len", "81", "--prefill_chunk", "40", "--budget", "65", *words.split()]
    ended = command("run", "--model", checkpoint, *line, "--out", tmp_path / "out.jsonl")
    assert ended.code == 0, ended.err
    assert "verified: the other pass has the 32 tokens of static" in ended.out


SERVED = "--num_requests 5 --turns 3 --prefix_len 400 --gen_len 9 --concurrency 2 --block_tokens 16"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_turns_begin_with_the_states_of_those_before(
    num_ranks: int, checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    """Of a server's conversations, without and with drafts. A turn is found up to the answer
    before it."""
    out = tmp_path / "out.jsonl"
    talks = [{"turns": [f"{'far ' * 9 * talk}{turn}" for turn in range(3)]} for talk in range(5)]
    asked = tmp_path / "set.jsonl"
    asked.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    mode = "inflight" if num_ranks == 1 else "tensor_parallel"
    words = ["--modes", mode, f"{mode}+draft", "--draft", "self", "--budget", "17", "--gamma", "2"]
    words += ["--prefix_cache", "--dtype", "float32", "--threads", "1", "--ignore_eos"]
    words += [*SERVED.split(), "--dataset", f"mt_bench:{asked}"]
    words += ["--nproc", str(num_ranks), "--out", str(out)]
    ended = command("serve", "--model", checkpoint, *words)
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * 2
    for record in records:
        assert record["metrics"]["prefix_hit_rate"] > 0.5


STAGES = {
    "ring": "--modes ring ring+draft --nproc 2 --draft ngram --layer_split auto",
    "ring, a model drafts": "--modes ring ring+draft --nproc 3 --draft model:{} --kv_policy full",
    "pipelines": "--modes pipeline pipeline+draft pipeinfer --nproc 2 --draft ngram",
    "pipelines, a model drafts": "--modes pipeline pipeinfer --nproc 3 --draft model:{} "
    "--kv_policy full --pa 0.1",
    "two ranks a stage": "--modes pipeline pipeinfer --nproc 4 --draft ngram --layer_split 3,1",
}


@pytest.mark.narrow(2)
@pytest.mark.parametrize("words", STAGES.values(), ids=STAGES)
def test_stages_keep_the_states_of_their_layers(
    words: str, checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    """Also of stages that have no layer with attention, and of runs that are cancelled."""
    out = tmp_path / "out.jsonl"
    line = ["--num_requests", "5", "--concurrency", "2", "--gamma", "3", "--out", out]
    line += [*words.format(checkpoint).split(), *WORKLOAD.split()]
    ended = command("serve", "--model", checkpoint, *line)
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * len(records)


def test_a_python_program_shares_prefixes(checkpoint: Path) -> None:
    """Answers are those without a cache."""
    generator = torch.Generator().manual_seed(6)
    vocab = find_model("--model", str(checkpoint)).config.vocab_size
    first = torch.randint(vocab, (70,), generator=generator).tolist()
    outputs = list[list[list[int]]]()
    for prefix_cache in (False, True):
        llm = LLM(str(checkpoint), dtype="float32", threads=1, prefix_cache=prefix_cache)
        answers = list[list[int]]()
        prompt = [*first]
        for _ in range(3):
            answers.append(list(llm.submit(prompt, 12, ignore_eos=True)))
            prompt += [*answers[-1], 5, 6, 7]
        outputs.append(answers)
    assert outputs[0] == outputs[1]


def test_runs_of_a_sweep_share_prompts(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    """Rows go back as far as any of them needs, here the last one, which drafts most."""
    out = tmp_path / "out.jsonl"
    words = [*WORKLOAD.split(), "--B", "2", "--num_batches", "1", "--draft", "self"]
    words += ["--budget", "33", "--gamma", "1", "6"]
    ended = command("sweep", "run", "--model", checkpoint, *words, "--out", out)
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(record["status"] for record in records) == {"verified": len(records)}


def test_forwards_are_timed(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    """Also the end of a prompt, before which the states are taken as they are."""
    words = "--dtype float32 --prefix_len 80 --B 2 --T 1 3 --budget 33 --prefill_chunk 40 "
    words += "--repeats 1 --warmup 1 --threads 1"
    ended = command("latency", "--model", checkpoint, *words.split(), "--out", tmp_path / "out")
    assert ended.code == 0 and "prefill, last 40 of a row" in ended.out, ended.err


def test_forwards_are_measured_in_parts_of_the_layers(
    tiny_checkpoint: Path,
    vocab_size: int,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of any model whose layers are too large to be loaded together. A part ends with
    attention, the last one here with a layer behind it."""
    linear = "linear_attention"
    full = "full_attention"
    types = [linear, full, linear, linear, full, linear]
    model = tmp_path / "model"
    save_with_tokenizer(the_model(vocab_size, layer_types=types), model, tiny_checkpoint)
    monkeypatch.setattr(wider, "PART_BYTES", 1 << 12)
    out = tmp_path / "out.jsonl"
    words = [*WORKLOAD.split(), "--B", "2", "--num_batches", "1", "--draft", "self"]
    words += ["--linear", "torch"]  # whose products of one token and of several differ in bits
    ended = command("run", "--model", model, *words, "--budget", "33", "--out", out)
    assert ended.code == 0, ended.err
    record = json.loads(out.read_text().splitlines()[-1])
    forwards = record["correctness"]["forwards"]
    assert record["status"] == "verified" and forwards["num_unequal"] > 0
    assert max(forwards["decode_error"], forwards["verify_error"]) < 1e-5


def test_ranks_share_the_heads(checkpoint: Path, command: Command, tmp_path: Path) -> None:
    words = [*WORKLOAD.split(), "--B", "3", "--num_batches", "1", "--nproc", "2"]
    out = tmp_path / "out.jsonl"
    words += ["--draft", "self", "--budget", "33"]
    ended = command("run", "--model", checkpoint, *words, "--out", out)
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * 2
    assert records[0]["correctness"]["num_tokens"] == 48


def test_the_text_of_a_checkpoint_that_also_sees(
    model: Transformer, reference: Any, tmp_path: Path
) -> None:
    """Its tensors have names of their own, and those of other parts are left out."""
    reference.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {key: text[key] for key in text if key != "architectures"},
        "vision_config": {"depth": 2},
        "image_token_id": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): x for name, x in stored.items()}
    renamed |= {"model.visual.patch.weight": torch.ones(3, 4), "mtp.fc.weight": torch.ones(4, 2)}
    save_file(renamed, tmp_path / "model.safetensors")
    source = find_model("--model", str(tmp_path))
    cpu = torch.device("cpu")
    other = load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    """In flight, with drafts, of ragged prompts."""
    llm = LLM(str(checkpoint), draft="self", kv=KVSection(budget=33), dtype="float32", threads=1)
    check_greedy_tokens(llm, checkpoint, num_new=12)


def test_forwards_read_the_states_of_their_rows(model: Transformer) -> None:
    """In three layers, 4 x 16 x 8 numbers of a row, and K and V of one layer's 2 heads."""
    runner = runner_of(model, 2)
    take(runner, torch.ones(1, 20, dtype=torch.int64), [0], True)
    take(runner, torch.ones(1, 20, dtype=torch.int64), [1], True)
    before = runner.counts.copy()
    take(runner, torch.ones(2, 3, dtype=torch.int64), [0, 1])
    used = runner.counts.minus(before)
    assert used.state_bytes == 2 * 3 * 4 * 16 * 8 * 4
    assert used.kv_bytes_read == 2 * 23 * 2 * 2 * 32 * 4
    weights = weight_bytes(model)
    assert bytes_read(model, used) == weights + used.state_bytes + used.kv_bytes_read
    assert weights == costs.weight_bytes(model.config, Shard(), 4)


def test_the_plan_has_the_bytes_of_states(checkpoint: Path) -> None:
    workload = WorkloadSection(prefix_len=70, gen_len=16, batch_size=3)
    asked = RunConfig(ModelSection(str(checkpoint), "float32"), workload=workload)
    run = find(asked, Launch(), SetupCache())
    (plan, *_) = model_plans_of(run.config, run.models, 0)
    model = load_transformer(
        run.source.config, run.source.weights, Shard(), None, torch.float32, torch.device("cpu")
    )
    runner = make_runner(plan, model, Group((0,), 0))
    assert runner.states is not None
    held = [*runner.states.now.by_layer, *runner.states.kept.by_layer]
    numbers = [x for x in held if x.is_floating_point()]
    assert plan.linear_bytes == sum(x.numel() * x.element_size() for x in numbers)
    assert plan.kv_bytes == runner.caches.num_bytes + plan.linear_bytes
    sharing = replace(plan, shares_prefixes=True)
    states = make_runner(sharing, model, Group((0,), 0)).states
    assert states is not None and sharing.snapshots is not None
    assert sharing.snapshots.count >= 2 * sharing.num_rows
    added = [states.snapshots, states.snapshot_channels]
    grown = sharing.linear_bytes - plan.linear_bytes
    assert grown == sum(x.numel() * x.element_size() for x in added) > 0
    assert StateShape.of(run.source.config.mixers, Shard()).channels == 2 * 2 * 16 + 4 * 8


REFUSED = {
    "serve --modes inflight --prefix_cache --kv_offload host": "host memory holds no states",
    "run --draft model:{} --kv_policy streaming_llm --budget 33": "streaming_llm: layers",
    "run --native_steps on": "--native_steps on: not possible with linear attention",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_states_do_not_allow_is_refused(
    words: str, checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    given_words = words.format(checkpoint).split()
    workload = "--prefix_len 70 --gen_len 16 --dtype float32 --dataset demo"
    line = [*given_words, "--model", checkpoint, *workload.split()]
    ended = command(*line, "--out", tmp_path / "out.jsonl")
    assert ended.code != 0 and REFUSED[words] in ended.err
    assert len(ended.err.strip().splitlines()) == 1
