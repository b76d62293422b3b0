"""Pipelined speculation in which rank KILLED_RANK is killed while runs are in flight. Started by
test_speculation_ranks.py."""

import os
import signal

from magicdec.cli.serving.pipeline import main
from magicdec.pipelined_run.stage import ModelPart

compute = ModelPart.compute
runs = 0


def count(self, *args):
    global runs
    runs += 1
    if runs == 20 and os.environ["RANK"] == os.environ["KILLED_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(self, *args)


ModelPart.compute = count
main()
