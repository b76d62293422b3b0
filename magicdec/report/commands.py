"""The command line that started a run, as its record describes it. Imports no torch."""

from __future__ import annotations

import shlex

from magicdec.records.environment import Environment

LAUNCHER = "torchrun --standalone --nproc_per_node={}"


def command_of(environment: Environment) -> str:
    """The command that starts the run again from the root of the repository. A record has the name
    of the program without its folder. Several ranks of a run that did not start them itself
    (`--nproc`) are given to torchrun on one host."""
    program, *flags = environment.argv or ("?",)
    is_script = program.endswith(".py")
    words = shlex.split(program) if not is_script else [f"tests/{program}"]
    starts_ranks = any(flag.partition("=")[0] == "--nproc" for flag in flags)
    if environment.world_size > 1 and not starts_ranks:
        launcher = LAUNCHER.format(environment.world_size)
        command = f"{launcher} {'' if is_script else '--no-python '}{shlex.join(words)}"
    else:
        command = f"{'python ' if is_script else ''}{shlex.join(words)}"
    return f"{command} {shlex.join(flags)}".rstrip()
