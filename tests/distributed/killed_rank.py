"""A ring in which rank KILLED_RANK is killed while samples circulate. Started by
test_recurrent.py."""

import os
import signal
import time
from pathlib import Path

from magicdec.cli.serving.recurrent import main
from magicdec.pipeline.stage import Stage

forward = Stage.forward
forwards = 0


def count(self, x, rows, status):
    global forwards
    forwards += 1
    if forwards == 40 and os.environ["RANK"] == os.environ["KILLED_RANK"]:
        Path("killed_at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, x, rows, status)


Stage.forward = count
main()
