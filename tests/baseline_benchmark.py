"""`magicdec baseline` from a checkout; see `--help`. Run plainly for one rank, under torchrun for
several."""

from magicdec.cli.drivers import baseline

if __name__ == "__main__":
    baseline()
