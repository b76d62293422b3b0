"""The rolling cache against a plain StreamingLLM, which keeps keys unrotated and rotates all of
them in every forward, by their positions in the cache. Also the size of the storage and its
blocks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_transformer
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.distributed.groups import Group
from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import apply_rope
from magicdec.model.positions import rope_table
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.rolling_runner import RollingRunner

VOCAB = TINY.vocab_size
MAX_TOKENS = 600
TAIL = 40
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SDPABackend,
    "grouped": GroupedBackend,
    "native": NativeBackend,
}
POLICIES = [StreamingLLM(4, 24), StreamingLLM(16, 17), StreamingLLM(0, 9), StreamingLLM(5, 150)]


class WrittenOut:
    """One row of a plain StreamingLLM: the unrotated K and the V of every token, a list for each
    layer."""

    def __init__(self, model: Transformer, policy: StreamingLLM) -> None:
        self.model = model
        self.policy = policy
        self.k: list[Tensor] = [torch.empty(0, model.config.num_kv_heads, 16)] * 2
        self.v = list(self.k)

    def forward(self, ids: list[int], settled: int) -> Tensor:
        """Logits [T, V] of `ids`, which follow the tokens of the row."""
        sinks = self.policy.num_sink_tokens
        window = self.policy.budget - self.policy.num_sink_tokens
        held = len(self.k[0])
        first = max(min(sinks, settled), settled - window)
        seen = [*range(min(sinks, settled)), *range(first, held + len(ids))]
        config = self.model.config
        table = rope_table(config.rope, config.head_dim, len(seen)).unsqueeze(0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.k[layer] = torch.cat([self.k[layer], k[0]])
            self.v[layer] = torch.cat([self.v[layer], v[0]])
            pairs = config.rope.interleaved
            keys = apply_rope(self.k[layer][seen].unsqueeze(0), table, pairs)
            queries = apply_rope(q, table[:, -len(ids) :], pairs)
            mask = torch.ones(len(ids), len(seen), dtype=torch.bool).tril(len(seen) - len(ids))
            heads = (t.transpose(1, 2) for t in (queries, keys, self.v[layer][seen].unsqueeze(0)))
            out = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2)

        self.model.set_positions(MAX_TOKENS, torch.device("cpu"))
        nowhere = torch.zeros(1, len(ids), dtype=torch.int64)  # position 0: no rotation
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), nowhere, attend, lambda x: x)[0]

    def truncate(self, length: int) -> None:
        self.k = [k[:length] for k in self.k]
        self.v = [v[:length] for v in self.v]


def make_rolling(
    config: ModelConfig, policy: StreamingLLM, backend: AttentionBackend, block_size: int
) -> RollingRunner:
    model = tiny_transformer(config)
    place = (model, backend, Group((0,), 0))
    return RollingRunner(*place, 3, MAX_TOKENS, policy, max_tail=TAIL, block_size=block_size)


def compare(runner: RollingRunner, rows: dict[int, WrittenOut], num_new: int) -> None:
    """Run one forward of all rows, with all cached tokens committed, and compare the logits."""
    forward(runner, rows, torch.randint(3, VOCAB, (len(rows), num_new)), list(held(runner, rows)))


def held(runner: RollingRunner, rows: dict[int, WrittenOut]) -> list[int]:
    return [runner.cache.lengths[row] for row in rows]


def forward(
    runner: RollingRunner, rows: dict[int, WrittenOut], ids: Tensor, settled: list[int]
) -> None:
    """Logits [T, V] of `ids`, which follow the tokens of the row."""
    logits = runner.forward(ForwardBatch(ids, list(rows), committed=settled))
    for i, plain in enumerate(rows.values()):
        expected = plain.forward(ids[i].tolist(), settled[i])
        assert torch.allclose(logits[i], expected, atol=5e-4, rtol=1e-4), (
            i,
            settled[i],
            (logits[i] - expected).abs().max(),
        )


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_a_plain_streaming_llm(
    backend: str, policy: StreamingLLM, block_size: int
) -> None:
    """Prompts of different lengths in chunks, then three drafts at a time, of which some rows take
    back some, and single rows that go on alone, until every window is far from the first blocks."""
    torch.manual_seed(1)
    runner = make_rolling(TINY, policy, BACKENDS[backend](), block_size)
    rows = {row: WrittenOut(tiny_transformer(), policy) for row in range(3)}
    for row, chunks in ((2, [33, 40, 7]), (0, [3]), (1, [40] * 6)):
        runner.allocate(row)
        for chunk in chunks:
            compare(runner, {row: rows[row]}, chunk)
    for step in range(30):
        batch = rows if step % 5 else {1: rows[1], 2: rows[2]}
        settled = held(runner, batch)
        for num_new in (2, 1, 1):
            ids = torch.randint(3, VOCAB, (len(batch), num_new))
            forward(runner, batch, ids, settled)
        kept = [n + (2 + i + step) % 5 for i, n in enumerate(settled)]
        runner.truncate(list(batch), kept)
        for plain, length in zip(batch.values(), kept, strict=True):
            plain.truncate(length)
    compare(runner, rows, 4)
    longest = max(runner.cache.lengths)
    assert longest > 290
    if policy.budget < 100 and block_size < 64:
        assert -1 in runner.cache.blocks[1], "something was evicted"


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32),
        RopeConfig(10000.0, "yarn", 8.0, original_max_position_embeddings=32, attention_factor=1.2),
        RopeConfig(rotary_dim=8, interleaved=True),
    ],
    ids=["llama3", "yarn", "GPT-J"],
)
def test_other_rotations_give_the_same_logits(rope: RopeConfig) -> None:
    torch.manual_seed(1)
    config = replace(TINY, rope=rope, num_kv_heads=1)
    policy = StreamingLLM(4, 24)
    runner = make_rolling(config, policy, SDPABackend(), 8)
    rows = {0: WrittenOut(tiny_transformer(config), policy)}
    runner.allocate(0)
    for num_new in (40, 40, 1, 2, 1, 30, 1):
        compare(runner, rows, num_new)


def test_a_row_serves_another_text_after_its_release() -> None:
    torch.manual_seed(1)
    policy = StreamingLLM(4, 24)
    runner = make_rolling(TINY, policy, GroupedBackend(), 8)
    for length in (40, 12, 39):
        runner.cache.release(0)
        runner.allocate(0)
        rows = {0: WrittenOut(tiny_transformer(), policy)}
        for num_new in (length, 5, 1, 9, 1):
            compare(runner, rows, num_new)


def test_rotating_the_sinks_often_adds_no_error() -> None:
    """In bfloat16, the rotated keys are within one rounding of an exact rotation of the original
    keys."""
    policy = StreamingLLM(4, 24)
    model = tiny_transformer(dtype=torch.bfloat16)
    runner = RollingRunner(
        model, SDPABackend(), Group((0,), 0), 1, MAX_TOKENS, policy, max_tail=TAIL, block_size=8
    )
    runner.allocate(0)
    torch.manual_seed(0)
    slots = None
    for step in range(300):
        runner.forward(ForwardBatch(torch.randint(3, VOCAB, (1, 1)), [0]))
        if step == 10:
            slots = runner.cache.slots(torch.tensor([0]), torch.arange(4)[None])
            first = runner.cache.read_keys(slots).clone()
    assert slots is not None
    by = 299 - policy.budget  # the last forward began with 299 committed tokens
    exact = apply_rope(first.double().view(1, 1, -1, 16), model.rope_of(0)[by].double()[None, None])
    found = runner.cache.read_keys(slots)
    assert not torch.equal(found, first)
    assert torch.allclose(found.double(), exact.view_as(first), atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_storage_does_not_grow_with_the_text(backend: str) -> None:
    policy = StreamingLLM(16, 81)
    sizes = []
    for max_tokens in (400, 4000, 40_000):
        runner = RollingRunner(
            tiny_transformer(),
            BACKENDS[backend](),
            Group((0,), 0),
            2,
            max_tokens,
            policy,
            max_tail=TAIL,
        )
        sizes.append(runner.cache.num_bytes)
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    # The sinks take a block of 64. Window and tail, 65 + 40 tokens, take two blocks, and a third
    # because they begin within a block.
    assert sizes == [2 * 4 * 64 * per_token] * 3


def test_short_texts_take_no_more_blocks_than_they_need() -> None:
    runner = RollingRunner(
        tiny_transformer(), SDPABackend(), Group((0,), 0), 2, 100, StreamingLLM(4, 24), max_tail=99
    )
    assert runner.cache.shape.num_blocks == 2 * 2


def test_the_pool_suffices_for_every_block_size() -> None:
    """All rows hold as many tokens as they can. The pool is never exhausted, and every visible
    token has a block."""
    for block_size in (1, 3, 7, 8, 64):
        for policy in (StreamingLLM(4, 24), StreamingLLM(0, 9), StreamingLLM(9, 10)):
            runner = make_rolling(TINY, policy, SDPABackend(), block_size)
            for row in range(3):
                runner.allocate(row)
            for num_new in [40, 1, 39, 2, 40, 40, 7, 40, *[1] * 20]:
                runner.forward(ForwardBatch(torch.randint(3, VOCAB, (3, num_new)), [0, 1, 2]))
                for row in range(3):
                    blocks = runner.cache.blocks[row]
                    start = max(0, runner.settled[row] - policy.budget + policy.num_sink_tokens)
                    visible = {*range(policy.num_sink_tokens)} | {
                        *range(start, runner.cache.lengths[row])
                    }
                    assert all(blocks[t // block_size] >= 0 for t in visible)


def test_another_policy_or_a_longer_tail_is_refused() -> None:
    runner = make_rolling(TINY, StreamingLLM(4, 24), SDPABackend(), 8)
    runner.allocate(0)
    with pytest.raises(AssertionError, match="evicted tokens cannot be shown"):
        runner.forward(ForwardBatch(torch.ones(1, 1, dtype=torch.int64), [0], StreamingLLM(4, 25)))
    with pytest.raises(AssertionError, match="as long as was announced"):
        runner.forward(ForwardBatch(torch.ones(1, TAIL + 1, dtype=torch.int64), [0]))
