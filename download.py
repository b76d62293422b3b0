"""`magicdec download` from a checkout, under the original suite's name; see `--help`."""

from magicdec.cli.checkpoints.download import main

if __name__ == "__main__":
    main()
