"""Stage `broken` of `quick`: what does not work at all on this machine. Imports, one layer of
attention of each backend against torch's attention in float64 on the CPU, eager and replayed from
a CUDA graph, and one forward of the demo model against the CPU's in float32. The first call of a
Triton kernel compiles it; its seconds are kept. Last, the time of a layer's attention at one place,
as the stage `attention` measures it at all of them."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import magicdec
from gpu.attention import DTYPE, filled_cache, prepare_call, stored_by, time_backend
from gpu.device_clock import copy_bandwidth
from gpu.scale import Heads, Suite, obstacle_of
from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import capabilities_of
from magicdec.distributed.groups import Group
from magicdec.kv.cache import KVCache
from magicdec.model.checkpoint.source import find_model
from magicdec.output.console import make_progress
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.setup.loading import load_model, make_backend
from magicdec.setup.model_plan import Kinds
from magicdec.speculation.steps.recorder import CudaGraphs

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest difference of attention's outputs
LOGITS = 1e-3  # the same of a forward's logits in float32, as a share of the largest logit
GROUP = Group((0,), 0)
ROWS = 2
LENGTH = 300
NUM_NEW = 5
ENTRIES = ("__init__", "__main__")


def run(suite: Suite) -> None:
    cell = suite.results.cell
    cell("imports", import_all)
    copied = suite.scale.copied_bytes
    cell("copy_bandwidth", lambda: {"bytes_per_s": copy_bandwidth(suite.device, copied)})
    left_out: dict[str, str] = {}  # what is not there, or not for such numbers, is no failure
    for dtype in (torch.bfloat16, torch.float32):
        for backend in suite.scale.backends:
            for heads in suite.scale.heads.values():
                name = f"attention/{backend}/{str(dtype)[6:]}/{heads.H}:{heads.G}x{heads.D}"
                if (why := obstacle_of(backend, suite.device, heads.D, str(dtype)[6:])) is not None:
                    left_out[name] = why
                    continue
                kinds = stored_by(backend) if dtype == DTYPE else {"": dtype}
                for kind, stored in kinds.items():
                    check = partial(check_attention, suite, backend, heads, dtype, stored)
                    cell(f"{name}{kind}", check)
    size = find_model("--model", "demo").config.cached_head_dim
    for backend in suite.scale.backends:
        if (why := obstacle_of(backend, suite.device, size, "float32")) is not None:
            left_out[f"forward/{backend}"] = why
            continue
        cell(f"forward/{backend}", partial(check_forward, suite, backend))
    place = suite.scale.places[0]
    model, heads = next(iter(suite.scale.heads.items()))
    for backend in suite.scale.backends:
        if obstacle_of(backend, suite.device, heads.D, "bfloat16") is not None:
            continue
        for kind, stored in stored_by(backend).items():
            cell(
                f"{model}/B{place[0]}/S{place[1]}/{backend}{kind}",
                partial(time_backend, suite, backend, heads, *place, stored),
            )
    cell("left out", lambda: left_out)


def import_all() -> dict[str, Any]:
    """The number of modules of the package that can be imported. Raises RuntimeError with the name
    and the error of each that cannot."""
    failed = []
    root = Path(magicdec.__file__).parent
    # `pkgutil` does not go into folders without an `__init__.py`, as ours are.
    paths = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
    modules = [".".join(path.parts) for path in paths if path.name not in ENTRIES]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a missing package raises anything
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))
    return {"modules": len(modules)}


def check_attention(
    suite: Suite, name: str, heads: Heads, dtype: torch.dtype, stored: torch.dtype
) -> dict[str, float]:
    """The largest difference from attention in float64 over a cache in the dtype `stored`, and
    seconds of the first call and the second. Raises RuntimeError if the difference is too large."""
    backend = make_backend(name)
    cache = filled_cache(backend, heads, ROWS, LENGTH, NUM_NEW, suite.device, 1, stored)
    call, _, q = prepare_call(backend, cache, heads, ROWS, NUM_NEW, dtype)
    started = time.perf_counter()
    out = call().cpu()
    first = time.perf_counter() - started
    out = call().cpu()
    second = time.perf_counter() - started - first
    difference = (out.double() - exact(cache, q)).abs().max().item()
    found = {"difference": difference, "first_call_s": first, "second_call_s": second}
    if not difference <= BOUNDS[dtype]:
        raise RuntimeError(f"differs from float64 by {difference:.3g}: {found}")
    if suite.device.type == "cuda" and capabilities_of(name).can_be_recorded:
        replayed = CudaGraphs(suite.device).record(call)().cpu()
        found["replayed_difference"] = (replayed - out).abs().max().item()
        if not torch.equal(replayed, out):
            raise RuntimeError(f"a replayed graph computes something else: {found}")
    return found


def exact(cache: KVCache, q: Tensor) -> Tensor:
    """Causal attention of q [B, T, H, D] over the cache's tokens, of which the newest T are new, in
    float64 on the CPU."""
    B, T = q.shape[:2]
    positions = torch.arange(LENGTH + T)
    rows = torch.arange(B, device=q.device)
    slots = cache.slots(rows, positions.to(q.device).expand(B, -1))
    k, v = (x.cpu().double() for x in cache.read(0, slots))  # [B, G, S, D]
    is_seen = positions <= positions[-T:, None]  # [T, S]
    heads = q.cpu().double().transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, k, v, attn_mask=is_seen, enable_gqa=True)
    return out.transpose(1, 2)


def check_forward(suite: Suite, backend: str) -> dict[str, float]:
    """The largest difference of the demo model's logits from the CPU's. Raises RuntimeError if it
    is too large."""
    expected = logits(torch.device("cpu"), make_backend("grouped"), "torch")
    started = time.perf_counter()
    elementwise = "triton" if backend == "triton" else "torch"
    found = logits(suite.device, make_backend(backend), elementwise)
    seconds = time.perf_counter() - started
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= LOGITS:
        raise RuntimeError(f"logits differ from the CPU's by {difference:.3g} of the largest")
    return {"difference": difference, "seconds": seconds}


def logits(device: torch.device, backend: AttentionBackend, elementwise: str) -> Tensor:
    """Logits [B, T, V] on the CPU of a verification of T tokens after a short prompt."""
    source = find_model("--model", "demo")
    kinds = Kinds("float32", "float32", "torch", elementwise)
    model = load_model(source, GROUP, kinds, device, make_progress(False))
    runner = ModelRunner(model, backend, GROUP, ROWS, LENGTH + NUM_NEW)
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, LENGTH + NUM_NEW)
    ids = torch.randint(3, source.config.vocab_size, shape, generator=generator).to(device)
    for row in range(ROWS):
        runner.allocate(row)
    runner.forward(ForwardBatch(ids[:, :LENGTH], range(ROWS)))
    return runner.forward(ForwardBatch(ids[:, LENGTH:], range(ROWS))).float().cpu()
