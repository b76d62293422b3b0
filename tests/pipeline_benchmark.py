"""`magicdec pipeline` from a checkout; see `--help`. Start it with torchrun for several ranks."""

from magicdec.cli.serving.pipeline import main

if __name__ == "__main__":
    main()
