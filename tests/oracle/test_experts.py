"""A mixture of experts beside its definition, written out in float64; which experts a forward
reads; and that a token's bits do not depend on what is computed with it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY, make_requests, make_runner, pack, random_prompts, tiny_transformer
from torch import Tensor

from magicdec.bench.roofline import bytes_read, expert_bytes, weight_bytes
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.hardware import costs
from magicdec.hardware.ceiling_file import Hardware
from magicdec.model.config import ExpertsConfig, LayerKind
from magicdec.model.elementwise.native import NativeElementwise
from magicdec.model.experts import Experts
from magicdec.model.linear.packed import pack as pack_linear
from magicdec.runner.request import Batch
from magicdec.speculation.steps.strategy import Setup, make_strategy

CONFIG = replace(TINY, experts=ExpertsConfig(8, 3, 48))


def made(dtype: torch.dtype = torch.float32, **changes: Any) -> Experts:
    torch.manual_seed(0)
    config = replace(CONFIG, experts=replace(CONFIG.experts, **changes))
    experts = Experts(config, Shard())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def definition(experts: Experts, x: Tensor) -> Tensor:
    """Of one token [hidden]: softmax over all experts, the best of them, their weighted sum."""
    x = x.double()
    logits = experts.router.weight.double() @ x
    shares = (logits - logits.max()).exp()
    shares = shares / shares.sum()
    best = sorted(range(len(shares)), key=lambda e: -shares[e])[: experts.num_used]
    whole = sum(shares[e] for e in best) if experts.renormalises else 1.0
    out = torch.zeros_like(x)
    for number in best:
        gate, up = (experts.gate_up[number].weight.double() @ x).chunk(2)
        hidden = gate / (1 + (-gate).exp()) * up
        out += shares[number] / whole * (experts.down[number].weight.double() @ hidden)
    if experts.shared_gate_up is not None and experts.shared_down is not None:
        gate, up = (experts.shared_gate_up.weight.double() @ x).chunk(2)
        shared = experts.shared_down.weight.double() @ (gate / (1 + (-gate).exp()) * up)
        if experts.shared_gate is not None:
            shared = shared / (1 + (-experts.shared_gate.weight.double() @ x).exp())
        out += shared
    return out


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"renormalises": True},
        {"renormalises": False},
        {"shared_width": 30},
        {"shared_width": 30, "has_shared_gate": True},
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_mixture_is_its_definition(changes: dict[str, Any], is_native: bool) -> None:
    experts = made(**changes)
    if is_native:
        experts.elementwise = NativeElementwise()
    x = torch.randn(2, 5, CONFIG.hidden_size)
    found = experts(x, lambda y: y)
    exact = torch.stack([definition(experts, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_each_touched_expert_is_read_once() -> None:
    experts = made()
    x = torch.randn(1, 7, CONFIG.hidden_size)
    wanted = {e for token in x[0] for e in experts.route(token[None])[0][0].tolist()}
    experts(x, lambda y: y)
    assert experts.num_read == len(wanted) < 7 * experts.num_used
    experts(x[:, :1], lambda y: y)
    assert experts.num_read == len(wanted) + experts.num_used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """With packed layers, of which the router is one."""
    experts = made(dtype)
    experts.router = pack_linear(experts.router)
    for layers in (experts.gate_up, experts.down):
        for number, layer in enumerate(layers):
            layers[number] = pack_linear(layer)
    x = torch.randn(1, 33, CONFIG.hidden_size).to(dtype)
    whole = experts(x, lambda y: y)
    for first, last in ((0, 1), (3, 8), (1, 33)):
        assert torch.equal(experts(x[:, first:last], lambda y: y), whole[:, first:last])


def test_bytes_are_those_of_the_experts_that_were_read() -> None:
    """The second layer has an MLP."""
    config = replace(CONFIG, layer_kinds=(LayerKind(), LayerKind(has_mlp=True)), num_layers=2)
    runner = make_runner(pack(tiny_transformer(config)), 2, 40)
    Engine(runner, 64).prefill(make_requests(random_prompts([9, 4], config.vocab_size), 5))
    counts = runner.counts.copy()
    expert_total, number = expert_bytes(runner.model)
    assert number == 8 and 3 <= counts.experts_read <= 8 * counts.num_forwards
    always = counts.num_forwards * (weight_bytes(runner.model) - expert_total)
    read = expert_total // 8 * counts.experts_read
    assert bytes_read(runner.model, counts) == always + read + counts.kv_bytes_read


def test_predicted_bytes_of_a_step_grow_with_its_tokens() -> None:
    """D(T) = E (1 - (1 - k/E)^T) experts of each layer."""
    experts = ExpertsConfig(128, 8, 768)
    assert [round(experts.touched(T), 1) for T in (1, 4, 8, 32)] == [8.0, 29.1, 51.6, 111.8]
    config = replace(CONFIG, experts=experts)
    expert_total = costs.expert_bytes(config, Shard(), 2)
    assert expert_total == 2 * 3 * 128 * 768 * config.hidden_size * config.num_layers
    deployment = costs.Deployment(config, Hardware(1e9, 1e9), 2)
    read = [deployment.forward(1, T, 0).weight_bytes for T in (1, 4)]
    grown = expert_total * (experts.touched(4) - 8) / 128
    assert read[1] - read[0] == pytest.approx(grown, abs=2)


def test_auto_gamma_times_the_experts_of_unlike_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a clock that counts the experts that were read: a step costs those of its drafts and
    of their verification, not of drafts that are repeated."""
    config = replace(CONFIG, experts=ExpertsConfig(32, 2, 16), num_layers=2)
    runner = make_runner(pack(tiny_transformer(config)), 1, 60)
    (request,) = requests = make_requests(random_prompts([20], config.vocab_size), 30)
    engine = Engine(runner, 64)
    engine.prefill(requests)
    decoding = DecodingSection("speculative", "self", "auto")
    strategy = make_strategy("speculative", Setup(runner, decoding, KVSection("full")))
    batch = Batch((request,))
    strategy.admit(batch)
    steps = strategy.steps
    cached = [20]

    counted = {}
    for count in (0, 1, 3, 8):
        before = runner.counts.experts_read
        steps.verify(batch, steps.draft(batch, count) if count else None)
        counted[count] = runner.counts.experts_read - before
        steps.undo(batch, cached)
    monkeypatch.setattr("time.perf_counter", lambda: float(runner.counts.experts_read))
    seconds = strategy.measure(batch)
    assert [seconds[count] for count in counted] == [*counted.values()]
    verification_experts = counted[8] - 8 * counted[0]  # each draft reads as many as a decode step
    assert counted[0] == 2 * 2 and verification_experts > 2 * counted[0]
    assert verification_experts <= 2 * 32
