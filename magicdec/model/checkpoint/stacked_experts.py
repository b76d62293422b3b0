"""UnstackedExperts: a checkpoint with one tensor for all experts of a layer, as one with a tensor
for each (`ExpertStack`). gpt-oss is stored so:

- `X.gate_up_proj` [E, hidden, 2 F], whose last dimension has gates and ups by turns;
- `X.down_proj` [E, F, hidden];
- `X.gate_up_proj_bias` [E, 2 F] and `X.down_proj_bias` [E, hidden];
- in MXFP4, `_blocks` [E, N, K / 32, 16] and `_scales` [E, N, K / 32] in place of a matrix [N, K].

Mixtures of Qwen3.5 in bfloat16 have `X.gate_up_proj` [E, 2 F, hidden], first all gates, and
`X.down_proj` [E, hidden, F]; those in FP8 have a tensor for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import Index, StoredTensor, WeightSource
from magicdec.model.families.family import ExpertStack
from magicdec.output.files import AGAIN

STACKED = re.compile(r"(?P<experts>.*\.experts)\.(?P<which>gate_up|down)_proj(?P<part>|_[a-z]+)")
# What a stacked tensor is called as a part of one expert, and its number of dimensions.
PARTS = {
    "": ("weight", 3),
    "_bias": ("bias", 2),
    "_blocks": ("blocks", 4),
    "_scales": ("scales", 3),
}


class Share(NamedTuple):
    """Every `step`-th output from `first` on of one expert in a stacked tensor, whose outputs are
    its last dimension if it `is_transposed`, else its second."""

    name: str
    expert: int
    first: int
    step: int
    is_transposed: bool


class UnstackedExperts(WeightSource):
    """Names of an expert are `X.{number}.gate_proj.weight`, and so on. Raises ValueError for a
    stacked tensor of another shape."""

    def __init__(self, source: WeightSource, stack: ExpertStack) -> None:
        super().__init__(source.path)
        self._source = source
        self._stack = stack
        self._shares: dict[str, Share] = {}
        for name, stored in source.tensors.items():
            found = STACKED.fullmatch(name)
            if found is None or found["part"] not in PARTS:
                self.tensors[name] = stored
            else:
                self._unstack(name, stored, found)

    def _unstack(self, name: str, stored: StoredTensor, found: re.Match[str]) -> None:
        leaf, num_dims = PARTS[found["part"]]
        matrices = ("down_proj",) if found["which"] == "down" else ("gate_proj", "up_proj")
        is_transposed = leaf == "weight" and self._stack.is_transposed
        shape = stored.shape
        outputs = shape[-1] if is_transposed else shape[min(1, len(shape) - 1)]
        if len(shape) != num_dims or outputs % len(matrices):
            raise ValueError(
                f"{stored.file}: {name} has shape {shape}, expected {num_dims} dimensions with as "
                f"many outputs for each of {', '.join(matrices)}; {AGAIN}"
            )
        inputs = shape[1:-1] if is_transposed else shape[2:]
        num_own = outputs // len(matrices)
        own = StoredTensor((num_own, *inputs), stored.dtype, stored.file)
        apart, step = (1, len(matrices)) if self._stack.takes_turns else (num_own, 1)
        for expert in range(shape[0]):
            for number, matrix in enumerate(matrices):
                unstacked = f"{found['experts']}.{expert}.{matrix}.{leaf}"
                share = Share(name, expert, number * apart, step, is_transposed)
                self._shares[unstacked] = share
                self.tensors[unstacked] = own

    def read(self, name: str, index: Index = ()) -> Tensor:
        share = self._shares.get(name)
        if share is None:
            return self._source.read(name, index)
        shape = self.tensors[name].shape
        whole = (*index, *[slice(None)] * (len(shape) - len(index)))
        outputs, *inputs = (
            slice(*part.indices(size)[:2]) for part, size in zip(whole, shape, strict=True)
        )
        begin = share.first + share.step * outputs.start
        end = begin + share.step * max(0, outputs.stop - outputs.start - 1) + 1
        stored = slice(begin, end if outputs.stop > outputs.start else begin)
        own = slice(share.expert, share.expert + 1)
        if share.is_transposed:
            values = self._source.read(share.name, (own, *inputs, stored))[0]
            return values[..., :: share.step].T
        return self._source.read(share.name, (own, stored, *inputs))[0, :: share.step]


UNSTACKED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\."
    r"(?P<leaf>weight|bias)"
)


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse for gpt-oss, of plain tensors by name: those of the experts of a layer as one."""
    found: dict[str, Tensor] = {}
    parts: dict[tuple[str, str, str], dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = UNSTACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            key = match["experts"], match["matrix"], match["leaf"]
            parts.setdefault(key, {})[int(match["expert"])] = tensor
    whole = {key: torch.stack([own[e] for e in sorted(own)]) for key, own in parts.items()}
    for (experts, matrix, leaf), tensor in whole.items():
        end = "_bias" if leaf == "bias" else ""
        if matrix == "down":
            outputs = tensor
            name = f"{experts}.down_proj{end}"
        elif matrix == "gate":
            up = whole[experts, "up", leaf]
            outputs = torch.stack([tensor, up], dim=2).flatten(1, 2)
            name = f"{experts}.gate_up_proj{end}"
        else:
            continue
        found[name] = outputs if leaf == "bias" else outputs.transpose(1, 2).contiguous()
    return found
