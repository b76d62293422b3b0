"""Properties of numbers in groups, for shapes and formats at random: packing loses nothing, a row's
result is its own, and the shards of ranks make the whole layer or are refused."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import test_gguf
import torch
from gguf.constants import GGMLQuantizationType as Type
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_gguf import head_sizes, reference_model, save
from test_grouped import FORMATS, make_numbers, ordered, weights_of
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import find_model
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers, NumberFormat
from magicdec.model.linear.packed import PackedLinear
from magicdec.model.transformer import Transformer
from magicdec.names import STORED
from magicdec.setup.loading import load_kind
from magicdec.setup.model_checks import check_stored_groups
from magicdec.setup.model_plan import Kinds

formats = st.sampled_from(FORMATS)
outputs = st.integers(1, 150)
groups = st.integers(1, 5)
seeds = st.integers(0, 1 << 30)


def same(found: GroupedNumbers, expected: GroupedNumbers) -> bool:
    pairs = [(found.numbers, expected.numbers), (found.scale, expected.scale)]
    if expected.minimum is None:
        return found.minimum is None and all(torch.equal(*pair) for pair in pairs)
    assert found.minimum is not None
    return all(torch.equal(*pair) for pair in (*pairs, (found.minimum, expected.minimum)))


@settings(max_examples=60)
@given(formats, outputs, groups, seeds)
def test_packing_loses_nothing(kind: NumberFormat, num_outputs: int, count: int, seed: int) -> None:
    """Neither in the layer of torch nor in the packed one; the weights are those that the format
    defines."""
    numbers = make_numbers((num_outputs, count * kind.group), kind, seed)
    layer = GroupedLinear(numbers, None)
    first = seed % num_outputs
    assert same(layer.numbers(), numbers)
    assert torch.equal(layer.numbers(slice(first, None)).numbers, numbers.numbers[first:])
    assert torch.equal(layer.dense(), weights_of(numbers))
    assert torch.equal(PackedLinear(numbers).dense(), weights_of(numbers))


@settings(max_examples=60)
@given(
    formats,
    outputs,
    groups,
    seeds,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(2, 45),
)
def test_the_result_of_a_row_is_its_own(
    kind: NumberFormat,
    num_outputs: int,
    count: int,
    seed: int,
    rounds: bool,
    has_order: bool,
    is_narrow: bool,
    rows: int,
) -> None:
    """Whatever the other rows hold, how many they are, and where it stands among them."""
    dtype = torch.bfloat16 if is_narrow else torch.float32
    numbers = make_numbers((num_outputs, count * kind.group), kind, seed)
    layer = PackedLinear(ordered(numbers) if has_order else numbers, rounds=rounds)
    x = torch.randn(rows, count * kind.group).to(dtype)
    whole = layer(x)
    some = torch.randperm(rows)[: 1 + seed % rows]
    assert torch.equal(layer(x[some]), whole[some])
    others = torch.randn_like(x)
    others[some] = x[some]
    assert torch.equal(layer(others)[some], whole[some])


BLOCKS = (Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_1, Type.IQ4_NL)
CPU = torch.device("cpu")


@settings(max_examples=8)
@example(Type.Q4_1, 17, 2, 64)  # 272 MLP units a rank: half a block
@example(Type.Q4_1, 17, 3, 64)  # 192, 192 and 160
@example(Type.Q5_1, 12, 2, 8)  # two heads a rank: half a block
@example(Type.Q5_1, 12, 3, 8)
@given(st.sampled_from(BLOCKS), st.integers(4, 20), st.integers(2, 4), st.sampled_from((8, 24, 64)))
def test_shards_make_the_whole_layers_or_are_refused(
    kind: Type, num_blocks: int, num_ranks: int, head_size: int
) -> None:
    """The rows of q, k, v, gate and up, and the inputs of the other two, in blocks of 32, of which
    ranks may have halves."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_gguf, "WIDE", 32 * num_blocks)
        patch.setattr(test_gguf, "SIZE", head_size)
        patch.setitem(test_gguf.MODELS, "llama", ("Llama", head_sizes(head_size)))
        path = Path(directory, "model.gguf")
        save(path, "llama", reference_model("Llama"), (kind,))
        source = find_model("--model", str(path))
        shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
        heads = [shard.heads(test_gguf.HEADS, test_gguf.KV_HEADS)[0] for shard in shards]
        checked = (STORED, "--model m", num_ranks, source, "--target_dtype bfloat16")
        if any(head * head_size % 16 for span in heads for head in span):
            with pytest.raises(ValueError, match=r"attn\.o_proj\.weight in groups of 16") as no:
                check_stored_groups(*checked)
            assert re.search(r"choose --target_dtype bfloat16, or fewer ranks$", str(no.value))
            return
        check_stored_groups(*checked)
        stored = Kinds("float32", STORED)
        plain = Kinds("float32", "float32")
        parts = [load_kind(source, shard, stored, CPU) for shard in shards]
        whole = load_kind(source, Shard(), plain, CPU)
        alike = [load_kind(source, shard, plain, CPU) for shard in shards]
    for part, expected in zip(parts, alike, strict=True):
        for ours, theirs in zip(layers_of(part), layers_of(expected), strict=True):
            assert torch.equal(ours, theirs)
    for layer in range(len(whole.blocks)):
        down = [dense(part.blocks[layer].mlp.down) for part in parts]
        assert torch.equal(torch.cat(down, dim=1), whole.blocks[layer].mlp.down.weight)
        up = [dense(part.blocks[layer].mlp.gate_up).chunk(2) for part in parts]
        gathered = torch.cat([torch.cat(pair) for pair in zip(*up, strict=True)])
        assert torch.equal(gathered, whole.blocks[layer].mlp.gate_up.weight)


def dense(layer: torch.nn.Module) -> Tensor:
    assert isinstance(layer, GroupedLinear), "it is not widened"
    return layer.dense()


def layers_of(model: Transformer) -> list[Tensor]:
    """The weights of all matrices but embedding and head."""
    layers = [
        layer
        for block in model.blocks
        for layer in (
            block.attention.qkv,
            block.attention.output,
            block.mlp.gate_up,
            block.mlp.down,
        )
    ]
    return [layer.dense() if isinstance(layer, GroupedLinear) else layer.weight for layer in layers]
