"""The check that weights are finite in the dtype that a model computes with: a float32 number may
be infinite in bfloat16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import Index, WeightSource


class WeightsRefused(ValueError):
    """Weights that cannot be computed with, in one line with file and tensor."""


def check_finite(
    values: Tensor, stored: Tensor, source: WeightSource, name: str, at: Index
) -> None:
    """Raise WeightsRefused if one of `values` is infinite or NaN. They come from `stored`, the
    slice `at` of tensor `name`."""
    if values.numel() == 0 or not values.is_floating_point():
        return
    least, most = torch.aminmax(values)  # NaN if any value is
    if math.isfinite(least) and math.isfinite(most):
        return
    place = (~values.isfinite()).nonzero()[0].tolist()
    starts = [part.start or 0 for part in at] + [0] * (len(place) - len(at))
    where = [start + index for start, index in zip(starts, place, strict=True)]
    value = float(stored[tuple(place)])
    dtype = str(values.dtype).removeprefix("torch.")
    what = f"{value:g} at {where}"
    if math.isfinite(value):
        what += f", which is infinite in {dtype}; choose --dtype float32"
    else:
        what += ", and weights are finite numbers; the file is damaged, or was saved by a training "
        what += "that had failed"
    raise WeightsRefused(f"{source.where(name) or source.path}: tensor {name} holds {what}")
