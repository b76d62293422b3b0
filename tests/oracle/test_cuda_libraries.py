"""The backends of libraries that need a GPU, over stand-ins (`cuda_libraries.py`): what is handed
to them is what the contract asks for. That the libraries do what they document is a matter for a
machine that has them: there the contract's own tests run."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from conftest import tiny_transformer
from cuda_libraries import flash_attn_2, flash_attn_3
from lossless import speculate
from test_attention import BACKENDS, DTYPES, POLICIES, Scattered
from test_attention import test_a_forward_sees_neither_the_future_nor_another_row as sees_no_other
from test_attention import test_backend_equals_attention_written_out as equals_written_out
from test_attention import test_every_head_reads_its_own_ranges as reads_its_own_ranges
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.flash_attn import FlashAttnBackend
from magicdec.attention.flash_attn import missing_parts as flash_attn_missing
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.capabilities import capabilities_of, list_backends
from magicdec.config.sections import KVSection
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import KVView, Visible, make_view
from magicdec.speculation.policies.policy import FullKV
from magicdec.speculation.policies.streaming_llm import StreamingLLM

pytestmark = pytest.mark.wide

HEADS = [(4, 4, 64), (6, 2, 16), (8, 1, 128)]
LIBRARIES = ["flash_attn 2", "flash_attn 3"]


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the stand-in where its library would be; returns the backend's name."""
    make = {"flash_attn 2": flash_attn_2, "flash_attn 3": flash_attn_3}
    module = make[name]()
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return name.split()[0]


