"""`magicdec convert` from a checkout, under the original suite's name; see `--help`."""

from magicdec.cli.front.checkpoints import convert

if __name__ == "__main__":
    convert()
