"""Our own kernels for GPUs, in Triton: query heads of a KV head packed together, keys read in place
from the paged cache in splits that are merged by their log-sum-exp.

Owns how a forward is cut into programs. Prefill, decoding and verification are the same kernel; a
long chunk has enough tiles of queries and is not split. On a CPU the same kernels run in Triton's
interpreter: right, and far slower, for tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import Capabilities, HeadSizes
from magicdec.kernels import triton_modules
from magicdec.kernels.triton_modules import next_power
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.view import KVView

BLOCK_SIZE = 64  # tokens of a KV block: a tile of keys lies in one or two
LEAST_SPLIT = 128  # keys: below, merging costs more than it brings
MOST_SPLITS = 64
INTERPRETED_PROGRAMS = 4  # that a CPU is asked for at least, so that tests split as a GPU does
STORAGE = (torch.float32, torch.bfloat16)


def missing_parts() -> str | None:
    """What is not installed, if anything."""
    if find_spec("triton") is not None:
        return None
    return "triton is not installed; pip install triton"


class TritonBackend(AttentionBackend):
    """float32 and bfloat16 storage, float32 accumulation. What merging splits allocates is a few
    megabytes and not estimated."""

    capabilities = Capabilities(
        "triton",
        missing_parts=missing_parts,
        is_interpreted_on_cpu=True,
        head_sizes=HeadSizes("at most 256", range(1, 257)),
    )

    @staticmethod
    def load(device: str) -> None:
        """Where the kernels are to be interpreted, Triton must be told so when it is first
        imported."""
        if device == "cpu":
            load_kernels(device)

    def __init__(self, split_keys: int | None = None) -> None:
        """`split_keys` is how many keys a split takes; default: as the device is filled."""
        self._split_keys = split_keys
        self._kernels: ModuleType | None = None

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def layout(self, dtype: torch.dtype) -> Layout:
        return PLAIN

    def plan(self, view: KVView) -> None:
        if self._kernels is None:
            self._kernels = load_kernels(view.cache.k.device.type)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        return self.run_with_lse(layer, q, k, v, view)[0]

    def run_with_lse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the log of each softmax's denominator, float32 [B,T,H]."""
        assert self._kernels is not None, "plan before run"
        call = Call(self._kernels, layer, q, k.shape[2], view)
        call.append(k, v)
        num_keys = max(view.num_visible) + view.num_new
        size = self._split_keys or choose_split(num_keys, call.num_programs, call.num_processors)
        return call.attend(size, -(-num_keys // size))

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """A second pass over the keys alone, with the log-sum-exp of the first."""
        assert self._kernels is not None, "plan before run"
        out, lse = self.run_with_lse(layer, q, k, v, view)
        return out, Call(self._kernels, layer, q, k.shape[2], view).mass(lse)


class Call:
    """One layer of one forward as kernel arguments: q [B,T,H,D] over `num_kv_heads` KV heads."""

    def __init__(
        self, kernels: ModuleType, layer: int, q: Tensor, num_kv_heads: int, view: KVView
    ) -> None:
        assert q.dtype in STORAGE and q.shape[3] <= 256, "refused before the run"
        _check_heads(q)
        self.kernels, self.q, self.view, self.num_kv_heads = kernels, q, view, num_kv_heads
        self.rows, self.num_new, self.num_heads, size = q.shape
        cache, self.ranges = view.cache, view.layer_ranges(layer).contiguous()
        self.k_pool, self.v_pool = cache.k[layer], cache.v[layer]
        group = self.num_heads // num_kv_heads
        packed, block_d = self.num_new * group, max(16, next_power(size))
        interpreted = q.device.type == "cpu"
        most_queries, block_n, num_warps = choose_tile(q.dtype, block_d, interpreted)
        block_m = max(16, min(most_queries, next_power(packed)))
        self.num_tiles = -(-packed // block_m)
        self.head: dict[str, Any] = {"SIZE": size, "BLOCK_D": block_d}
        self.tile: dict[str, Any] = {
            "WINDOW": view.window or 0,
            "GROUP": group,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_SIZE": cache.shape.block_size,
            "IN_FLOAT32": interpreted,
            "num_warps": num_warps,
            "num_stages": 3,
        } | self.head

    @property
    def num_programs(self) -> int:
        """Programs of a forward that is not split."""
        return self.rows * self.num_kv_heads * self.num_tiles

    @property
    def starts_at_0(self) -> bool:
        """Rows see all they hold: the i-th visible key stands at position i."""
        return self.view.is_full and not any(self.view.first_keys)

    @property
    def num_processors(self) -> int:
        if self.q.device.type != "cuda":
            return INTERPRETED_PROGRAMS
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v [B,T,G,D] to the pools, after what the rows hold."""
        _check_heads(k, v)
        table = self.view.cache.block_table
        self.kernels.append[(self.rows, self.num_new)](
            k, v, self.k_pool, self.v_pool, table, self.view.row_index, self.view.seq_lens,
            self.num_kv_heads, table.shape[1], *k.stride()[:2], *v.stride()[:2],
            BLOCK_G=next_power(self.num_kv_heads), BLOCK_SIZE=self.tile["BLOCK_SIZE"], **self.head,
        )  # fmt: skip

    def attend(self, split_keys: int, num_splits: int) -> tuple[Tensor, Tensor]:
        """Output [B,T,H,D] and log-sum-exp, float32 [B,T,H], from so many splits of so many
        keys."""
        shape, device = (num_splits, *self.q.shape), self.q.device
        dtype = self.q.dtype if num_splits == 1 else torch.float32
        parts = torch.empty(shape, dtype=dtype, device=device)
        part_lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        programs = (self.rows, self.num_kv_heads * self.num_tiles, num_splits)
        self.kernels.attend_split[programs](
            self.q, self.k_pool, self.v_pool, *self._addressing(), parts, part_lse,
            *self._sizes(), split_keys, IS_FULL=self.starts_at_0, **self.tile,
        )  # fmt: skip
        if num_splits == 1:
            return parts[0], part_lse[0]
        out, lse = torch.empty_like(parts[0], dtype=self.q.dtype), torch.empty_like(part_lse[0])
        self.kernels.merge_splits[(lse.numel(),)](
            parts, part_lse, out, lse, num_splits, lse.numel(),
            BLOCK_S=next_power(num_splits), **self.head,
        )  # fmt: skip
        return out, lse

    def mass(self, lse: Tensor) -> Tensor:
        """Float32 [B, G, num_mass_blocks], of queries whose log-sum-exp is `lse` [B,T,H]."""
        num_blocks = self.view.num_mass_blocks
        shape = (self.rows, self.num_kv_heads, num_blocks)
        mass = torch.empty(shape, dtype=torch.float32, device=self.q.device)
        blocks_a_tile = self.tile["BLOCK_N"] // self.kernels.WEIGHTS_BLOCK.value
        self.kernels.sum_mass[(*shape[:2], -(-num_blocks // blocks_a_tile))](
            self.q, self.k_pool, *self._addressing(), lse, mass,
            *self._sizes(), num_blocks, **self.tile,
        )  # fmt: skip
        return mass

    def _addressing(self) -> tuple[Tensor, ...]:
        view = self.view
        return view.cache.block_table, view.row_index, view.seq_lens, self.ranges

    def _sizes(self) -> tuple[float, ...]:
        """Scale and the sizes and strides that `attend_split` and `sum_mass` share."""
        heads_differ = self.ranges.shape[1] > 1
        return (
            self.head["SIZE"] ** -0.5, self.num_new, self.num_heads,
            self.view.cache.block_table.shape[1], *self.q.stride()[:2],
            self.ranges.shape[2], self.ranges.stride(0), heads_differ * self.ranges.stride(1),
        )  # fmt: skip


def choose_tile(dtype: torch.dtype, block_d: int, interpreted: bool) -> tuple[int, int, int]:
    """(most packed queries, keys, warps) of a tile: what the compiler fits into registers without
    spilling, for GPUs since Ampere. Float32 is multiplied without tensor cores, to be exact: its
    products are written out, and larger tiles would take minutes to compile."""
    if interpreted:
        return 64, 64, 1
    if dtype == torch.float32:
        return 16, 16, 8
    return (64, 64, 4) if block_d <= 128 else (64, 32, 8)


def choose_split(num_keys: int, num_programs: int, num_processors: int) -> int:
    """Keys a split: a power of two, so few that two programs come to each processor, and not so
    few that merging counts. `num_programs` is what there is without splitting."""
    wanted = min(MOST_SPLITS, -(-2 * num_processors // num_programs))
    return max(LEAST_SPLIT, next_power(-(-num_keys // wanted)))


def load_kernels(device: str) -> ModuleType:
    """Compiled on CUDA, interpreted on a CPU."""
    return triton_modules.load_kernels(
        "magicdec.attention.triton_kernels", "--attention triton", device
    )


def _check_heads(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3], "heads are adjacent"
