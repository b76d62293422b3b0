"""`magicdec model get` and `magicdec model convert`: the checkpoints of models.

    magicdec model get meta-llama/Llama-3.2-1B
    magicdec model convert checkpoints/meta-llama/Llama-3.2-1B --quantize int8

Owns the choice between the two; `download.py` and `convert.py` have their flags.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from magicdec.cli.checkpoints import convert, download
from magicdec.cli.checkpoints.hub_models import DIRECTORY
from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.distributed.groups import Launch

DESCRIPTION = "Fetch a model from the Hugging Face hub, or write a checkpoint as one file."
ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)


def main() -> NoReturn:
    """`magicdec model`"""
    try:
        args = build_parser().parse_args(sys.argv[1:])
        if args.action == "convert":
            convert.check(args, "DIR")
    except ValueError as error:
        refuse(error, ALONE)
    if args.action == "convert":
        convert.conclude(lambda: args)
    if args.out_dir is None:
        args.out_dir = DIRECTORY / args.repo_id
    download.conclude(lambda: args)


def build_parser() -> Parser:
    parser = Parser(prog="magicdec model", description=DESCRIPTION)
    actions = parser.add_subparsers(dest="action", required=True, metavar="get | convert")
    get = actions.add_parser(
        "get", help="fetch a model from the hub", description=download.DESCRIPTION
    )
    download.add_flags(get, is_named=False)
    written = actions.add_parser(
        "convert", help="write a checkpoint as one file", description=convert.DESCRIPTION
    )
    convert.add_flags(written, is_named=False)
    return parser
