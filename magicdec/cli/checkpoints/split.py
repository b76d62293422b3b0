"""`magicdec split DIR`: a checkpoint as one file for each stage of a pipeline.

    magicdec split checkpoints/Llama-3.2-1B --n_nodes 3
    magicdec split checkpoints/Llama-3.2-1B --layer_split 4,6,6 --out chunks

Owns the command line; `model/checkpoint/split.py` writes. Heavy imports happen after the flags are
read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.distributed.groups import Launch
from magicdec.distributed.layer_split import count_stages, split_layers

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
DESCRIPTION = (
    "Write a checkpoint as one file for each stage of a pipeline, with checksums beside it. A host "
    "needs its own file alone, the index, the config and, as the first one, the tokenizer."
)


def main() -> NoReturn:
    out: Path | None = None
    try:
        args, _ = build_parser().read(sys.argv[1:])
        num_stages = find_num_stages(args.n_nodes, args.layer_split)
        out = args.out or args.checkpoint_dir / "chunks" / f"{num_stages}nodes"
        split(args.checkpoint_dir, out, args.layer_split, num_stages)
    except ValueError as error:
        refuse(error, ALONE)
    except OSError as error:
        refuse(ValueError(f"{error.filename or out}: {error.strerror or error}"), ALONE)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def build_parser() -> Parser:
    parser = Parser(description=DESCRIPTION)
    add = parser.add_argument
    add("checkpoint_dir", type=Path, metavar="DIR", help="directory of the checkpoint")
    add("--n_nodes", type=_count, metavar="N",
        help="number of stages, which share the layers equally without --layer_split")  # fmt: skip
    add("--layer_split", metavar="SPLIT",
        help="layers or shares of the stages (10,12 or 0.25,0.75), or mdi_llm, the table of that "
        "system")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="directory of the chunks; default: DIR/chunks/<N>nodes")  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of stages, 1 or more")
    return int(text)


def find_num_stages(n_nodes: int | None, layer_split: str | None) -> int:
    """Raises ValueError if neither flag says it, or if they disagree."""
    if n_nodes is None and layer_split is None:
        raise ValueError("give --n_nodes, --layer_split or both")
    named = count_stages(layer_split, n_nodes or 0)
    if named == 0:
        raise ValueError(f"--layer_split {layer_split} has no number of stages; give --n_nodes too")
    if n_nodes not in (None, named):
        raise ValueError(f"--n_nodes {n_nodes}: --layer_split {layer_split} has {named} stages")
    return named


def split(directory: Path, out: Path, layer_split: str | None, num_stages: int) -> None:
    from magicdec.console import make_progress
    from magicdec.model.checkpoint.convert import find_checkpoint
    from magicdec.model.checkpoint.split import split_checkpoint

    source = find_checkpoint("DIR", directory)
    if out.resolve() == directory.resolve():
        raise ValueError(f"--out {out} is the checkpoint itself; name another directory")
    layers = split_layers(layer_split, num_stages, source.config.num_layers)
    with make_progress(True).task("writing chunks", len(source.stored_shapes)) as advance:
        files = split_checkpoint(source, out, layers, lambda name: advance())
    for file, part in zip(files, layers, strict=True):
        size = file.stat().st_size / 1e6
        print(f"{file}: layers {part.start} to {part.stop - 1}, {size:.1f} MB")
