"""`python -m magicdec` is the command `magicdec`."""

from magicdec.cli.commands import console

if __name__ == "__main__":
    console()
