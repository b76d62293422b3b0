"""`magicdec sweep` whose bandwidth is measured over little memory, which is fast and wrong. With
KILL_AT=N the process is killed in the middle of writing the records of its Nth run; with
INTERRUPT_AT=N, Ctrl-C comes before that. Started by test_sweep.py."""

import os
import signal
import sys

from magicdec.bench.study import sweep
from magicdec.cli.sweep import main
from magicdec.hardware import timing
from magicdec.records import record as module

timing.BANDWIDTH_BYTES = 1 << 20
kill_at, interrupt_at = (int(os.environ.get(name, 0)) for name in ("KILL_AT", "INTERRUPT_AT"))
written = 0


def append_together(path, records):
    global written
    written += 1
    if written == kill_at:
        lines = "\n".join(record.to_json() for record in records)
        with path.open("a") as file:
            file.write(lines[: len(lines) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    if written == interrupt_at:
        raise KeyboardInterrupt
    module.append_together(path, records)


sweep.append_together = append_together
if __name__ == "__main__":
    sys.exit(main())
