"""The cost model: bytes and FLOPs compared with hand calculations and a loaded model, times with
hand calculations, and the speedups of speculation."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from hypothesis import given
from hypothesis import strategies as st

from magicdec.bench import roofline
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.hardware import costs
from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.hardware.costs import Deployment
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import load_transformer
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.config import ModelConfig
from magicdec.model.presets.presets import PRESETS
from magicdec.model.transformer import Transformer
from magicdec.names import LOW_BIT
from magicdec.predict.curves import AcceptanceCurve, conditional_rate, expected_tokens
from magicdec.predict.speculation import (
    SelectionCost,
    SpeculationCost,
    best_gamma,
    break_even_context,
    prefill_seconds,
)
from magicdec.runner.forward_batch import ForwardBatch

LLAMA_2_7B = PRESETS["llama-2-7b-32k"].config
LLAMA_31_8B = PRESETS["llama-3.1-8b"].config
# Published peaks of one A100 SXM 80 GB, NVLink; latencies and overhead of the usual order.
A100 = Hardware(2.039e12, 312e12, 5e-6, None, Link(15e-6, 300e9), Link(30e-6, 25e9))


def self_speculation(
    target: Deployment, acceptance: AcceptanceCurve, budget: int = 512
) -> SpeculationCost:
    return SpeculationCost(target, target, budget, acceptance)


def test_bytes_and_flops_of_llama_2_7b_by_hand() -> None:
    cost = Deployment(LLAMA_2_7B, A100, 2).forward(3, 2, 10)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    matrices = 32 * layer + 32000 * 4096
    norms = 65 * 4096
    assert cost.weight_bytes == 2 * (matrices + norms)
    # All that is published but the embedding.
    assert cost.weight_bytes == 2 * (6_738_415_616 - 32000 * 4096)
    assert cost.kv_bytes == 3 * 12 * 524_288
    assert cost.linear_flops == 3 * 2 * 2 * matrices
    assert cost.attention_flops == 3 * 32 * 4 * 4096 * (11 + 12)
    assert cost.all_reduces == ()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_shard_has_the_bytes_of_the_roofline(size: int, biases: bool, is_tied: bool) -> None:
    config = replace(TINY, qkv_bias=biases, output_bias=biases, mlp_bias=biases)
    config = replace(config, tie_word_embeddings=is_tied)
    for shard in (Shard(rank, size) for rank in range(size)):
        model = Transformer(config, shard)
        assert costs.weight_bytes(config, shard, 4) == roofline.weight_bytes(model)
        assert costs.kv_bytes_per_token(config, shard, 4) == roofline.kv_bytes_per_token(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("low_bit", LOW_BIT)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_shard_of_low_bit_weights_has_the_bytes_of_the_roofline(
    size: int, low_bit: str, is_tied: bool
) -> None:
    """Groups of 64, 32 and 16 inputs, by what divides those of a rank, whose shares are equal."""
    config = replace(TINY, num_kv_heads=6, hidden_size=96, head_dim=32, intermediate_size=192)
    config = replace(config, qkv_bias=True, tie_word_embeddings=is_tied)
    source = RandomWeights(expected_shapes(config))
    for shard in (Shard(rank, size) for rank in range(size)):
        place = (shard, None, torch.float32, torch.device("cpu"))
        model = load_transformer(config, source, *place, stored_as=low_bit)
        bytes_read = roofline.weight_bytes(model)
        assert costs.weight_bytes(config, shard, 4, low_bit=low_bit) == bytes_read
        plain = roofline.weight_bytes(Transformer(config, shard))
        assert bytes_read < 0.5 * plain


def test_a_forward_has_the_bytes_that_the_runner_counts() -> None:
    model = tiny_transformer()
    runner = make_runner(model, 2, 64)
    Engine(runner, 16).prefill(make_requests(random_prompts([20, 20], TINY.vocab_size), 9))
    before = runner.counts.copy()
    runner.forward(ForwardBatch(torch.ones(2, 3, dtype=torch.long), [0, 1]))
    counted = roofline.bytes_read(model, runner.counts.minus(before))
    cost = Deployment(TINY, A100, 4).forward(2, 3, 20)
    assert cost.weight_bytes + cost.kv_bytes == counted


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    whole, shared, replicated = (
        Deployment(LLAMA_31_8B, A100, 2, tp).forward(1, 1, 99).kv_bytes for tp in (1, 8, 16)
    )
    assert (shared, replicated) == (whole // 8, whole // 8)


def test_the_rank_with_most_heads_counts() -> None:
    """Groups of 4 query heads on 3 ranks: two ranks share the first KV head, the last has one."""
    config = replace(TINY, num_heads=8, num_kv_heads=2, hidden_size=128)
    assert costs.slowest_shard(config, 3) == Shard(2, 3)


def test_an_all_reduce_by_hand() -> None:
    link = Link(1e-5, 1e9)
    node_link = Link(1e-4, 1e8)
    assert link.all_reduce_s(1e6, 4) == pytest.approx(1e-5 + 1.5e-3)
    hardware = Hardware(1, 1, link=link, node_link=node_link)
    within = link.all_reduce_s(1e6, 4)
    between = node_link.all_reduce_s(1e6, 2)
    assert hardware.all_reduce_s(1e6, 8, 2) == pytest.approx(within + between)
    assert hardware.all_reduce_s(1e6, 2, 2) == pytest.approx(between)
    assert hardware.all_reduce_s(1e6, 4, 1) == pytest.approx(within)


def test_the_time_of_a_forward_by_hand() -> None:
    """Linear layers are limited by compute and attention by memory, each separately."""
    hardware = Hardware(1e9, 1e9, 1e-3, kv_bytes_per_s=5e8)
    deployment = Deployment(TINY, hardware, 4)
    cost = deployment.forward(8, 1, 900)
    assert cost.linear_flops > cost.weight_bytes and cost.attention_flops < 2 * cost.kv_bytes
    expected = cost.linear_flops / 1e9 + cost.kv_bytes / 5e8 + TINY.num_layers * 1e-3
    assert deployment.seconds(8, 1, 900) == pytest.approx(expected)
    at_ceiling = Deployment(TINY, replace(hardware, kv_bytes_per_s=None), 4)
    assert at_ceiling.seconds(8, 1, 900) < expected
    more = replace(hardware, attention_flops_per_s=1e8, token_overhead_s=1e-5)
    cost = deployment.forward(8, 5, 900)
    assert cost.attention_flops / 1e8 > cost.kv_bytes / 5e8
    expected = cost.linear_flops / 1e9 + cost.attention_flops / 1e8
    expected += TINY.num_layers * (1e-3 + 39 * 1e-5)
    assert Deployment(TINY, more, 4).seconds(8, 5, 900) == pytest.approx(expected)


def test_ranks_pay_for_two_sums_a_layer_and_the_choice() -> None:
    alone = Deployment(LLAMA_2_7B, replace(A100, link=Link(0.0, 1e30)), 2, 8)
    linked = Deployment(LLAMA_2_7B, replace(A100, link=Link(1e-3, 1e30)), 2, 8)
    assert linked.seconds(1, 1, 1) - alone.seconds(1, 1, 1) == pytest.approx(65e-3)
    far = Deployment(LLAMA_2_7B, linked.hardware, 2, 8, nodes=2)
    assert far.seconds(1, 1, 1) > linked.seconds(1, 1, 1)


def test_expected_tokens() -> None:
    for alpha in (0.3, 0.8):
        for gamma in range(6):
            closed_form = (1 - alpha ** (gamma + 1)) / (1 - alpha)
            assert expected_tokens(alpha, gamma) == pytest.approx(closed_form)
    assert expected_tokens(0.0, 4) == 1.0 and expected_tokens(1.0, 4) == 5.0
    assert expected_tokens((0.8, 0.7, 0.1), 2) == pytest.approx(2.5)


def test_a_step_by_hand() -> None:
    target = Deployment(LLAMA_2_7B, A100, 2)
    draft = Deployment(TINY, A100, 2)
    p = SpeculationCost(target, draft, 100, (0.9, 0.5)).predict(4, 5000, 2)
    assert p.draft_s == pytest.approx(draft.seconds(4, 1, 100) + draft.seconds(4, 1, 101))
    assert p.verify_s == target.seconds(4, 3, 5000) and p.decode_s == target.seconds(4, 1, 5000)
    assert p.speedup == pytest.approx(2.4 * p.decode_s / (p.draft_s + p.verify_s))
    short = SpeculationCost(target, draft, 100, 0.9).predict(4, 30, 1)
    assert short.draft_s == draft.seconds(4, 1, 30), "no more is read than there is"


@given(st.floats(0, 1), st.integers(1, 8))
def test_an_acceptance_rate_becomes_the_conditional_rate(rate: float, gamma: int) -> None:
    """Steps of so many drafts, each accepted at the conditional rate if all before it were, have
    the acceptance rate."""
    conditional = conditional_rate(rate, gamma)
    assert (expected_tokens(conditional, gamma) - 1) / gamma == pytest.approx(rate, abs=1e-6)
    assert 0 <= rate <= conditional + 1e-6 and conditional <= 1
    assert conditional_rate(0.0, gamma) == 0.0 and conditional_rate(1.0, gamma) == 1.0


def test_what_comes_before_the_first_step_by_hand() -> None:
    """SnapKV reads all keys, and reads and writes what it copies; scores are half of attention."""
    hardware = Hardware(1e9, 1e30, 0.0)
    target = Deployment(TINY, hardware, 4)
    entry = costs.kv_bytes_per_token(TINY, Shard(0, 1), 4)
    choice = SelectionCost(observed_tokens=32, is_copied=True)
    expected = 3 * (1000 * entry / 2 + 2 * 100 * entry) / 1e9
    assert choice.seconds(target, 100, 3, 1000) == pytest.approx(expected)
    slow = Deployment(TINY, replace(hardware, attention_flops_per_s=1e6), 4)
    flops = 3 * costs.attention_flops(TINY, Shard(0, 1), 32, 968) / 2
    assert choice.seconds(slow, 100, 3, 1000) == pytest.approx(flops / 1e6)
    again = SelectionCost(rerun_tokens=16)
    assert again.seconds(target, 100, 3, 1000) == target.seconds(3, 16, 984)
    assert again.seconds(target, 100, 3, 9) == target.seconds(3, 9, 0)
    assert SelectionCost().seconds(target, 100, 3, 1000) == 0.0


def test_a_standalone_draft_takes_the_prompts_one_after_the_other() -> None:
    """Chunk by chunk; a chunk has logits of one token."""
    own = Deployment(LLAMA_2_7B, A100, 2)
    whole = own.seconds(1, 512, 0, 1)
    rest = own.seconds(1, 88, 512, 1)
    assert prefill_seconds(own, 4, 600) == pytest.approx(4 * (whole + rest))
    cost = own.forward(1, 512, 0)
    one_output = own.forward(1, 512, 0, 1)
    assert cost.linear_flops - one_output.linear_flops == 511 * 2 * 32000 * 4096
    target = Deployment(LLAMA_31_8B, A100, 2)
    way = SpeculationCost(target, own, 64, 0.9)
    assert way.predict(4, 600, 2).begin_s == prefill_seconds(own, 4, 600)
    assert self_speculation(target, 0.9).predict(4, 600, 2).begin_s == 0.0


def test_the_net_speedup_by_hand() -> None:
    target = Deployment(LLAMA_2_7B, A100, 2)
    way = SpeculationCost(
        target, target, 100, 0.9, SelectionCost(observed_tokens=32, is_copied=True)
    )
    p = way.predict(8, 30000, 4)
    assert p.speedup > 1.5 and p.begin_s > 0 and p.draft_s and p.verify_s
    token_s = (p.draft_s + p.verify_s) / p.tokens_per_step
    assert p.net_speedup(65) == pytest.approx(64 * p.decode_s / (p.begin_s + 64 * token_s))
    length = p.break_even_gen_len
    assert length is not None and p.net_speedup(length) > 1 >= p.net_speedup(length - 1)
    none = way.predict(8, 30000, 0)
    assert none.net_speedup(65) == 1.0 and none.break_even_gen_len is None


def test_what_is_never_accepted_never_pays() -> None:
    way = self_speculation(Deployment(LLAMA_2_7B, A100, 2), 0.0)
    for B in (1, 64):
        p = best_gamma([way], B, 32768, 8)
        assert (p.gamma, p.speedup, p.budget, p.draft_s) == (0, 1.0, None, None)
        assert break_even_context([way], B, 8, limit=1 << 16) is None


def test_the_best_of_several_budgets() -> None:
    target = Deployment(LLAMA_2_7B, A100, 2)
    ways = [self_speculation(target, 0.5, 64), self_speculation(target, 0.9, 512)]
    assert best_gamma(ways, 32, 32768, 8).budget == 512
    same = [self_speculation(target, 0.9, 512), self_speculation(target, 0.9, 64)]
    assert best_gamma(same, 32, 32768, 8).budget == 64


def test_break_even_is_where_it_begins_to_pay() -> None:
    way = self_speculation(Deployment(LLAMA_2_7B, A100, 2), 0.8)
    context = break_even_context([way], 16, 8)
    assert context is not None and best_gamma([way], 16, context, 8).gamma > 0
    assert best_gamma([way], 16, context - 1, 8).gamma == 0


def test_break_even_is_above_all_contexts_that_do_not_pay() -> None:
    """A draft in int4 pays at once, because it reads fewer weights, and no longer where it reads as
    many entries of the cache as the target does, up to a budget between two powers of 2."""
    target = Deployment(LLAMA_2_7B, A100, 2)
    way = SpeculationCost(target, replace(target, low_bit="int4"), 1500, 0.5)
    context = break_even_context([way], 8, 8)
    assert context is not None and context > 1500
    gammas = {S: best_gamma([way], 8, S, 8).gamma for S in (1, 1024, context - 1, context, 3000)}
    assert [S for S, gamma in gammas.items() if gamma == 0] == [context - 1]


sizes = st.tuples(st.integers(1, 256), st.integers(1, 9), st.integers(0, 1 << 17))


@given(sizes, st.sampled_from([LLAMA_2_7B, LLAMA_31_8B]), st.sampled_from([1, 8]))
def test_more_work_is_never_faster(
    size: tuple[int, int, int], config: ModelConfig, tp: int
) -> None:
    deployment = Deployment(config, A100, 2, tp)
    seconds = deployment.seconds(*size)
    for axis in range(3):
        more = [n + (i == axis) for i, n in enumerate(size)]
        assert deployment.seconds(*more) >= seconds
    faster = replace(A100, read_bytes_per_s=2 * A100.read_bytes_per_s)
    assert Deployment(config, faster, 2, tp).seconds(*size) <= seconds


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 128), st.integers(1, 1 << 17))
def test_better_acceptance_is_never_slower(one: float, other: float, B: int, S: int) -> None:
    target = Deployment(LLAMA_31_8B, A100, 2, 8)
    worse, better = (
        best_gamma([self_speculation(target, a)], B, S, 4) for a in sorted((one, other))
    )
    assert 1.0 <= worse.speedup <= better.speedup <= 5.0


def test_published_claims_hold() -> None:
    """MagicDec, section 3: at long context the speedup grows with the batch; at short context and
    large batch there is none; a model with fewer KV heads needs longer contexts."""
    seven, eight = (
        self_speculation(Deployment(c, A100, 2, 8), 0.8) for c in (LLAMA_2_7B, LLAMA_31_8B)
    )
    batches = (1, 8, 32, 64, 128, 256)
    for way in (seven, eight):
        long = [best_gamma([way], B, 32000, 8) for B in batches]
        speedups = [p.speedup for p in long]
        assert speedups == sorted(speedups) and speedups[-1] > 1.5
        gammas = [p.gamma for p in long]
        assert gammas == sorted(gammas), "and so does the best gamma"
        for gamma in range(1, 5):
            assert way.predict(256, 512, gamma).speedup < 1.0
        assert best_gamma([way], 256, 512, 8).gamma == 0
    for B in batches:
        first, second = (break_even_context([way], B, 8) for way in (seven, eight))
        assert first is not None and second is not None and first < second
