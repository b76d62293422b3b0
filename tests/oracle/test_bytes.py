"""Bytes of weights, experts and windows by other code than what predicts and counts them: the
parameters of transformers' model, its router's choices, and keys of windows by hand."""

from functools import cache
from typing import Any

import pytest
import torch
from conftest import make_runner
from tiny_families import HEADS, SIZE, VOCAB, stored
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.bench import roofline
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.hardware.ceiling_file import Hardware
from magicdec.hardware.costs import Deployment
from magicdec.kv.layer_caches import Storage, WindowRoom, storages_of
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.hidden_states import HiddenStates

HIDDEN = HEADS * SIZE
ANY = Hardware(1e9, 1e9)
FLOAT = 4  # bytes
# Experts of 100 units, as `stored` makes them, by hand: numbers of one expert, experts, and layers
# that have them.
EXPERTS = {
    "mixtral": (3 * 100 * HIDDEN, 8, 3),
    "qwen3-moe": (3 * 100 * HIDDEN, 8, 2),  # the second layer has an MLP
    "qwen3-moe-sums": (3 * 100 * HIDDEN, 4, 1),  # each second layer has experts
    "qwen2-moe": (3 * 100 * HIDDEN, 8, 2),  # the shared expert, for every token, is none of them
    "gpt-oss": (3 * 100 * HIDDEN + 2 * 100 + HIDDEN, 8, 3),  # with biases
}


@cache
def model_of(name: str) -> Any:
    reference: Any = stored(name).reference
    return reference.model


def size_of(name: str, part: str = "", but: str = "no part") -> int:
    """Numbers in transformers' parameters whose name has this part."""
    named = dict(model_of(name).named_parameters())
    return sum(p.numel() for key, p in named.items() if part in key and but not in key)


@pytest.mark.parametrize("name", EXPERTS)
def test_bytes_of_experts_are_those_of_transformers(name: str) -> None:
    one, num_experts, num_layers = EXPERTS[name]
    by_hand = FLOAT * one * num_experts * num_layers
    assert FLOAT * size_of(name, ".experts.") == by_hand
    config = stored(name).source.config
    assert costs.expert_bytes(config, Shard(), FLOAT) == by_hand
    loaded = stored(name).load()
    assert roofline.expert_bytes(loaded) == (by_hand, num_experts * num_layers)
    whole = FLOAT * size_of(name, but="embed_tokens")
    assert roofline.weight_bytes(loaded) == costs.weight_bytes(config, Shard(), FLOAT) == whole
    # The matrices of two ranks are together those of one.
    biases = costs.expert_biases(config, Shard())
    halves = [costs.expert_parameters(config, Shard(rank, 2)) for rank in range(2)]
    assert FLOAT * (sum(halves) + biases) == by_hand


def chosen_experts(name: str, ids: Tensor, num_used: int) -> int:
    """Experts that transformers' routers choose for the last tokens of `ids`, over layers."""
    logits = list[Tensor]()
    routers = [
        module
        for key, module in model_of(name).named_modules()
        if key.endswith(("mlp.gate", "mlp.router", "block_sparse_moe.gate"))
    ]
    assert routers, "the mixture has a router in each layer"

    def note(module: Any, args: Any, out: Any) -> None:
        logits.append(out if isinstance(out, Tensor) else out[0])

    hooks = [router.register_forward_hook(note) for router in routers]
    with torch.no_grad():
        model_of(name)(ids)
    for hook in hooks:
        hook.remove()
    best = [logit.view(ids.numel(), -1)[-2:].topk(num_used).indices for logit in logits]
    return sum(len(experts.unique()) for experts in best)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_forward_reads_the_experts_that_transformers_chooses(name: str) -> None:
    """Of two tokens after 20, whose experts count once where both go to one."""
    config = stored(name).source.config
    assert config.experts is not None
    ids = torch.randint(VOCAB, (1, 22), generator=torch.Generator().manual_seed(3))
    num_read = chosen_experts(name, ids, config.experts.num_used)
    runner = make_runner(stored(name).load(), 1, 64)
    runner.allocate(0)
    runner.forward(ForwardBatch(ids[:, :20], [0]))
    before = runner.counts.copy()
    runner.forward(ForwardBatch(ids[:, 20:], [0]))
    counts = runner.counts.minus(before)
    assert counts.experts_read == num_read
    one, num_experts, num_layers = EXPERTS[name]
    always = FLOAT * size_of(name, but="embed_tokens") - FLOAT * one * num_experts * num_layers
    expected = always + FLOAT * one * num_read + counts.kv_bytes_read
    assert roofline.bytes_read(runner.model, counts) == expected
    # What is predicted is the mean over choices at random: k of E, and again k of the others.
    used = config.experts.num_used
    mean = num_layers * (used + used * (1 - used / num_experts))
    predicted = Deployment(config, ANY, FLOAT).forward(1, 2, 20).weight_bytes
    assert predicted == pytest.approx(always + FLOAT * one * mean, abs=1)


