"""The commands around checkpoints: `magicdec model get` fetches one from the Hugging Face hub,
`magicdec model convert` writes one as one file of weights with checksums beside it, and
`magicdec split` writes one file for each stage of a pipeline.

    magicdec model get meta-llama/Llama-3.2-1B
    magicdec model convert checkpoints/meta-llama/Llama-3.2-1B --quantize int8
    magicdec model convert --verify checkpoints/meta-llama/Llama-3.2-1B/model.pth
    magicdec split checkpoints/meta-llama/Llama-3.2-1B --layer_split 4,6,6 --out chunks

`magicdec download` and `magicdec convert` are the first two in the spelling of the original suite.
Running a checkpoint needs no conversion. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.config.sections import ModelSection, StagesSection, WrittenSection
from magicdec.config.setting import same, setting
from magicdec.distributed.layer_split import count_stages, split_layers
from magicdec.model.checkpoint.hub import DIRECTORY, find_repository
from magicdec.model.checkpoint.hub import download as fetch_files

ABOUT_DOWNLOAD = (
    "Download the files that running a model needs (safetensors, else .bin; config and tokenizer) "
    "and compare their checksums. After an interruption, the same command fetches the files that "
    "are missing."
)
ABOUT_CONVERT = (
    "Write a checkpoint as one file, .safetensors or .pth, with a manifest of checksums beside it. "
    "The checkpoint consists of one or more safetensors or .bin files, or of a model.pth that the "
    "original suite's converter wrote."
)
ABOUT_SPLIT = (
    "Write a checkpoint as one file for each stage of a pipeline, with checksums beside it. A host "
    "needs its own file alone, the index, the config and, as the first one, the tokenizer."
)
OUTPUTS = (".safetensors", ".pth")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)


@dataclass(frozen=True)
class DownloadSection:
    """The model to fetch, and where to."""

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
    """The checkpoint to convert, or the file to verify."""

    checkpoint_dir: Path | None = setting(
        None, "Directory of the checkpoint and its config.json.", "checkpoint_dir", metavar="DIR"
    )
    out: Path | None = same(WrittenSection, "out")
    dtype: str | None = same(ModelSection, "dtype", None, is_default=True, choices=DTYPES)
    quantize: str | None = setting(
        None,
        "Store all matrices except embeddings in int8, with one scale for each output; --dtype "
        "then applies to the other tensors. Default: do not quantize.",
        choices=QUANTIZATIONS,
    )
    verify: Path | None = setting(
        None, "Compare the file with the manifest of checksums beside it. Writes nothing."
    )


@dataclass(frozen=True)
class OldDownloadSection(DownloadSection):
    """In the original suite, the model is a flag too."""

    repo_id: str = same(DownloadSection, "repo_id", flags=("--repo_id",))
    out: Path = same(WrittenSection, "out", ...)


@dataclass(frozen=True)
class OldConvertSection(ConvertSection):
    """In the original suite, the checkpoint is a flag too."""

    checkpoint_dir: Path | None = same(
        ConvertSection, "checkpoint_dir", flags=("--checkpoint_dir",)
    )


@dataclass(frozen=True)
class SplitSection:
    """The checkpoint to split, and how."""

    checkpoint_dir: Path = setting(
        ..., "Directory of the checkpoint.", "checkpoint_dir", metavar="DIR"
    )
    n_nodes: int | None = setting(
        None, "Number of stages, which share the layers equally without --layer_split.", least=1
    )
    layer_split: str | None = same(StagesSection, "layer_split")
    out: Path | None = same(WrittenSection, "out")


def refusing(run: Callable[[Values], int]) -> Callable[[Values], int]:
    """`run`, which refuses an error of a file too."""

    @wraps(run)
    def wrapped(values: Values) -> int:
        try:
            return run(values)
        except OSError as error:
            raise ValueError(f"{error.filename or '--out'}: {error.strerror or error}") from None

    return wrapped


@refusing
def fetch(values: Values) -> int:
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
        print("interrupted; the same command keeps the files that are complete", file=sys.stderr)
        raise
    size = sum(file.size or 0 for file in files)
    print(
        f"{len(files)} files, {size / 1e9:.2f} GB, checksums verified; "
        f"--model {directory} runs them"
    )
    return 0


@refusing
def convert_or_verify(values: Values) -> int:
    """Convert a checkpoint, or verify a file. Returns 1 if a verified file is damaged. Raises
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
    out = args.out or directory / ("model_int8.pth" if args.quantize else "model.pth")
    if out.suffix not in OUTPUTS:
        raise ValueError(f"--out {out}: its name must end in one of {', '.join(OUTPUTS)}")
    write_one_file(flag, directory, out, args.dtype, args.quantize is not None)
    return 0


def write_one_file(
    flag: str, directory: Path, out: Path, dtype: str | None, is_quantized: bool
) -> None:
    from magicdec.console import make_progress
    from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized

    source = find_checkpoint(flag, directory)
    if is_quantized:
        source = quantized(source)
    elif source.is_int8 and dtype:
        raise ValueError(
            f"--dtype {dtype}: {directory} holds int8 weights; leave --dtype out, or give "
            "--quantize int8 too: then --dtype applies to the other tensors"
        )
    with make_progress(True).task(f"writing {out.name}", len(source.tensors)) as advance:
        tensors = convert(source, out, dtype, lambda name: advance())
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


def find_num_stages(n_nodes: int | None, layer_split: str | None) -> int:
    """Raises ValueError if neither flag says it, or if they disagree."""
    if n_nodes is None and layer_split is None:
        raise ValueError("give --n_nodes, --layer_split or both")
    num_stages = count_stages(layer_split, n_nodes or 0)
    if num_stages == 0:
        raise ValueError(f"--layer_split {layer_split} has no number of stages; give --n_nodes too")
    if n_nodes not in (None, num_stages):
        raise ValueError(
            f"--n_nodes {n_nodes}: --layer_split {layer_split} has {num_stages} stages"
        )
    return num_stages


@refusing
def split_stages(values: Values) -> int:
    from magicdec.console import make_progress
    from magicdec.model.checkpoint.convert import find_checkpoint
    from magicdec.model.checkpoint.split import split_checkpoint

    args = values[SplitSection]
    num_stages = find_num_stages(args.n_nodes, args.layer_split)
    out = args.out or args.checkpoint_dir / "chunks" / f"{num_stages}nodes"
    source = find_checkpoint("DIR", args.checkpoint_dir)
    if out.resolve() == args.checkpoint_dir.resolve():
        raise ValueError(f"--out {out} is the checkpoint itself; name another directory")
    layers = split_layers(args.layer_split, num_stages, source.config.num_layers)
    with make_progress(True).task("writing chunks", len(source.tensors)) as advance:
        files = split_checkpoint(source, out, layers, lambda name: advance())
    for file, part in zip(files, layers, strict=True):
        size = file.stat().st_size / 1e6
        print(f"{file}: layers {part.start} to {part.stop - 1}, {size:.1f} MB")
    return 0


get = LoneCommand(fetch, ABOUT_DOWNLOAD, {"download": DownloadSection})
convert = LoneCommand(convert_or_verify, ABOUT_CONVERT, {"convert": ConvertSection()})
split = LoneCommand(split_stages, ABOUT_SPLIT, {"split": SplitSection})
old_get = LoneCommand(
    fetch,
    ABOUT_DOWNLOAD,
    {"download": OldDownloadSection},
    aliases={"download.out": ("--out_dir",)},
)
old_convert = LoneCommand(convert_or_verify, ABOUT_CONVERT, {"convert": OldConvertSection()})
