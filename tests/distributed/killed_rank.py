"""A command in which rank KILLED_RANK is killed; KILLED_IN is the command's name and a phase of it.
Started by test_killed_ranks.py with its flags."""

import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from magicdec.cli.commands import start

# Where the rank is killed: a function or a method, and in which of its calls. While serving, the
# others go on meanwhile; in the phases before, they have the time to wait for the rank.
PHASES = {
    "preparing": ("magicdec.setup.memory_check", "first_refusal", 1),
    "timing": ("magicdec.systems.mdi_llm.timing", "time_passing", 3),
    "timing runs": ("magicdec.systems.pipeinfer.system", "time_part", 1),
    "starting": ("torch.distributed", "init_process_group", 1),
    "grouping": ("torch.distributed", "new_group", 1),
    "loading": ("magicdec.setup.loading", "LoadedModels.get", 1),
    "connecting": ("magicdec.distributed.channels.carriers", "map_segment", 2),
    "connecting through gloo": ("torch.distributed", "new_group", 2),
    "serving": ("magicdec.systems.mdi_llm.ring_stage", "Stage.forward", 40),
    "serving runs": ("magicdec.systems.pipeinfer.run_stage", "RunStage.compute", 20),
    "serving drafts": ("magicdec.systems.pipeinfer.path_drafter", "ModelPathDrafter.propose", 8),
    "closing": ("magicdec.distributed.start", "leave_ranks", 1),
}
WAIT_S = 0.4
command, phase = os.environ["KILLED_IN"].split(": ")
module, path, last = PHASES[phase]
*owners, name = path.split(".")
owner: Any = import_module(module)
for attribute in owners:
    owner = getattr(owner, attribute)
function = getattr(owner, name)
calls = 0


def count(*args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    if calls == last and os.environ.get("RANK") == os.environ["KILLED_RANK"]:
        if not phase.startswith("serving"):
            time.sleep(WAIT_S)
        Path("killed_at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)


setattr(owner, name, count)
start(command)
