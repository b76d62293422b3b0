"""`magicdec inflight` from a checkout; see `--help`. It runs on one rank."""

from magicdec.cli.inflight import main

if __name__ == "__main__":
    main()
