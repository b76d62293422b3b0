"""Writes small quantised checkpoints, word by word from the definitions of their formats; holds no
tests itself. Nothing is shared with the readers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that stands in each place of a word
Layer = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by leaf, and the float32 weights that they stand for."""


def words(codes: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of unsigned codes along the first axis, the first in the lowest bits. `order`:
    which code of a word stands in each place."""
    in_word = 32 // bits
    num_words = -(-len(codes) // in_word)
    found = np.zeros((num_words, *codes.shape[1:]), np.uint32)
    for word in range(num_words):
        for place in range(in_word):
            index = word * in_word + (place if order is None else order[place])
            if index < len(codes):
                found[word] |= codes[index].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(found.view(np.int32).copy())


class Integers:
    """Random codes [N, K], scales and zero points [N, groups], and the group of each input.

    `scattered`: a seed for groups of inputs that are not contiguous, the same for all matrices of
    so many inputs, as act-order makes them."""

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        group: int,
        seed: int,
        scale: torch.dtype = torch.float16,
        zero: int | None = None,
        scattered: int | None = None,
    ) -> None:
        outputs, inputs = shape
        group = inputs if group == -1 else group
        random = np.random.default_rng(seed)
        groups = -(-inputs // group)
        most = 1 << bits
        self.codes = random.integers(0, most, shape)
        # Of one sign only where a format says so: none does.
        spread = random.uniform(0.2, 1, (outputs, groups)) * random.choice(
            [-1, 1], (outputs, groups)
        )
        self.scale = torch.from_numpy(spread * 0.4 / most).to(scale)
        self.zeros = random.integers(most // 4, most * 3 // 4, (outputs, groups))
        if zero is not None:
            self.zeros[:] = zero
        self.group_of = np.arange(inputs) // group
        self.is_scattered = scattered is not None
        if scattered is not None:
            self.group_of = np.random.default_rng((scattered, inputs)).permutation(self.group_of)

    @property
    def weights(self) -> Tensor:
        """scale * (code - zero), computed in float32."""
        zeros = torch.from_numpy(self.zeros[:, self.group_of])
        differences = (torch.from_numpy(self.codes) - zeros).float()
        return self.scale[:, torch.from_numpy(self.group_of)].float() * differences


def gptq(numbers: Integers, bits: int, less: int) -> Layer:
    """`less`: what is taken from stored zero points, 1 in the first version."""
    leaves = {
        "qweight": words(numbers.codes.T, bits),
        "qzeros": words(numbers.zeros - less, bits).T,
        "scales": numbers.scale.T,
        "g_idx": torch.from_numpy(numbers.group_of).int(),
    }
    return leaves, numbers.weights


def awq(numbers: Integers) -> Layer:
    leaves = {
        "qweight": words(numbers.codes, 4, AWQ_ORDER).T,
        "qzeros": words(numbers.zeros, 4, AWQ_ORDER).T,
        "scales": numbers.scale.T,
    }
    return leaves, numbers.weights


def packed(numbers: Integers, bits: int, is_symmetric: bool) -> Layer:
    """compressed-tensors, pack-quantized: signed numbers with 2 ** (bits - 1) added."""
    leaves = {
        "weight_packed": words(numbers.codes.T, bits).T,
        "weight_scale": numbers.scale,
        "weight_shape": torch.tensor(numbers.codes.shape),
    }
    if not is_symmetric:
        leaves["weight_zero_point"] = words(numbers.zeros, bits)
    if numbers.is_scattered:
        leaves["weight_g_idx"] = torch.from_numpy(numbers.group_of).int()
    return leaves, numbers.weights


def plain_integers(numbers: Integers, is_symmetric: bool) -> Layer:
    """compressed-tensors, int-quantized."""
    leaves = {
        "weight": torch.from_numpy(numbers.codes - 128).to(torch.int8),
        "weight_scale": numbers.scale,
    }
    if not is_symmetric:
        leaves["weight_zero_point"] = torch.from_numpy(numbers.zeros - 128).to(torch.int8)
    return leaves, numbers.weights


def fp8(shape: tuple[int, int], block: tuple[int, int], leaf: str, seed: int, form: str) -> Layer:
    """`form` of the scales: blocks, channels, one ([1]), a scalar, or exponents (E8M0, in which a
    byte stands for 2 ** (byte - 127))."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    counts = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    scale = 0.02 + 0.1 * torch.rand(counts, generator=generator)
    exponents = scale.log2().round()
    if form == "exponents":
        scale = 2**exponents
    weights = torch.empty(shape)
    for i in range(counts[0]):
        for j in range(counts[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            columns = slice(j * block[1], (j + 1) * block[1])
            weights[rows, columns] = stored[rows, columns].float() * scale[i, j]
    kept = {"one": scale.reshape(-1), "scalar": scale.squeeze()}.get(form, scale)
    if form == "exponents":
        kept = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": stored, leaf: kept}, weights


def save_quantized(
    directory: Path,
    model: Any,
    table: dict[str, Any],
    layer: Callable[[tuple[int, int], int], Layer],
    is_plain: Callable[[str], bool] = lambda name: name == "lm_head",
) -> None:
    """Write a model of transformers with quantised linear layers, and give it the weights that
    these stand for."""
    directory.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        is_linear = isinstance(model.get_submodule(module), torch.nn.Linear)
        if leaf != "weight" or not is_linear or is_plain(module):
            tensors[name] = parameter.data.clone()
            continue
        leaves, weights = layer(tuple(parameter.shape), seed)
        parameter.data.copy_(weights)
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in leaves.items()}
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    write_table(directory, table, config)


def save_mxfp4(directory: Path, model: Any, table: dict[str, Any] | None = None) -> None:
    """Write a GptOss model of transformers with experts in MXFP4, as gpt-oss is published, and give
    it the weights that these stand for."""
    directory.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    random = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = parameter.data.clone()
            continue
        experts, inputs, outputs = parameter.shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(122, 125, blocks.shape[:3], np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(scales)
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 32)
        values = np.where(codes >> 3, -1, 1) * magnitudes[codes & 7]
        values = values * 2.0 ** (scales[..., None].astype(np.float32) - 127)
        dense = torch.from_numpy(values.reshape(experts, outputs, inputs).astype(np.float32))
        parameter.data.copy_(dense.transpose(1, 2))
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    write_table(directory, table or {"quant_method": "mxfp4", **LEFT_OUT}, config)


# As gpt-oss is published.
LEFT_OUT = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
}


def write_table(
    directory: Path, table: dict[str, Any], config: dict[str, Any] | None = None
) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) if config is None else config
    path.write_text(json.dumps(config | {"quantization_config": table}))
