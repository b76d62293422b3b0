"""A rank's device: which one it is, when its work is done, and its unused memory. On a CPU work is
done when a call returns.

Must not know what is computed. Written for CUDA, and run on CPUs only so far.
"""

from __future__ import annotations

import gc

import torch


def device_of(kind: str, local_rank: int) -> torch.device:
    """`kind` is cpu or cuda. Ranks of a host that has fewer GPUs share them in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, torch.cuda.device_count()))


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has computed what this thread started. It does not wait for messages
    that other streams send: their receiver may be waiting for this rank."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def use_device(device: torch.device) -> None:
    """Let this thread's kernels run on `device`. Every thread has a current device of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def release_memory(device: torch.device) -> None:
    """Free models that are parts of reference cycles, and give the unused memory of a GPU back,
    which other ranks on it may need."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
