"""A selfspec run in which one rank raises (BROKEN_RANK) after a few steps, and rank 0 can be told
to say when decoding has begun. Started by test_failures.py."""

import os
import signal
import sys

from magicdec.cli.commands import selfspec
from magicdec.decoding.speculative import Speculative

decode_step = Speculative.step
steps = 0


def step(self, batch):
    global steps
    steps += 1
    if steps == 3:
        print("DECODING", file=sys.stderr, flush=True)
        if os.environ["RANK"] == os.environ.get("BROKEN_RANK"):
            raise RuntimeError("this rank broke")
    return decode_step(self, batch)


# A test run in the background of a shell is born ignoring interrupts, and so are its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
Speculative.step = step
selfspec()
