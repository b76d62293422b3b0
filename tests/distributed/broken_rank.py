"""A selfspec run in which rank BROKEN_RANK raises after a few steps. Without a BROKEN_RANK the run
says that it decodes, and waits for a signal. Started by test_failures.py."""

import os
import signal
import sys

from magicdec.cli.drivers import selfspec
from magicdec.speculation.steps.speculative import Speculative

decode_step = Speculative.step
steps = 0


def step(self, batch):
    global steps
    steps += 1
    if steps == 3:
        if "BROKEN_RANK" not in os.environ:
            print("DECODING", file=sys.stderr, flush=True)
            signal.pause()
        if os.environ["RANK"] == os.environ["BROKEN_RANK"]:
            raise RuntimeError("this rank broke")
    return decode_step(self, batch)


# A test run in the background of a shell is born ignoring interrupts, and so are its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
Speculative.step = step
selfspec()
