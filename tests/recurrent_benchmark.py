"""`magicdec recurrent` from a checkout; see `--help`. Start it with torchrun for several ranks."""

from magicdec.cli.serving.recurrent import main

if __name__ == "__main__":
    main()
