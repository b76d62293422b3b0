"""A driver in which rank SCARCE_RANK reads next to no free memory. Started by
test_latency_ranks.py: scarce.py selfspec|latency FLAGS."""

import os
import sys

from magicdec.cli.commands import function_of
from magicdec.setup import memory_check as free_memory
from magicdec.setup import prepare

read = free_memory.free_device_memory


def read_or_scarce(kind, local_rank):
    is_scarce = os.environ.get("RANK", "0") == os.environ.get("SCARCE_RANK")
    return 1_000_000 if is_scarce else read(kind, local_rank)


free_memory.free_device_memory = prepare.free_device_memory = read_or_scarce
function_of(sys.argv.pop(1))()
