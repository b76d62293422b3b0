"""What Triton kernels of several modules share. Import it only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x):
    """float32 numbers rounded to the nearest bfloat16, ties to even, as float32. A GPU rounds so
    when it stores them; Triton's interpreter would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return rounded.to(tl.float32, bitcast=True)
