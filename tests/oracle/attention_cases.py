"""What tests of attention share: the backends with the cases that each serves, caches of random
tokens, forwards over them, and attention in float64. A new backend is one row in BACKENDS.

Triton's kernels run on a GPU if there is one; otherwise they are interpreted. That is slow, so only
every seventh case runs, and one case of each test in `make test`. The GPU libraries need a GPU;
`test_cuda_libraries.py` tests what can be tested of them without one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from rounded import CODES, as_stored
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.flash_attn import FlashAttnBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.capabilities import capabilities_of
from magicdec.config.machine import Machine
from magicdec.kernels.cpu import cpu_features
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import WEIGHTS_BLOCK, KVView, Visible, make_view

ON_CPUS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa, blocks of 4": lambda: SDPABackend(4),
    "sdpa, blocks of 64": SDPABackend,
    "grouped": GroupedBackend,
    "native": NativeBackend,
    "native, widened": lambda: NativeBackend(is_widened=True),
}
BACKENDS = ON_CPUS | {
    "triton": TritonBackend,
    "flash_attn": FlashAttnBackend,
}
LIBRARIES = (FlashAttnBackend,)  # bfloat16, on a GPU
HEADS = [(4, 4, 64), (6, 2, 16), (5, 1, 80), (7, 7, 32), (4, 2, 96), (8, 1, 128), (2, 2, 256)]
TOLERANCE = {torch.float32: 2e-5} | dict.fromkeys((torch.bfloat16, *CODES), 3e-2)
DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = [*DTYPES, *CODES]
HAS_CUDA = torch.cuda.is_available()
# Compiled as for a CPU without tile registers if this one has them, else with emulated ones, which
# need its other instructions.
NO_TILES = [("-U__AMX_BF16__",)] if "amx_bf16" in cpu_features() else []
EMULATED_TILES = [("-DEMULATED_TILES",)] if "avx512_bf16" in cpu_features() and not NO_TILES else []
OTHER_TILES = [*NO_TILES, *EMULATED_TILES]
AVX2 = ("-march=x86-64-v3",)  # compiled as for a CPU whose vectors have 8 numbers
AVX512 = ("-march=x86-64-v4",)  # compiled as for a CPU without dot products for bfloat16
LENGTHS = (37, 3, 70, 0)
COMMITTED = (35, 3, 66, 0)
MAX_TOKENS = 120


def cases(
    *axes: Sequence[object], without: Sequence[str] = (), interpreted: int = 1
) -> list[object]:
    """Tuples of a backend's name and one value of each axis: all combinations that the backend
    supports. Of an interpreted backend, every seventh, of which `make test` runs the first
    `interpreted`. The backends `without` are left out. Axes may hold heads and dtypes, or anything
    that every backend supports."""
    params: list[object] = []
    for name in BACKENDS:
        kind, _, _ = name.partition(",")
        if kind in without:
            continue
        served = [values for values in itertools.product(*axes) if is_served(name, values)]
        is_slow = kind == "triton" and not HAS_CUDA
        if is_slow:
            # Few KV heads first, which are few programs. Both dtypes occur, since 7 is odd.
            served = sorted(served, key=kv_heads)[::7]
        capabilities = capabilities_of(kind)
        marks = []
        if "cpu" not in capabilities.devices:
            missing = capabilities.missing_parts()
            marks = [pytest.mark.cuda, pytest.mark.skipif(missing is not None, reason=str(missing))]
        if kind == "triton" and find_spec("triton") is None:
            marks = [pytest.mark.skip(reason="triton is not installed")]
        for index, values in enumerate(served):
            wide = [pytest.mark.wide] if is_slow and index >= interpreted else []
            params.append(pytest.param(name, *values, marks=[*marks, *wide]))
    return params


def kv_heads(values: Sequence[object]) -> int:
    return next((value[1] for value in values if isinstance(value, tuple)), 0)


def is_served(name: str, values: Sequence[object]) -> bool:
    """Whether the backend supports the heads and the dtype among `values`."""
    kind, _, _ = name.partition(",")
    size = next((value[2] for value in values if isinstance(value, tuple)), 64)
    dtype = next((value for value in values if isinstance(value, torch.dtype)), torch.bfloat16)
    capabilities = capabilities_of(kind)
    if dtype in CODES:
        return capabilities.reads_codes and not name.endswith("of 4")
    machine = Machine(1, has_compiler=True)
    device = "cpu" if "cpu" in capabilities.devices else "cuda"
    return capabilities.obstacle(machine, device, size, str(dtype)[6:]) is None


def device_of(backend: AttentionBackend) -> torch.device:
    """The device on which a backend is tested."""
    for_gpus = isinstance(backend, (TritonBackend, *LIBRARIES))
    return torch.device("cuda" if HAS_CUDA and for_gpus else "cpu")


class Exact(NamedTuple):
    out: Tensor  # [T, H, D]
    lse: Tensor  # [T, H]
    mass: Tensor  # [G, blocks]: the attention weights of each block of keys


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[int] | None = None,
    first: int | None = None,
    window: int | None = None,
    num_blocks: int | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """Causal attention of one row in float64: q [T, H, D] at positions `first` and after, over the
    tokens `keys` of k, v [S, G, D]. By default over all keys, with q at their end. `sinks` [H] are
    scores of one more key, which has no value."""
    first = len(k) - len(q) if first is None else first
    positions = first + torch.arange(len(q)).unsqueeze(1)
    seen = torch.tensor(range(len(k)) if keys is None else keys)
    is_seen = (seen <= positions) & (seen > positions - (window or MAX_TOKENS + len(k)))  # [T, N]
    groups = k.shape[1]
    repeats = q.shape[1] // k.shape[1]
    k, v = (x[seen].double().repeat_interleave(repeats, 1) for x in (k, v))  # [N, H, D]
    scores = torch.einsum("thd,shd->hts", q.double(), k) / q.shape[2] ** 0.5
    scores.masked_fill_(~is_seen.to(q.device), float("-inf"))
    blocks = (seen // WEIGHTS_BLOCK).to(q.device)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], 2)
    weights = scores.softmax(2)[..., : len(seen)]
    num_blocks = num_blocks or int(blocks.max()) + 1
    mass = weights.new_zeros(q.shape[1], num_blocks).index_add_(1, blocks, weights.sum(1))
    return Exact(
        torch.einsum("hts,shd->thd", weights, v),
        scores.logsumexp(2).T,
        mass.unflatten(0, (groups, repeats)).sum(1),
    )


def fill(
    backend: AttentionBackend,
    kv_heads: int,
    size: int,
    lengths: Sequence[int],
    dtype: torch.dtype,
    total: int = MAX_TOKENS,
    layers: int = 2,
    block: int | None = None,
    growth: float = 1.0,
    computed: torch.dtype = torch.bfloat16,
) -> tuple[KVCache, Tensor, Tensor]:
    """A cache whose rows hold random tokens in the last layer, and the same tokens as plain tensors
    [B, S, G, D], S = `total`. Blocks interleave. Keys grow towards the end by the factor `growth`.
    What follows the end of a row are numbers that must not matter. Tokens that are stored as codes
    are `computed` in that dtype."""
    block = block or backend.block_size(total)
    num_rows = len(lengths)
    per_row = -(-total // block)
    device = device_of(backend)
    shape = CacheShape(layers, kv_heads, size, block, num_rows * per_row, backend.layout(dtype))
    cache = KVCache(shape, num_rows, per_row, dtype, device)
    for tokens in (total // 2, total):
        for row in reversed(range(num_rows)):
            cache.allocate(row, tokens)
    k, v = torch.randn(2, num_rows, total, kv_heads, size)
    k = k * torch.linspace(1, growth, total).view(1, -1, 1, 1)
    numbers = computed if dtype in CODES else dtype
    k = k.to(device, numbers)
    v = v.to(device, numbers)
    held_k = k.clone()
    held_v = v.clone()
    for row, length in enumerate(lengths):
        held_k[row, length:] *= 1e3 if dtype in CODES else float("inf")
        held_v[row, length:] *= 1e4
        cache.advance([row], length)
    slots = cache.slots(
        torch.arange(num_rows, device=device),
        torch.arange(total, device=device).expand(num_rows, -1),
    )
    cache.write(layers - 1, slots, held_k, held_v)
    return cache, k, v


@dataclass
class BackendCase:
    """One forward of `view.num_new` tokens over rows of a filled cache: parts of prompts, if they
    are many and nothing else is said."""

    view: KVView
    q: Tensor
    k: Tensor  # all tokens of all rows, [B, S, G, D]
    v: Tensor
    is_of_prompt: bool | None = None

    def __post_init__(self) -> None:
        is_prompt = self.view.num_new > 32 if self.is_of_prompt is None else self.is_of_prompt
        self.view = replace(self.view, is_of_prompt=is_prompt)

    def run(self, backend: AttentionBackend, method: str = "run") -> Any:
        """What that method of the backend returns: the output, and what comes with it. The new keys
        and values, which are strided, must be in the cache afterwards."""
        backend.plan(self.view)
        spans = [
            (row, slice(length, length + self.view.num_new))
            for row, length in zip(self.view.rows, self.view.lengths, strict=True)
        ]
        new = torch.stack([torch.stack([x[span] for span in spans]) for x in (self.k, self.v)], 2)
        layer = self.view.cache.shape.num_layers - 1
        result = getattr(backend, method)(layer, self.q, *new.unbind(2), self.view)
        places = torch.tensor(self.view.lengths)[:, None] + torch.arange(self.view.num_new)
        stored = self.read(self.view.rows, places)
        dtype = self.view.cache.k.dtype
        pairs = zip(new.float().unbind(2), stored, (True, False), strict=True)
        for appended, found, are_keys in pairs:
            # Halves of the scale of int8 may be rounded either way.
            half = appended.abs().amax(3, keepdim=True) / 127 / 2 * (dtype == torch.int8)
            given = appended if dtype == torch.int8 else as_stored(appended, dtype, are_keys)
            assert ((found.float() - given).abs() <= half * 1.001).all()
        return result

    def read(
        self, rows: Sequence[int] | None = None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """K and V as the cache stores them, [B, S, G, D]. Of `rows` the
        tokens at `places` [B, S], by default everything, of codes by the definition."""
        cache = self.view.cache
        if rows is None and cache.k.dtype in CODES:
            keys = as_stored(self.k, cache.k.dtype, are_keys=True)
            return keys, as_stored(self.v, cache.k.dtype)
        device = self.k.device
        num_rows, total = self.k.shape[:2]
        rows = range(num_rows) if rows is None else rows
        places = torch.arange(total).expand(num_rows, -1) if places is None else places
        slots = cache.slots(torch.tensor(rows, device=device), places.to(device))
        k, v = cache.read(cache.shape.num_layers - 1, slots)
        return k.transpose(1, 2), v.transpose(1, 2)


def make_case(
    backend: AttentionBackend,
    heads: tuple[int, int, int],
    policy: Visible,
    num_new: int,
    rows: Sequence[int],
    dtype: torch.dtype,
    window: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    committed: Sequence[int] = COMMITTED,
) -> BackendCase:
    """New tokens for `rows` of a cache of `lengths` tokens; heads are (query, KV, size)."""
    cache, k, v = fill(backend, heads[1], heads[2], lengths, dtype)
    view = make_view(cache, rows, policy, num_new, [committed[r] for r in rows], window)
    return BackendCase(view, torch.randn(len(rows), num_new, heads[0], heads[2]).to(k), k, v)
