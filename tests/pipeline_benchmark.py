"""`magicdec pipeline` from a checkout; see `--help`. Start it with torchrun for several ranks."""

from magicdec.cli.serve import pipeline

if __name__ == "__main__":
    pipeline()
