"""`magicdec nodes FILE`: the torchrun command of each host of a ring that a node file describes."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.config.setting import setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.nodes_file import Ring, device_of, launch_words, read_nodes

ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
DEFAULT = ["recurrent"]
SPLIT = "--"


def main() -> NoReturn:
    """`magicdec nodes FILE [-- COMMAND FLAGS...]`"""
    words = sys.argv[1:]
    at = words.index(SPLIT) if SPLIT in words else len(words)
    try:
        args = build_parser().read(words[:at])[NodesSection]
        ring = read_nodes(args.file)
    except ValueError as error:
        refuse(error, ALONE)
    if ring.ignored:
        print(f"{args.file}: ignored {', '.join(ring.ignored)}", file=sys.stderr)
    print("\n".join(lines_of(ring, words[at + 1 :] or DEFAULT)))
    sys.exit(0)


@dataclass(frozen=True)
class NodesSection:
    file: Path = setting(..., "The file of nodes.", "file", metavar="FILE")


def build_parser() -> Parser:
    return Parser(
        "Check a JSON file of nodes in the grammar of MDI-LLM and print the command that each host "
        "has to start: one process a node, in the order of the ring.",
        {"nodes": NodesSection},
        epilog="Words after -- are the command to start and its flags, [recurrent]. The starter's "
        "communication port is where the ranks meet. Its other ports are not needed: gloo and NCCL "
        "choose theirs.",
    )


def lines_of(ring: Ring, command: list[str]) -> list[str]:
    """Two lines a node: a comment that names it, and its command."""
    device = device_of(ring)
    words = ["-m", "magicdec", *command, *(["--device", device] if device else [])]
    lines = []
    for index, node in enumerate(ring.nodes):
        role = "starter" if index == 0 else f"secondary {index - 1}"
        lines.append(f"# on {node.addr}: {role}")
        lines.append(shlex.join([*launch_words(ring, index), *words]))
    return lines
