"""`magicdec model convert`, and `magicdec convert` in the spelling of the original suite: writes a
checkpoint as one file of weights, with checksums beside it.

    magicdec model convert checkpoints/Llama-3.2-1B --dtype bfloat16
    magicdec model convert checkpoints/Llama-3.2-1B --quantize int8
    magicdec model convert --verify checkpoints/Llama-3.2-1B/model.pth

Owns the command line; `model/checkpoint/convert.py` writes. Running a checkpoint needs no
conversion. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.distributed.groups import Launch

DESCRIPTION = (
    "Write a checkpoint as one file, .safetensors or .pth, with a manifest of checksums beside it. "
    "The checkpoint consists of one or more safetensors or .bin files, or of a model.pth that the "
    "original suite's converter wrote."
)
ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
OUTPUTS = (".safetensors", ".pth")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)


def main() -> NoReturn:
    """`magicdec convert`, in the spelling of the original suite."""
    conclude(lambda: parse(sys.argv[1:]))


def conclude(read: Callable[[], argparse.Namespace]) -> NoReturn:
    """Convert a checkpoint or verify a file. The exit code is 1 if a verified file is damaged."""
    args = argparse.Namespace(out=None)
    try:
        args = read()
        code = verify(args.verify) if args.verify else run(args)
    except ValueError as error:
        refuse(error, ALONE)
    except OSError as error:
        refuse(ValueError(f"{error.filename or args.out}: {error.strerror or error}"), ALONE)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ValueError, one line naming the flag, for flags that cannot be used."""
    return check(add_flags(Parser(description=DESCRIPTION)).parse_args(argv), "--checkpoint_dir")


def add_flags(parser: argparse.ArgumentParser, is_named: bool = True) -> argparse.ArgumentParser:
    """The flags of a conversion. `is_named`: the checkpoint is a flag too, as in the original
    suite, and not an argument of its own."""
    add = parser.add_argument
    text = "directory of the checkpoint and its config.json"
    if is_named:
        add("--checkpoint_dir", type=Path, metavar="DIR", help=text)
    else:
        add("checkpoint_dir", nargs="?", type=Path, metavar="DIR", help=text)
    add("--out", type=Path, metavar="FILE",
        help="the .safetensors or .pth file to write; default: DIR/model.pth, with --quantize "
        "DIR/model_int8.pth")  # fmt: skip
    add("--dtype", choices=DTYPES, help="dtype of the written weights; default: as they are stored")
    add("--quantize", choices=QUANTIZATIONS,
        help="store all matrices except embeddings in int8, with one scale for each output; "
        "--dtype then applies to the other tensors; default: do not quantize")  # fmt: skip
    add("--verify", type=Path, metavar="FILE",
        help="compare FILE with the manifest of checksums beside it; writes nothing")  # fmt: skip
    return parser


def check(args: argparse.Namespace, named: str) -> argparse.Namespace:
    """The flags with the default of `--out`. `named` is what the checkpoint's argument is called.
    Raises ValueError for flags that exclude each other."""
    args.named = named
    if (args.checkpoint_dir is None) == (args.verify is None):
        raise ValueError(f"give either {named} or --verify")
    if args.verify and (args.out or args.dtype or args.quantize):
        raise ValueError("--verify writes nothing; leave out --out, --dtype and --quantize")
    if args.checkpoint_dir and args.out is None:
        args.out = args.checkpoint_dir / ("model_int8.pth" if args.quantize else "model.pth")
    if args.out and args.out.suffix not in OUTPUTS:
        raise ValueError(f"--out {args.out}: its name must end in one of {', '.join(OUTPUTS)}")
    return args


def run(args: argparse.Namespace) -> int:
    from magicdec.console import make_progress
    from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized

    source = find_checkpoint(args.named, args.checkpoint_dir)
    if args.quantize:
        source = quantized(source)
    elif source.is_int8 and args.dtype:
        raise ValueError(
            f"--dtype {args.dtype}: {args.checkpoint_dir} holds int8 weights; leave --dtype out, "
            "or give --quantize int8 too: then --dtype applies to the other tensors"
        )
    num_tensors = len(source.stored_shapes)
    with make_progress(True).task(f"writing {args.out.name}", num_tensors) as advance:
        manifest = convert(source, args.out, args.dtype, lambda name: advance())
    types = sorted({entry.dtype for entry in manifest.tensors.values()})
    print(
        f"{args.out}: {len(manifest.tensors)} tensors, {' and '.join(types)}, "
        f"{manifest.size / 1e9:.2f} GB, sha256 {manifest.sha256[:16]}; "
        f"--model {args.out} runs it"
    )
    return 0


def verify(file: Path) -> int:
    from magicdec.model.checkpoint.manifest import find_damage

    damage = find_damage(file)
    print(damage or f"{file}: matches its manifest", file=sys.stderr if damage else sys.stdout)
    return 1 if damage else 0
