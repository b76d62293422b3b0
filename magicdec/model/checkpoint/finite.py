"""Whether stored weights are finite numbers. Owns the check and its error, which names the tensor.

The check looks at the values that a model will compute with: a number that float32 holds may be
infinite in bfloat16 or float16. It reads what is in memory anyway, once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import Index, WeightSource


class WeightsRefused(ValueError):
    """Weights that nothing can be computed with. One line, which names the file and the tensor."""


def check_finite(
    values: Tensor, stored: Tensor, source: WeightSource, name: str, at: Index
) -> None:
    """Raises WeightsRefused if one of the `values` is infinite or NaN. They come from `stored`, the
    slice `at` of the tensor `name` of `source`, and have its shape."""
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
