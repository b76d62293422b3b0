"""`magicdec` that waits half as long for a host which is not heard of. Started by test_hosts.py."""

from magicdec.cli.commands import console
from magicdec.distributed.watching import watch

watch.PATIENCE_S /= 2
console()
