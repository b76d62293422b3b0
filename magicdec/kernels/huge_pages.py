"""Large pages for memory that kernels read front to back: the KV cache and packed weights."""

import ctypes
import mmap
import sys

from torch import Tensor

MADV_HUGEPAGE = 14  # linux/mman.h


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back a fresh CPU tensor with 2 MiB pages: reading it front to back then misses
    the TLB, and stops the hardware prefetcher, 512 times less often. It is no
    error if the system refuses."""
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // page * page
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)
