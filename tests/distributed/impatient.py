"""`magicdec` that waits half as long for a host which is not heard of. Rank 1 adds the words of
RANK_1_WORDS to its command line, and has the version RANK_1_VERSION. Started by test_hosts.py."""

import os
import sys

from magicdec.cli.commands import console
from magicdec.distributed.watching import watch
from magicdec.setup import prepare

watch.PATIENCE_S /= 2
if os.environ["RANK"] == "1":
    sys.argv += os.environ.get("RANK_1_WORDS", "").split()
    if other := os.environ.get("RANK_1_VERSION"):
        prepare.version = lambda name: other
console()
