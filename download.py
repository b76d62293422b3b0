"""`magicdec download` from a checkout, under the original suite's name; see `--help`."""

from magicdec.cli.front.checkpoints import download

if __name__ == "__main__":
    download()
