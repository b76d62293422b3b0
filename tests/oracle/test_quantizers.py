"""The formats of `--quantize` that llama.cpp has, number by number as its quantisers in `gguf`."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from torch import Tensor

from magicdec.model.gguf.blocks import BLOCK_TYPES
from magicdec.model.linear.quantizers import Quantizer
from magicdec.names import QUANTIZERS, load_named

FORMATS = {"q8_0": Type.Q8_0, "q4_0": Type.Q4_0, "q4_1": Type.Q4_1}
OURS = ("int8", "int4", "int4_g128")  # of which llama.cpp has none


def make_weights() -> Tensor:
    """Of many sizes; halves, zeros, groups of one sign, and those that float16 scales lose."""
    torch.manual_seed(0)
    sizes = 10.0 ** torch.randint(-4, 3, (300, 8)).repeat_interleave(32, 1)
    weights = torch.randn(300, 256) * sizes
    weights[0] = 0.0
    weights[1, :32] = torch.arange(32) - 15.5
    weights[2] = weights[2].abs()
    weights[3] = 1e-7
    weights[5:105] = torch.randint(-254, 255, (100, 256)) / 2
    return weights


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_and_scales_are_those_of_llama_cpp(name: str) -> None:
    weights = make_weights()
    quantizer: Quantizer = load_named(QUANTIZERS, name)
    ours = quantizer(weights)
    stored = BLOCK_TYPES[int(FORMATS[name])]
    theirs = stored.groups(quantize(weights.numpy(), FORMATS[name]))
    assert np.array_equal(ours.numbers.numpy(), theirs.numbers)
    assert np.array_equal(ours.scale.float().numpy(), theirs.scale)
    kind = ours.format
    assert (kind.bits, kind.group, kind.least) == (stored.bits, stored.group, stored.least)
    assert (kind.scale, kind.has_minimum) == (stored.scale, stored.has_minimum)
    if theirs.minimum is not None:
        assert ours.minimum is not None
        assert np.array_equal(ours.minimum.float().numpy(), theirs.minimum)


def test_every_format_is_compared() -> None:
    assert set(QUANTIZERS) == {*FORMATS, *OURS}
