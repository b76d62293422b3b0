"""A nanoGPT checkpoint as a directory for `--model`.

    python scripts/convert_nanogpt.py out-shakespeare-char/ckpt.pt --out shakespeare

`meta.pkl`, if it lies beside the checkpoint, becomes the tokenizer; a model of GPT-2's vocabulary
needs GPT-2's tokenizer.json put into the directory.
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
        help="gelu_new: checkpoints of before February 2023",
    )
    args = parser.parse_args()
    try:
        has_tokenizer = convert_nanogpt(args.checkpoint, args.out, args.activation)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rest = "" if has_tokenizer else "; it needs a tokenizer.json: no meta.pkl beside the checkpoint"
    print(f"wrote {args.out}{rest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
