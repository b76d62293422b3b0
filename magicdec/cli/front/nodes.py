"""`magicdec nodes FILE`: the torchrun command of each host of a ring that a node file describes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.config.setting import setting
from magicdec.distributed.nodes_file import Node, launch_words, read_nodes


@dataclass(frozen=True)
class NodesSection:
    file: Path = setting(..., "The file of nodes.", "file", metavar="FILE")
    command: tuple[str, ...] = setting(
        ("recurrent",),
        "After --, the command to start and its flags.",
        "command",
        metavar="WORD",
        can_be_empty=True,
    )


def print_commands(values: Values) -> int:
    args = values[NodesSection]
    file = read_nodes(args.file)
    if unread := list(file.unread("")):
        print(f"{args.file}: ignored {', '.join(unread)}", file=sys.stderr)
    print("\n".join(lines_of(file.ring, args.command)))
    return 0


def lines_of(ring: list[Node], command: Sequence[str]) -> list[str]:
    """Two lines a node: a comment that names it, and its command."""
    device = ring[0].kind
    words = ["-m", "magicdec", *command, *(["--device", device] if device else [])]
    lines = []
    for index, node in enumerate(ring):
        role = "starter" if index == 0 else f"secondary {index - 1}"
        lines.append(f"# on {node.addr}: {role}")
        lines.append(shlex.join([*launch_words(ring, index), *words]))
    return lines


main = LoneCommand(
    print_commands,
    "Check a JSON file of nodes in the grammar of MDI-LLM and print the command that each host has "
    "to start: one process a node, in the order of the ring.",
    {"nodes": NodesSection},
    epilog="The starter's communication port is where the ranks meet. Its other ports are not "
    "needed: gloo and NCCL choose theirs.",
)
