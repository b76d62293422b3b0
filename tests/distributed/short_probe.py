"""`magicdec probe` with short contexts, small messages and few rounds. Started by
test_latency_ranks.py."""

from magicdec.cli.probe import main
from magicdec.predict import probe

probe.STRETCHES = 1
probe.ROUNDS = 2
probe.CONTEXT = 64
probe.LARGE_BYTES = 1 << 16
main()
