"""`magicdec model get`, and `magicdec download` in the spelling of the original suite: fetch a
model from the Hugging Face hub, so that `--model DIR` runs it.

    magicdec model get meta-llama/Llama-3.2-1B
    magicdec download --repo_id meta-llama/Llama-3.2-1B --out_dir checkpoints/Llama-3.2-1B

Owns the command line; `model/checkpoint/hub.py` fetches. Imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from magicdec.cli.checkpoints.hub_models import announce
from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.hub import download, find_repository

DESCRIPTION = (
    "Download the files that running a model needs (safetensors, else .bin; config and tokenizer) "
    "and compare their checksums. After an interruption, the same command fetches the files that "
    "are missing."
)
ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)


def main() -> NoReturn:
    """`magicdec download`, in the spelling of the original suite."""
    conclude(lambda: add_flags(Parser(description=DESCRIPTION)).parse_args(sys.argv[1:]))


def conclude(read: Callable[[], argparse.Namespace]) -> NoReturn:
    """Download. Exit code 2, with one line that says why, if it cannot be done."""
    code = 0
    try:
        run(read())
    except ValueError as error:
        refuse(error, ALONE)
    except OSError as error:
        refuse(ValueError(f"{error.filename or '--out'}: {error.strerror or error}"), ALONE)
    except KeyboardInterrupt:
        print("interrupted; the same command keeps the files that are complete", file=sys.stderr)
        code = 130
    sys.exit(code)


def add_flags(parser: argparse.ArgumentParser, is_named: bool = True) -> argparse.ArgumentParser:
    """The flags of a download. `is_named`: the model is a flag too, as in the original suite, and
    not an argument of its own."""
    add = parser.add_argument
    text = "the model's name on the hub, as owner/model"
    if is_named:
        add("--repo_id", required=True, metavar="ID", help=text)
    else:
        add("repo_id", metavar="ID", help=text)
    add(
        "--out",
        "--out_dir",
        required=is_named,
        type=Path,
        metavar="DIR",
        dest="out_dir",
        help="directory for the files" + ("" if is_named else "; default: checkpoints/ID"),
    )
    add(
        "--revision",
        default="main",
        metavar="NAME",
        help="branch, tag or commit of the repository [main]",
    )
    add("--hf_token", metavar="T",
        help="access token of the hub; default: the variable HF_TOKEN, otherwise the stored "
        "login")  # fmt: skip
    return parser


def run(args: argparse.Namespace) -> None:
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    repository = find_repository(args.repo_id, args.revision, args.hf_token)
    print(f"{args.repo_id} at commit {repository.commit}", flush=True)
    files = download(repository, args.out_dir, args.hf_token, announce)
    size = sum(file.size for file in files)
    print(
        f"{len(files)} files, {size / 1e9:.2f} GB, checksums verified; "
        f"--model {args.out_dir} runs them"
    )
