"""`magicdec recurrent` from a checkout; see `--help`. Start it with torchrun for several ranks."""

from magicdec.cli.serve import recurrent

if __name__ == "__main__":
    recurrent()
