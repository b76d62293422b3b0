"""`magicdec model check`: is this the model that the directory holds?

    magicdec model check checkpoints/Llama-3.2-1B

Prints what the loader made of config and tokenizer, and compares logits and greedy tokens with
`transformers`, and those of a GGUF file with llama.cpp, if installed. Exits with 1 if they differ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from magicdec.cli.advise import AdviceSection
from magicdec.cli.flags import FAILED, LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.config.setting import same, setting

ABOUT = (
    "Print what the loader makes of a model's config and tokenizer, and compare its float32 logits "
    "and greedy tokens on the CPU with those of transformers, if that is installed, and of a GGUF "
    "file with those of llama.cpp, if llama-cpp-python is. Exits with 1 if they differ."
)


@dataclass(frozen=True)
class CheckSection:
    model: str = setting(..., "The model, named as --model names it.", "model", metavar="DIR")
    time: float = same(AdviceSection, "time", 120.0)


def check(values: ParsedValues) -> int:
    args: CheckSection = values.sections["check"]
    from magicdec.bench.model_check import check_model

    found = check_model(args.model, args.time, lambda line: print(line, flush=True))
    sys.stdout.flush()
    return FAILED if found.failed else 0


main = LoneCommand(
    check,
    ABOUT,
    {"check": CheckSection},
    gone={"--time_s": "it is --time, as in --time 90s"},
)
