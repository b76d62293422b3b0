"""`magicdec inflight` from a checkout; see `--help`. Start it with torchrun for several ranks."""

from magicdec.cli.serve import inflight

if __name__ == "__main__":
    inflight()
