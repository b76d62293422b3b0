"""`magicdec download` from a checkout, under the original suite's name; see `--help`."""

from magicdec.cli.checkpoints import old_get

if __name__ == "__main__":
    old_get()
