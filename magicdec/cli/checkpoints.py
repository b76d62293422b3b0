"""`magicdec model get` fetches a checkpoint from the Hugging Face hub; `magicdec model convert`
writes one file of weights with checksums beside it, which running does not need. `magicdec
download` and `magicdec convert` are these in the spelling of the original suite.

    magicdec model get meta-llama/Llama-3.2-1B
    magicdec model convert checkpoints/meta-llama/Llama-3.2-1B --quantize int8
    magicdec model convert --verify checkpoints/meta-llama/Llama-3.2-1B/model.pth
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.config.sections import ModelSection, WrittenSection
from magicdec.config.setting import same, setting
from magicdec.model.checkpoint.hub import DIRECTORY, find_repository
from magicdec.model.checkpoint.hub import download as fetch_files
from magicdec.model.gguf.named import is_gguf
from magicdec.names import QUANTIZERS

ABOUT_DOWNLOAD = (
    "Download the files that running a model needs (safetensors, config and tokenizer, never "
    "pickles) and compare their checksums. After an interruption, the same command fetches the "
    "files that are missing."
)
ABOUT_CONVERT = (
    "Write a checkpoint as one file, .safetensors or .pth, with a manifest of checksums beside it. "
    "The checkpoint consists of one or more safetensors, .bin or .pth files."
)
OUTPUTS = (".safetensors", ".pth")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DownloadSection:
    repo_id: str = setting(
        ..., "The model's name on the hub, as owner/model.", "repo_id", metavar="ID"
    )
    out: Path | None = same(WrittenSection, "out")
    revision: str = setting("main", "Branch, tag or commit of the repository.")
    hf_token: str | None = setting(
        None,
        "Access token of the hub. Default: the variable HF_TOKEN, otherwise the stored login.",
        metavar="T",
    )


@dataclass(frozen=True)
class ConvertSection:
    checkpoint_dir: Path | None = setting(
        None,
        "Directory of the checkpoint and its config.json, or a .gguf file.",
        "checkpoint_dir",
        metavar="DIR",
    )
    out: Path | None = same(WrittenSection, "out")
    dtype: str | None = same(ModelSection, "dtype", None, is_default=True, choices=DTYPES)
    quantize: str | None = setting(
        None,
        "Store the matrices of all layers and the head in this format (docs/models.md); --dtype "
        "then applies to the other tensors. Default: as they are stored.",
        choices=tuple(QUANTIZERS),
    )
    verify: Path | None = setting(
        None, "Compare the file with the manifest of checksums beside it. Writes nothing."
    )


@dataclass(frozen=True)
class OldDownloadSection(DownloadSection):
    """The original suite's spelling, with a flag for the model."""

    repo_id: str = same(DownloadSection, "repo_id", flags=("--repo_id",))
    out: Path = same(WrittenSection, "out", ...)


@dataclass(frozen=True)
class OldConvertSection(ConvertSection):
    """The original suite's spelling, with a flag for the checkpoint."""

    checkpoint_dir: Path | None = same(
        ConvertSection, "checkpoint_dir", flags=("--checkpoint_dir",)
    )


def refusing(run: Callable[[ParsedValues], int]) -> Callable[[ParsedValues], int]:
    """`run`, with errors of files as refusals."""

    @wraps(run)
    def wrapped(values: ParsedValues) -> int:
        try:
            return run(values)
        except OSError as error:
            raise ValueError(f"{error.filename or '--out'}: {error.strerror or error}") from None

    return wrapped


@refusing
def fetch(values: ParsedValues) -> int:
    args: DownloadSection = values.sections["download"]
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    directory = args.out or DIRECTORY / args.repo_id
    try:
        info = find_repository(args.repo_id, args.revision, args.hf_token)
        print(f"{args.repo_id} at commit {info.sha}", flush=True)
        files = fetch_files(info, args.repo_id, directory, args.hf_token)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command keeps the files that are complete") from None
    size = sum(file.size or 0 for file in files)
    print(
        f"{len(files)} files, {size / 1e9:.2f} GB, checksums verified; "
        f"--model {directory} runs them"
    )
    return 0


@refusing
def convert_or_verify(values: ParsedValues) -> int:
    """Converts a checkpoint, or verifies a file. Returns 1 if a verified file is damaged. Raises
    ValueError for flags that exclude each other."""
    args: ConvertSection = values.sections["convert"]
    flag = "--checkpoint_dir" if isinstance(args, OldConvertSection) else "DIR"
    if (args.checkpoint_dir is None) == (args.verify is None):
        raise ValueError(f"give either {flag} or --verify")
    if args.verify and (args.out or args.dtype or args.quantize):
        raise ValueError("--verify writes nothing; leave out --out, --dtype and --quantize")
    if args.verify:
        return verify(args.verify)
    directory = args.checkpoint_dir
    assert directory is not None, "one of the two was given"
    folder = directory.parent if is_gguf(directory) else directory
    out = args.out or folder / (f"model_{args.quantize}.pth" if args.quantize else "model.pth")
    if out.suffix not in OUTPUTS:
        raise ValueError(f"--out {out}: its name must end in one of {', '.join(OUTPUTS)}")
    write_one_file(flag, directory, out, args.dtype, args.quantize)
    return 0


def write_one_file(
    flag: str, directory: Path, out: Path, dtype: str | None, quantize: str | None
) -> None:
    from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized
    from magicdec.model.checkpoint.mtp_weights import stored_mtp_head
    from magicdec.model.checkpoint.source import ModelSource
    from magicdec.output.console import make_progress

    source = find_checkpoint(flag, directory)
    head: ModelSource | None = None
    try:
        head = stored_mtp_head(source)
    except ValueError as error:  # of a head that no run serves either
        print(f"{directory}: its head for multi-token prediction is not written: {error}")
    mtp_config = None if head is None else head.config
    if quantize is not None:
        source = quantized(source, quantize, mtp_config)
    count = len(source.tensors) + (0 if head is None else len(head.tensors))
    with make_progress(True).task(f"writing {out.name}", count) as advance:
        tensors = convert(
            source,
            out,
            dtype,
            lambda name: advance(),
            widens=quantize is None,
            mtp_head=mtp_config,
        )
    dtypes = sorted({tensor.dtype for tensor in tensors.values()})
    print(
        f"{out}: {len(tensors)} tensors, {' and '.join(dtypes)}, "
        f"{out.stat().st_size / 1e9:.2f} GB; --model {out} runs it"
    )


def verify(file: Path) -> int:
    from magicdec.model.checkpoint.convert import find_damage

    damage = find_damage(file)
    print(damage or f"{file}: matches its manifest", file=sys.stderr if damage else sys.stdout)
    return 1 if damage else 0


get = LoneCommand(fetch, ABOUT_DOWNLOAD, {"download": DownloadSection})
convert = LoneCommand(convert_or_verify, ABOUT_CONVERT, {"convert": ConvertSection()})
old_get = LoneCommand(
    fetch,
    ABOUT_DOWNLOAD,
    {"download": OldDownloadSection},
    aliases={"download.out": ("--out_dir",)},
)
old_convert = LoneCommand(convert_or_verify, ABOUT_CONVERT, {"convert": OldConvertSection()})