WINDOW = 24  # of the first and the last of three layers
KEY_BYTES = 2 * 2 * 16 * FLOAT  # K and V of two heads of 16 numbers


@pytest.mark.parametrize("cached", [WINDOW - 2, WINDOW - 1, WINDOW, 60])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_window_is_read_up_to_its_size(cached: int, num_new: int) -> None:
    """One below a full window, full, and beyond, where each of several tokens has one of its own,
    and all of them together read the union."""
    window_keys = len(
        {
            key
            for at in range(cached, cached + num_new)
            for key in range(max(0, at - WINDOW + 1), at + 1)
        }
    )
    by_hand = KEY_BYTES * (2 * window_keys + cached + num_new)
    config = stored("gemma3").source.config
    assert Deployment(config, ANY, FLOAT).forward(1, num_new, cached).kv_bytes == by_hand
    runner = make_runner(stored("gemma3").load(), 1, 128)
    runner.allocate(0)
    ids = torch.ones(1, cached + num_new, dtype=torch.int64)
    runner.forward(ForwardBatch(ids[:, :cached], [0]))
    before = runner.counts.copy()
    runner.forward(ForwardBatch(ids[:, cached:], [0]))
    assert runner.counts.minus(before).kv_bytes_read == by_hand
    assert costs.kv_bytes_per_token(config, Shard(), FLOAT) == 3 * KEY_BYTES


@pytest.mark.parametrize("window", [WINDOW, 56, 57, 59, 121, 123])  # 57 + 8 - 1 are a block
def test_a_row_of_a_window_holds_as_many_blocks_as_it_can_need(window: int) -> None:
    """Blocks of 64 tokens, for steps of 5 that go back by 3 at most, at every length of a row."""
    rewound = 3
    num_new = 5
    held = [
        -(-(length + num_new) // 64) - max(0, length + 1 - window - rewound) // 64
        for length in range(1, 400)
    ]
    room = WindowRoom(rewound, num_new)
    (storage,) = storages_of([window], room, 2, 1000, lambda tokens: tokens)
    assert storage == Storage(64, 16, 2 * max(held), window)


def test_the_cache_of_a_window_by_hand() -> None:
    """Two rows of 1000 tokens: all of them in one layer; in two layers two blocks of 64."""
    model = stored("gemma3").load()
    group = Group((0,), 0)
    room = WindowRoom(3, 5)
    runner = ModelRunner(model, SDPABackend(), group, 2, 1000, window_room=room)
    everything, rolling = runner.caches.distinct
    size = everything.shape.block_size
    assert everything.num_bytes == KEY_BYTES * 2 * -(-1000 // size) * size
    assert rolling.num_bytes == 2 * KEY_BYTES * 2 * 2 * 64


def test_states_for_a_head_by_hand() -> None:
    """Three states of 64 bfloat16 numbers and an id of 8 bytes for each of 2 x 50 tokens."""
    states = HiddenStates((1, 3, 5), 2, 2, 50, 64, torch.bfloat16, torch.device("cpu"))
    assert states.num_bytes == 2 * 50 * (3 * 64 * 2 + 8)
