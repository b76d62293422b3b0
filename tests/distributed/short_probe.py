"""`magicdec probe` with short contexts, small messages and few rounds. Started by
test_probe_ranks.py."""

from magicdec.cli.probe import main
from magicdec.probe import ceilings

ceilings.STRETCHES, ceilings.ROUNDS, ceilings.CONTEXT = 1, 2, 64
ceilings.LARGE_BYTES = 1 << 16
main()
