"""Convert a nanoGPT checkpoint to a directory for `--model`.

    python scripts/convert_nanogpt.py out-shakespeare-char/ckpt.pt --out shakespeare

If `meta.pkl` is beside the checkpoint, the tokenizer is made from it. For a model with GPT-2's
vocabulary, copy GPT-2's tokenizer.json into the directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.model.checkpoint.nanogpt import convert_nanogpt


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--activation",
        choices=("gelu", "gelu_new"),
        default="gelu",
        help="gelu_new is for checkpoints from before February 2023 [gelu]",
    )
    args = parser.parse_args()
    try:
        has_tokenizer = convert_nanogpt(args.checkpoint, args.out, args.activation)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rest = "" if has_tokenizer else "; add a tokenizer.json: no meta.pkl to make it from was found"
    print(f"wrote {args.out}{rest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
