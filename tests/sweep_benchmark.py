"""`magicdec sweep` from a checkout; see `--help`. Run plainly for one rank, under torchrun for
several."""

from magicdec.cli.sweep import main

if __name__ == "__main__":
    main()
