"""The CPU backend: attention over the paged cache in one pass of C++ (`cpp/native.cpp`)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import MOST_WATCHED, Capabilities, HeadSizes
from magicdec.kernels.build import PREFILL_FROM, SHARED_HEADERS, load_library, share_openmp
from magicdec.kv.layout import CODED, PLAIN, TILE, TILED, KVLayout
from magicdec.kv.view import KVView

SOURCE = Path(__file__).parent / "cpp" / "native.cpp"
HEADERS = (
    *sorted(SOURCE.parent.glob("*.h")),
    SHARED_HEADERS / "arithmetic.h",
    SHARED_HEADERS / "amx.h",
    SHARED_HEADERS / "team.h",
    SHARED_HEADERS / "bf16.h",
    SHARED_HEADERS / "wide.h",
)
# The dtypes of pools; native.cpp knows one by its place here.
STORAGE = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8)
Shape = ctypes.c_int64 * 18


def flags_of(stored: torch.dtype, computed: torch.dtype) -> tuple[str, ...]:
    """The flags of the library that computes in one dtype from pools of another one. What reads
    codes takes longer to compile than all else, and most runs do not need it."""
    assert computed == stored or stored in CODED
    return (f"-DCODES_OF_{str(computed)[6:].upper()}",) if stored in CODED else ()


class NativeBackend(AttentionBackend):
    """A backend that stores float32, bfloat16 or codes, and computes in float32."""

    capabilities = Capabilities(
        "native",
        devices=("cpu",),
        needs_compiler=True,
        head_sizes=HeadSizes("a multiple of 16", range(16, 1024, 16)),
        reads_codes=True,
        can_be_recorded=False,
        is_part_of_native_steps=True,
    )

    def __init__(self, is_widened: bool = False) -> None:
        """`is_widened`: widen bfloat16 to float32 in registers, as CPUs without dot products for
        it do, for tests."""
        self._is_widened = is_widened

    def block_size(self, max_tokens: int) -> int:
        return -(-max_tokens // TILE) * TILE

    def layout(self, dtype: torch.dtype) -> KVLayout:
        return CODED.get(dtype, TILED if dtype == torch.bfloat16 else PLAIN)

    def plan(self, view: KVView) -> None:
        cache = view.cache
        assert cache.shape.layout is self.layout(cache.k.dtype), "another backend's layout"

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        return self.run_with_lse(layer, q, k, v, view)[0]

    def run_with_lse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView, mass: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output of `run`, and the log-sum-exp of scores, float32 [B,T,H]. Fills `mass`,
        float32 [B, G, blocks], with attention weights."""
        cache = view.cache
        return attention(
            q,
            k,
            v,
            cache.k[layer],
            cache.v[layer],
            cache.block_table,
            view.row_index,
            view.seq_lens,
            view.layer_ranges(layer),
            view.window or 0,
            self._is_widened,
            mass,
            self.layer_sinks(layer),
            view.is_of_prompt,
        )

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[1] <= MOST_WATCHED < PREFILL_FROM, "refused before the run"
        mass = torch.empty(q.shape[0], k.shape[2], view.num_weight_blocks)
        return self.run_with_lse(layer, q, k, v, view, mass)[0], mass


@cache
def kernel(head_size: int, *flags: str) -> ctypes.CDLL:
    """The library for one head size, compiled at first use and then cached."""
    assert head_size % 16 == 0, "refused before the run"
    share_openmp()
    library = load_library(SOURCE, ("-fopenmp", f"-DHEAD_SIZE={head_size}", *flags), HEADERS)
    library.magicdec_keys_read.restype = ctypes.c_int64
    library.magicdec_attention.argtypes = (ctypes.c_int, ctypes.c_int, Shape) + 13 * (
        ctypes.c_void_p,
    )
    library.magicdec_received.restype = None
    library.magicdec_received.argtypes = (ctypes.c_int,) + 7 * (ctypes.c_void_p,)
    return library


def has_dot_products() -> bool:
    """Whether this CPU multiplies bfloat16 without widening."""
    return bool(kernel(64).magicdec_has_dot_products())


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    ranges: Tensor,
    window: int,
    is_widened: bool,
    mass: Tensor | None = None,
    sinks: Tensor | None = None,
    is_of_prompt: bool = False,
) -> tuple[Tensor, Tensor]:
    """Append k, v [B,T,G,D] to a layer's pools [blocks, G, block_size, D] and attend: [B,T,H,D]
    and the log-sum-exp of scores, float32 [B,T,H].

    `ranges` [B, G or 1, R, 2] are visible positions, of which a token sees the last `window` (0:
    all). `mass`, float32 [B, G, blocks], is filled with attention weights by block. `sinks`,
    float32 [H]: `AttentionBackend.sinks` of the layer. A token of a prompt has the same bits in
    any chunk with `is_of_prompt`; without it in any chunk below PREFILL_FROM tokens."""
    num_rows, num_new, num_heads, size = q.shape
    strides = q.stride(), k.stride(), v.stride()
    assert all(s[2:] == (size, 1) for s in strides), "heads must be adjacent"
    assert ranges.is_contiguous(), "the library computes addresses from the shape"
    out = torch.empty(num_rows, num_new, num_heads, size, dtype=q.dtype)
    lse = torch.empty(num_rows, num_new, num_heads, dtype=torch.float32)
    shape = Shape(
        num_rows,
        num_new,
        num_heads,
        k.shape[2],
        size,
        k_pool.shape[2],
        block_table.shape[1],
        ranges.shape[2],
        *(step for s in strides for step in s[:2]),
        ranges.shape[1],
        0 if mass is None else mass.shape[2],
        window,
        is_of_prompt,
    )
    tensors = (q, k, v, k_pool, v_pool, block_table, rows, seq_lens, ranges, sinks, out, lse, mass)
    failed = kernel(size, *flags_of(k_pool.dtype, q.dtype)).magicdec_attention(
        STORAGE.index(k_pool.dtype),
        is_widened,
        shape,
        *(None if t is None else t.data_ptr() for t in tensors),
    )
    assert not failed, "the library is compiled for this head size"
    return out, lse