@pytest.fixture(params=LIBRARIES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return install(request.param, monkeypatch)


def filled_view(policy: Visible, block: int = 24) -> KVView:
    """Three new tokens over two rows of random keys, two layers, in blocks of `block`."""
    torch.manual_seed(0)
    cache = KVCache(CacheShape(2, 2, 16, block, 12), 2, 6, torch.float32, torch.device("cpu"))
    cache.k.normal_(), cache.v.normal_()
    for row, length in enumerate((70, 31)):
        cache.allocate(row, 80)
        cache.advance([row], length)
    return make_view(cache, [1, 0], policy, 3)


def check_equal(
    backend: AttentionBackend, view: KVView, exact: KVView
) -> tuple[AttentionBackend, list[Tensor]]:
    """Layer by layer, `backend` over `view` computes what SDPA does over `exact`. Returns the
    latter, and the inputs."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, heads, 16) for heads in (4, 2, 2)]
    plain = SDPABackend(view.cache.shape.block_size)
    backend.plan(view), plain.plan(exact)
    for layer in (0, 1, 0):
        out = backend.run(layer, *inputs, view)
        expected = plain.run(layer, *inputs, exact)
        assert (out - expected).abs().max() < 1e-5, layer
    return plain, inputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins compute on the CPU")
class TestContract:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("policy", POLICIES, ids=repr)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    @pytest.mark.narrow("pairs")
    def test_backend_equals_attention_written_out(
        self, backend: str, heads: tuple[int, int, int], policy: object, dtype: torch.dtype
    ) -> None:
        equals_written_out(backend, heads, policy, dtype)

    def test_a_forward_sees_neither_the_future_nor_another_row(self, backend: str) -> None:
        sees_no_other(backend)

    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_every_head_reads_its_own_ranges(
        self, backend: str, heads: tuple[int, int, int]
    ) -> None:
        reads_its_own_ranges(backend, heads, torch.float32)

    @pytest.mark.parametrize(
        "policy", [FullKV(), StreamingLLM(4, 11), Scattered(kv_heads=2, share=0.4)], ids=repr
    )
    def test_every_layer_reads_its_own_ranges_of_blocks_of_another_size(
        self, backend: str, policy: Visible
    ) -> None:
        """A rolling cache chooses its own size."""
        view = filled_view(policy)
        check_equal(BACKENDS[backend](), view, view)

    @pytest.mark.parametrize(
        "kv", [KVSection("streaming_llm", 17, 4), KVSection("snapkv", 20, window_size=3)]
    )
    def test_speculation_emits_the_baseline_tokens(self, backend: str, kv: KVSection) -> None:
        sizes = {"lengths": [5, 300], "num_new": 20}  # 300: two blocks of flash-attn
        ours, plain = (
            speculate(tiny_transformer(), kv, 3, backend=build, **sizes)
            for build in (BACKENDS[backend], SDPABackend)
        )
        assert ours.tokens == plain.tokens


READ_ON_DEVICE = ["sdpa", "triton", "flash_attn 2", "flash_attn 3"]


def test_every_backend_that_may_be_recorded_is_tried_with_bounds() -> None:
    names = {name.split()[0] for name in READ_ON_DEVICE}
    assert names == set(list_backends(lambda c: c.can_be_recorded))


@pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins compute on the CPU")
@pytest.mark.parametrize("block", [24, 256])  # 256: read in place, by each
@pytest.mark.parametrize("policy", [FullKV(), StreamingLLM(4, 50), Scattered(2, 0.4)], ids=repr)
@pytest.mark.parametrize("name", READ_ON_DEVICE)
def test_lengths_on_the_host_may_be_bounds(
    name: str, policy: Visible, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device holds decides, whatever larger numbers the host has."""
    if name == "triton":
        pytest.importorskip("triton")
        block = max(block, TritonBackend().block_size(block))  # a tile of keys lies in one block
    backend = install(name, monkeypatch) if " " in name else name
    view = filled_view(policy, block)
    lengths, num_visible = (
        (short + 40, long + 20) for short, long in (view.lengths, view.num_visible)
    )
    loose = replace(view, lengths=lengths, num_visible=num_visible)
    assert loose.is_full == view.is_full
    built = BACKENDS.get(backend, SDPABackend)()
    expected, inputs = check_equal(built, loose, view)
    if not capabilities_of(backend).returns_weights:
        return
    _, mass = built.run_with_weights(1, *inputs, loose)
    _, exact = expected.run_with_weights(1, *inputs, view)
    num_blocks = exact.shape[2]
    assert (mass[..., :num_blocks] - exact).abs().max() < 1e-4
    assert mass.shape[2] > num_blocks and not mass[..., num_blocks:].any()


def test_a_full_view_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is copied: what the library is given shares the cache's memory."""
    given: dict[str, Tensor] = {}

    def spy(q: Tensor, k: Tensor, *others: object, **named: object) -> Tensor:
        given["k"] = k
        return q

    install("flash_attn 2", monkeypatch)
    backend = FlashAttnBackend()
    monkeypatch.setattr(backend, "_attend", spy)
    block = backend.block_size(600)
    per_row = -(-600 // block)
    shape = CacheShape(1, 2, 16, block, 2 * per_row)
    cache = KVCache(shape, 2, per_row, torch.float32, torch.device("cpu"))
    for row in range(2):
        cache.allocate(row, 600)
    view = make_view(cache, [1, 0], FullKV(), 2)
    backend.plan(view)
    backend.run(0, torch.zeros(2, 2, 4, 16), *[torch.zeros(2, 2, 2, 16)] * 2, view)
    assert given["k"].untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()


def test_version_3_of_flash_attn_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash_attn 2", monkeypatch)
    assert FlashAttnBackend()._table_name == "block_table"
    install("flash_attn 3", monkeypatch)
    assert FlashAttnBackend()._table_name == "page_table"


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    assert flash_attn_missing() == (
        "flash-attn is not installed; pip install flash-attn (it is built with nvcc)"
    )
    assert list_backends(lambda c: "cpu" not in c.devices) == ["flash_attn"]
    with pytest.raises(ValueError, match="--attention flash_attn: "):
        FlashAttnBackend()


@pytest.mark.parametrize("is_imported", [False, True])
def test_version_4_of_flash_attn_alone_is_refused(
    is_imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves a folder `flash_attn` without a file of its own; version 2 brings that file."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if is_imported:
        monkeypatch.setitem(sys.modules, "flash_attn", importlib.import_module("flash_attn"))
    with pytest.raises(ValueError, match=r"--attention flash_attn: flash-attn 4 alone has no "):
        FlashAttnBackend()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert flash_attn_missing() is None
