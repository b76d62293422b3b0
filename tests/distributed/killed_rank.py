"""A command in which rank KILLED_RANK is killed while it serves. Started by test_recurrent.py and
test_speculation_ranks.py with the command's name and flags."""

import os
import signal
import sys
import time
from pathlib import Path

from magicdec.cli.serving import pipeline, recurrent
from magicdec.pipeline.stage import Stage
from magicdec.pipelined_run.draft_model import ModelDrafter
from magicdec.pipelined_run.stage import ModelPart

COMMANDS = {  # what runs, and the method in whose n-th call the rank is killed
    "recurrent": (recurrent.main, Stage, "forward", 40),
    "pipeline": (pipeline.main, ModelPart, "compute", 20),
    "drafts": (pipeline.main, ModelDrafter, "propose", 8),
}
main, owner, name, last = COMMANDS[sys.argv.pop(1)]
method = getattr(owner, name)
calls = 0


def count(*args):
    global calls
    calls += 1
    if calls == last and os.environ["RANK"] == os.environ["KILLED_RANK"]:
        Path("killed_at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return method(*args)


setattr(owner, name, count)
main()
