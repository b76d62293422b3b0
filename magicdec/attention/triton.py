"""The backend with our own Triton kernels for GPUs, one launch a layer in decoding and
verification.

Keys of the paged cache are split among programs (split-KV), and the last program of a row merges
results by log-sum-exp. Long chunks have enough tiles of queries without splits. Interpreted on a
CPU, for tests.
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
from magicdec.kv.layout import CODED_ON_GPUS, PLAIN, KVLayout
from magicdec.kv.view import KVView

BLOCK_SIZE = 64  # tokens in a KV block: a multiple of the keys of every tile
BLOCK_T = 16  # new tokens that a program of `append` writes
LEAST_SPLIT = 128  # keys; with smaller splits, merging costs more than splitting gains
MOST_SPLITS = 128
MERGED_AT_ONCE = 32  # splits
MOST_WAVES = 4  # splitting further gains little, and the parts of a long chunk take memory
REGISTERS = 65_536  # of a processor, since capability 5.0
SHARED_OVERHEAD = 1024  # bytes of shared memory that the system takes for each program
INTERPRETED_PROGRAMS = 8  # assumed to run at once on a CPU, so that tests split keys as a GPU does
STORAGE = (torch.float32, torch.bfloat16)
# Of codes, by the dtype of a pool.
BITS = {torch.float8_e4m3fn: 8, torch.int8: 8, torch.uint8: 4}
# Sums that four warps hold in registers, beside what they widen from codes of so many bits.
MOST_SUMS = {0: 64 * 128, 8: 32 * 128, 4: 16 * 128}


def missing_parts() -> str | None:
    if find_spec("triton") is not None:
        return None
    return "triton is not installed; pip install triton"


class TritonBackend(AttentionBackend):
    """A backend that stores float32, bfloat16 or codes, which are widened for products, and
    accumulates in float32. Buffers for merging splits, a few megabytes, are not estimated."""

    capabilities = Capabilities(
        "triton",
        missing_parts=missing_parts,
        is_interpreted_on_cpu=True,
        head_sizes=HeadSizes("at most 256", range(1, 257)),
        reads_codes=True,
    )

    @staticmethod
    def load(device: str) -> None:
        """On a CPU, load kernels now: Triton decides about interpretation when first imported."""
        if device == "cpu":
            load_kernels(device)

    def __init__(self, num_splits: int | None = None) -> None:
        """`num_splits`: splits of a row, by default as many as fill the device."""
        self._num_splits = num_splits
        self._kernels: ModuleType | None = None
        self._key_list: Tensor | None = None
        self._counters: Tensor | None = None
        self._capacities: dict[tuple[Any, ...], int] = {}

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def layout(self, dtype: torch.dtype) -> KVLayout:
        return CODED_ON_GPUS.get(dtype, PLAIN)

    def plan(self, view: KVView) -> None:
        if self._kernels is None:
            self._kernels = load_kernels(view.cache.k.device.type)
        # The keys of a full view are the last tokens of a row, which need no list.
        self._key_list = None if view.is_full else list_keys(self._kernels, view)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        return self.run_with_lse(layer, q, k, v, view)[0]

    def run_with_lse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """The output of `run`, and the log-sum-exp of scores, float32 [B,T,H]."""
        return self._attend(self._call(layer, q, k, v, view))

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """Computes weights in a second pass over the keys, from the log-sum-exp."""
        call = self._call(layer, q, k, v, view)
        out, lse = self._attend(call)
        return out, call.mass(lse)

    def _call(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Call:
        assert self._kernels is not None, "plan before run"
        return Call(self._kernels, layer, q, k, v, view, self._key_list, self.layer_sinks(layer))

    def _attend(self, call: Call) -> tuple[Tensor, Tensor]:
        # Allocated before the first capture, since a captured step runs once beforehand.
        if self._counters is None or len(self._counters) < call.num_programs:
            size = next_power(call.num_programs)
            self._counters = torch.zeros(size, dtype=torch.int32, device=call.q.device)
        key = (call.q.dtype, self._key_list is None, *call.tile.values())
        if key not in self._capacities:
            self._capacities[key] = call.capacity(self._counters)
        num_splits = self._num_splits or choose_splits(
            call.num_keys, call.tile["BLOCK_N"], call.num_programs, self._capacities[key]
        )
        return call.attend(num_splits, self._counters)


class Call:
    """The kernel arguments for one layer: q [B,T,H,D] and k, v [B,T,G,D]; `key_list` of
    `list_keys`, None for a full view; `sinks` of `AttentionBackend`."""

    def __init__(
        self,
        kernels: ModuleType,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        view: KVView,
        key_list: Tensor | None,
        sinks: Tensor | None = None,
    ) -> None:
        assert q.dtype in STORAGE and q.shape[3] <= 256, "others are refused before the run"
        for tensor in (q, k, v):
            adjacent = tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
            assert adjacent, "the heads of a token are adjacent"
        self.kernels = kernels
        self.q = q
        self.k = k
        self.v = v
        self.view = view
        self.sinks = sinks
        self.rows, self.num_new, self.num_heads, size = q.shape
        cache = view.cache
        self.ranges = view.layer_ranges(layer).contiguous()
        stored = cache.k.dtype
        # Kernels read FP8 as bytes, since not all GPUs know it.
        read_as = torch.uint8 if stored == torch.float8_e4m3fn else stored
        self.k_pool = cache.k[layer].view(read_as)
        self.v_pool = cache.v[layer].view(read_as)
        self.key_list = None if key_list is None else key_list[:, layer if view.per_head else 0]
        self.num_kv_heads = k.shape[2]
        group = self.num_heads // self.num_kv_heads
        packed = self.num_new * group
        bits = BITS.get(stored, 0)
        block_d = max(32 if bits == 4 else 16, next_power(size))
        is_filled_up = size < block_d
        tile = choose_tile(q.dtype, block_d, packed, bits, is_filled_up, q.device.type == "cpu")
        self.num_tiles = -(-packed // tile["BLOCK_M"])
        self.head: dict[str, Any] = {
            "SIZE": size,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": cache.shape.block_size,
            "BITS": bits,
        }
        assert cache.shape.block_size % tile["BLOCK_N"] == 0, "a tile of keys lies in one block"
        sizes = {"GROUP": group, "BLOCK_R": next_power(self.ranges.shape[2])}
        self.tile: dict[str, Any] = {"WINDOW": view.window or 0} | sizes | tile | self.head

    @property
    def num_programs(self) -> int:
        """The number of programs without splits."""
        return self.rows * self.num_kv_heads * self.num_tiles

    @property
    def num_keys(self) -> int:
        return max(self.view.num_visible) + self.num_new

    def capacity(self, counters: Tensor) -> int:
        _, _, args, options = self._arguments(2, counters)
        return count_resident(self.kernels.attend, args, options, self.q.device)

    def attend(self, num_splits: int, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, and compute output [B,T,H,D] and log-sum-exp, float32 [B,T,H].
        `counters`, int32 [>= num_programs], are zeros before and after."""
        if self.num_tiles > 1:  # otherwise the programs that see new tokens write them
            self._append()
        out, lse, args, options = self._arguments(num_splits, counters)
        programs = (self.rows, self.num_kv_heads * self.num_tiles, num_splits)
        self.kernels.attend[programs](*args, **options)
        return out, lse

    def _append(self) -> None:
        view = self.view
        strides = (*self.k.stride()[:2], *self.v.stride()[:2])
        self.kernels.append[(self.rows, self.num_kv_heads, -(-self.num_new // BLOCK_T))](
            self.k,
            self.v,
            self.k_pool,
            self.v_pool,
            view.cache.block_table,
            view.row_index,
            view.seq_lens,
            self.num_new,
            self.num_kv_heads,
            view.cache.block_table.shape[1],
            *strides,
            BLOCK_T=BLOCK_T,
            **self.head,
        )

    def _arguments(
        self, num_splits: int, counters: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Any, ...], dict[str, Any]]:
        q = self.q
        is_split = num_splits > 1
        appends = self.num_tiles == 1
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        parts = part_lse = slots = positions = None
        list_strides = (0, 0)
        if is_split:
            parts = lse.new_empty(num_splits, *q.shape)
            part_lse = lse.new_empty(num_splits, *q.shape[:3])
        if self.key_list is not None:
            slots, positions = self.key_list
            list_strides = slots.stride(0), slots.stride(1) * (slots.shape[1] > 1)
        args = (
            q,
            self.k,
            self.v,
            self.k_pool,
            self.v_pool,
            *self._addressing(),
            slots,
            positions,
            parts,
            part_lse,
            out,
            lse,
            counters,
            self.sinks,
            *self._sizes(),
            *list_strides,
            *self.k.stride()[:2],
            *self.v.stride()[:2],
        )
        options = {
            "IS_LISTED": slots is not None,
            "IS_SPLIT": is_split,
            "APPENDS": appends,
            "HAS_SINKS": self.sinks is not None,
            "BLOCK_S": MERGED_AT_ONCE,
            "BLOCK_T": next_power(self.num_new) if appends else 1,
        }
        return out, lse, args, options | self.tile

    def mass(self, lse: Tensor) -> Tensor:
        """Attention weights by block, float32 [B, G, num_weight_blocks], from log-sum-exp `lse`
        [B,T,H]."""
        num_blocks = self.view.num_weight_blocks
        shape = (self.rows, self.num_kv_heads, num_blocks)
        mass = torch.empty(shape, dtype=torch.float32, device=self.q.device)
        blocks_a_tile = self.tile["BLOCK_N"] // self.kernels.WEIGHTS_BLOCK.value
        self.kernels.sum_mass[(*shape[:2], -(-num_blocks // blocks_a_tile))](
            self.q,
            self.k_pool,
            *self._addressing(),
            lse,
            mass,
            *self._sizes(),
            num_blocks,
            **self.tile,
        )
        return mass

    def _addressing(self) -> tuple[Tensor, ...]:
        view = self.view
        return view.cache.block_table, view.row_index, view.seq_lens, self.ranges

    def _sizes(self) -> tuple[float, ...]:
        heads_differ = self.ranges.shape[1] > 1
        return (
            self.head["SIZE"] ** -0.5,
            self.num_new,
            self.num_heads,
            self.view.cache.block_table.shape[1],
            *self.q.stride()[:2],
            self.ranges.shape[2],
            self.ranges.stride(0),
            heads_differ * self.ranges.stride(1),
        )


def list_keys(kernels: ModuleType, view: KVView) -> Tensor:
    """Slots in the first KV head, and positions, of each row's keys: int32 [2, L, B, G, N], with
    L = G = 1 if all layers and heads see the same. Unset after a row's last key."""
    ranges = view.all_ranges.contiguous()
    cache = view.cache
    block_n = BLOCK_SIZE
    num_keys = max(view.num_visible) + view.num_new
    shape = (2, *ranges.shape[:3], num_keys)
    key_list = torch.empty(shape, dtype=torch.int32, device=ranges.device)
    num_lists = ranges[..., 0, 0].numel()
    (num_rows, num_heads, num_ranges) = ranges.shape[1:4]
    kernels.list_keys[(num_lists, -(-num_keys // block_n))](
        ranges,
        cache.block_table,
        view.row_index,
        key_list[0],
        key_list[1],
        num_rows,
        num_heads,
        num_ranges,
        num_keys,
        cache.shape.num_kv_heads,
        cache.block_table.shape[1],
        BLOCK_R=next_power(num_ranges),
        BLOCK_N=block_n,
        BLOCK_SIZE=cache.shape.block_size,
    )
    return key_list


def choose_tile(
    dtype: torch.dtype,
    block_d: int,
    num_queries: int,
    bits: int,
    is_filled_up: bool,
    interpreted: bool,
) -> dict[str, int]:
    """Tile sizes, BLOCK_M packed queries and BLOCK_N keys, and compiler options: two tiles fit
    into shared memory and nothing spills, on GPUs since Ampere (tests/oracle/test_triton.py).
    `is_filled_up`: a head has fewer dimensions than a tile.

    With at most 168 registers three programs of four warps fit on a processor. Float32 takes no
    tensor cores, to be exact; its products are unrolled, so larger tiles would compile for
    minutes."""
    block_m = max(16, min(32 if bits == 4 else 64, next_power(num_queries)))
    if interpreted:
        return {"BLOCK_M": block_m, "BLOCK_N": 64, "IN_FLOAT32": True}
    if dtype == torch.float32:
        sizes = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "maxnreg": 255}
        return sizes | {"num_stages": 3, "IN_FLOAT32": False}
    sums = block_m * block_d  # float32, in registers
    is_large = sums > MOST_SUMS[bits]
    is_small = sums <= 32 * 128 and block_m <= (16 if bits else 32) and not is_large
    is_small &= not (bits and is_filled_up)  # which are other addresses to keep
    return {
        "BLOCK_M": block_m,
        # 64 keys at 32 and 64 queries: 0.77 and 0.91 of the time of 32 keys on an H200
        # (docs/log/gpu.md). Several tiles of queries spill with them.
        "BLOCK_N": 16 if block_d > 128 else 64 if num_queries <= 64 else 32,
        "num_warps": 8 if is_large else 4,
        "num_stages": 3,  # the next two loads of keys or values are on their way
        "maxnreg": 168 if is_small else 255,
        "IN_FLOAT32": False,
    }


def choose_splits(num_keys: int, block_n: int, num_programs: int, capacity: int) -> int:
    """The number of splits of a row with the shortest time, equal up to one tile of `block_n`
    keys. The device runs `capacity` programs at once, in waves."""
    most = min(MOST_SPLITS, num_keys // LEAST_SPLIT, MOST_WAVES * capacity // num_programs)

    def time(num_splits: int) -> int:
        tiles = -(-num_keys // (num_splits * block_n))
        return -(-num_programs * num_splits // capacity) * (tiles * block_n + LEAST_SPLIT)

    return min(range(1, max(1, most) + 1), key=time)


def count_resident(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], device: torch.device
) -> int:
    """The number of programs that the device runs at once by registers and shared memory.
    Compiles the kernel."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    compiled = kernel.warmup(*args, grid=(1,), **options)
    assert compiled.run is not None, "now it is loaded, and its registers are known"
    fit = fit_programs(
        compiled.n_regs,
        compiled.metadata.shared,
        options["num_warps"],
        properties.shared_memory_per_multiprocessor,
    )
    return properties.multi_processor_count * fit


def fit_programs(registers: int, shared: int, num_warps: int, processor_shared: int) -> int:
    """The number of programs of `registers` a thread and `shared` bytes that fit on a processor."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps)
    return max(1, min(by_registers, processor_shared // (shared + SHARED_OVERHEAD)))


def load_kernels(device: str) -> ModuleType:
    return build.load_kernels("magicdec.attention.triton_kernels", "--attention triton", device)
