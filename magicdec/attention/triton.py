"""The backend with our own GPU kernels, written in Triton. The query heads of a KV head are packed
together. Keys are read in place from the paged cache; they are split among programs (split-KV), and
the partial results are merged by their log-sum-exp.

Owns how a forward is divided into programs. The same kernel serves prefill, decoding and
verification; a long chunk has enough tiles of queries to fill the GPU, so its keys are not split.
On a CPU the same kernels run in Triton's interpreter, which is correct but far slower and meant for
tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import Capabilities, HeadSizes
from magicdec.kernels import build
from magicdec.kernels.build import next_power
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.view import KVView

BLOCK_SIZE = 64  # tokens in a KV block: a tile of keys lies in one or two blocks
LEAST_SPLIT = 128  # keys; with smaller splits, merging costs more than splitting gains
MOST_SPLITS = 64
INTERPRETED_PROGRAMS = 4  # processors assumed on a CPU, so that tests split keys as a GPU does
STORAGE = (torch.float32, torch.bfloat16)


def missing_parts() -> str | None:
    """A message if Triton is not installed, otherwise None."""
    if find_spec("triton") is not None:
        return None
    return "triton is not installed; pip install triton"


class TritonBackend(AttentionBackend):
    """Stores K and V as float32 or bfloat16 and accumulates in float32. The buffers for merging
    splits take a few megabytes and are not part of the estimate."""

    capabilities = Capabilities(
        "triton",
        missing_parts=missing_parts,
        is_interpreted_on_cpu=True,
        head_sizes=HeadSizes("at most 256", range(1, 257)),
    )

    @staticmethod
    def load(device: str) -> None:
        """On a CPU, load the kernels now: Triton decides to interpret kernels when it is first
        imported."""
        if device == "cpu":
            load_kernels(device)

    def __init__(self, split_keys: int | None = None) -> None:
        """`split_keys` is the number of keys in a split. By default it is chosen so that the splits
        fill the device."""
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
        """Return the output of `run`, and the log-sum-exp of the scores, float32 [B,T,H]."""
        assert self._kernels is not None, "plan before run"
        call = Call(self._kernels, layer, q, k.shape[2], view)
        call.append(k, v)
        num_keys = max(view.num_visible) + view.num_new
        size = self._split_keys or choose_split(num_keys, call.num_programs, call.num_processors)
        return call.attend(size, -(-num_keys // size))

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """Computes the weights in a second pass over the keys, from the log-sum-exp of the
        first."""
        assert self._kernels is not None, "plan before run"
        out, lse = self.run_with_lse(layer, q, k, v, view)
        return out, Call(self._kernels, layer, q, k.shape[2], view).mass(lse)


class Call:
    """The kernel arguments for one layer of one forward: q [B,T,H,D] over `num_kv_heads` KV
    heads."""

    def __init__(
        self, kernels: ModuleType, layer: int, q: Tensor, num_kv_heads: int, view: KVView
    ) -> None:
        assert q.dtype in STORAGE and q.shape[3] <= 256, "others are refused before the run"
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
        """The number of programs if the keys are not split."""
        return self.rows * self.num_kv_heads * self.num_tiles

    @property
    def starts_at_0(self) -> bool:
        """Whether every row sees all of its tokens, so that the i-th visible key has position i."""
        return self.view.is_full and not any(self.view.first_keys)

    @property
    def num_processors(self) -> int:
        if self.q.device.type != "cuda":
            return INTERPRETED_PROGRAMS
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write k, v [B,T,G,D] to the pools, after the tokens that the rows already hold."""
        _check_heads(k, v)
        table = self.view.cache.block_table
        self.kernels.append[(self.rows, self.num_new)](
            k, v, self.k_pool, self.v_pool, table, self.view.row_index, self.view.seq_lens,
            self.num_kv_heads, table.shape[1], *k.stride()[:2], *v.stride()[:2],
            BLOCK_G=next_power(self.num_kv_heads), BLOCK_SIZE=self.tile["BLOCK_SIZE"], **self.head,
        )  # fmt: skip

    def attend(self, split_keys: int, num_splits: int) -> tuple[Tensor, Tensor]:
        """Compute the output [B,T,H,D] and the log-sum-exp, float32 [B,T,H], with `num_splits`
        splits of `split_keys` keys each."""
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
        """Attention weights summed by block, float32 [B, G, num_weight_blocks], for queries whose
        log-sum-exp is `lse` [B,T,H]."""
        num_blocks = self.view.num_weight_blocks
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
        """The scale of the scores, and the sizes and strides that both `attend_split` and
        `sum_mass` take."""
        heads_differ = self.ranges.shape[1] > 1
        return (
            self.head["SIZE"] ** -0.5, self.num_new, self.num_heads,
            self.view.cache.block_table.shape[1], *self.q.stride()[:2],
            self.ranges.shape[2], self.ranges.stride(0), heads_differ * self.ranges.stride(1),
        )  # fmt: skip


def choose_tile(dtype: torch.dtype, block_d: int, interpreted: bool) -> tuple[int, int, int]:
    """The size of a tile: (most packed queries, keys, warps). These are the largest sizes that the
    compiler fits into registers without spilling, on GPUs since Ampere. Float32 is multiplied
    without tensor cores, to be exact. The compiler unrolls these products, so larger tiles would
    take minutes to compile."""
    if interpreted:
        return 64, 64, 1
    if dtype == torch.float32:
        return 16, 16, 8
    return (64, 64, 4) if block_d <= 128 else (64, 32, 8)


def choose_split(num_keys: int, num_programs: int, num_processors: int) -> int:
    """The number of keys in a split, a power of two: small enough that each processor gets two
    programs, but large enough that merging costs little. `num_programs` is the number of programs
    without splitting."""
    num_splits = min(MOST_SPLITS, -(-2 * num_processors // num_programs))
    return max(LEAST_SPLIT, next_power(-(-num_keys // num_splits)))


def load_kernels(device: str) -> ModuleType:
    """The kernels, which are compiled on CUDA and interpreted on a CPU."""
    return build.load_kernels("magicdec.attention.triton_kernels", "--attention triton", device)


def _check_heads(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3], "heads not adjacent"
