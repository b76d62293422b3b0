"""Model files from the Hugging Face hub: which are needed, and whether they arrived intact. Imports
no torch.

`huggingface_hub` transfers files, retries and finds the token. It compares only sizes, so checksums
are compared here. Its messages may hold a token, so refusals are lines of ours.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.ranks import is_launched
from magicdec.model.checkpoint.weight_map import read_index
from magicdec.model.families.config_keys import QUANTIZATION_FILES
from magicdec.model.families.family import check_computed
from magicdec.model.families.hf_config import load_model_config
from magicdec.model.presets.presets import WEIGHT_SUFFIXES
from magicdec.output.files import hash_file, nearest, no_such

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

DIRECTORY = Path("checkpoints")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
AGAIN = "run the command again; files that are complete are kept"


@contextmanager
def explained(repo_id: str, revision: str, token: str | None) -> Iterator[None]:
    """Turn the library's errors into a ValueError of one line. Errors of the disk pass through."""
    from huggingface_hub import errors

    try:
        yield
    # hf_xet, which transfers large files, raises RuntimeError.
    except (errors.HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        # What kept the library from the hub, if it then looked on the disk instead.
        is_local = isinstance(error, errors.LocalEntryNotFoundError)
        cause = (is_local and error.__cause__) or error
        if isinstance(cause, OSError) and cause.errno is not None:
            raise  # of the disk, not of the connection
        raise ValueError(f"--repo_id {repo_id}{_reason(cause, revision, token)}") from None


def _reason(error: BaseException, revision: str, token: str | None) -> str:
    from huggingface_hub import errors, get_token

    has_token = bool(token or get_token())
    gated = "this token may not read it" if has_token else "no token was found"
    absent = "or this token may not see it" if has_token else "or is private (no token)"
    reasons = {  # before those that they derive from
        errors.GatedRepoError: f" is gated and {gated}; accept its terms on its page, then give "
        "--hf_token, set HF_TOKEN or log in",
        errors.RevisionNotFoundError: f" has no --revision {revision}",
        errors.RepositoryNotFoundError: f" does not exist on the hub, {absent}",
        errors.HFValidationError: " is not a name on the hub; it looks like owner/model",
        errors.OfflineModeIsEnabled: ": HF_HUB_OFFLINE is set; unset it to download",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        advice = "is the token valid for it?" if status in (401, 403) else AGAIN
        return f": the hub answered {status}; {advice}"
    return f": the hub cannot be reached ({type(error).__name__}); {AGAIN}"


# The first tokenizer that is found is needed to run. Of the others, some are for chat templates and
# some for other programs.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    *QUANTIZATION_FILES,
)
# A single file, or the index of the shards. Pickles are never fetched: those of strangers need not
# be trusted to be weights alone.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
SOURCE_FILE = "download.json"  # the repository, the commit and the checksums of the files


def find_repository(repo_id: str, revision: str, token: str | None) -> ModelInfo:
    """The hub's answer on a revision: its commit `sha` and files (`siblings`). Raises ValueError
    when the hub refuses."""
    from huggingface_hub import HfApi

    with explained(repo_id, revision, token):
        return HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, token=token, timeout=30
        )


def download(
    info: ModelInfo, repo_id: str, directory: Path, token: str | None
) -> list[RepoSibling]:
    """Fetch a runnable model of one commit into `directory`: config, one tokenizer, and
    safetensors. Returns the verified files.

    Raises:
        ValueError: before weights are fetched, if the model cannot run or the disk is too full.
    """
    files = {file.rfilename: file for file in info.siblings or ()}
    what = f"--repo_id {repo_id}"
    if "config.json" not in files:
        raise ValueError(f"{what} holds no config.json; is it a model?")
    weights = next((name for name in WEIGHTS if name in files), None)
    if weights is None:
        suffixes = ", ".join(sorted({Path(name).suffix for name in files} - {""}))
        raise ValueError(
            f"{what} holds no {WEIGHTS[0]}, whole or in shards; its files end in {suffixes} "
            "(pickled weights are never fetched)"
        )
    is_index = weights.endswith(".json")
    small = [files[name] for name in OTHER_FILES if name in files]
    small += [files[name] for name in TOKENIZER_FILES if name in files][:1]
    small += [files[weights]] if is_index else []
    directory.mkdir(parents=True, exist_ok=True)
    fetch(info, repo_id, small, directory, token)
    check_computed(what, load_model_config(directory), str(directory))
    # Here, because this file is imported by commands that need no torch.
    from magicdec.model.checkpoint.quantized.stated import read_method

    read_method(directory)
    names = sorted(set(read_index(directory / weights).values())) if is_index else [weights]
    if missing := [name for name in names if name not in files]:
        raise ValueError(f"{what} lacks {missing[0]}, though its {weights} names it")
    large = [files[name] for name in names]
    fetch(info, repo_id, large, directory, token)
    sums = {file.rfilename: {"size": file.size, "sum": checksum(file)} for file in small + large}
    source = {"repo_id": repo_id, "commit": info.sha, "files": sums}
    (directory / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n")
    return small + large


def fetch(
    info: ModelInfo, repo_id: str, files: Sequence[RepoSibling], directory: Path, token: str | None
) -> None:
    """Fetch the files that are missing or damaged in `directory`, with a printed line each."""
    from huggingface_hub import snapshot_download

    missing = [file for file in files if not is_intact(directory, file)]
    if not missing:
        return
    for file in missing:
        (directory / file.rfilename).unlink(missing_ok=True)  # the library would keep it
    for rest in (directory / ".cache" / "huggingface").rglob("*.incomplete"):
        rest.unlink()  # of a download that was killed; the library does not continue it
    check_space(missing, directory)
    for file in missing:
        print(f"  {file.rfilename}, {(file.size or 0) / 1e9:.2f} GB", flush=True)
    with explained(repo_id, str(info.sha), token):
        snapshot_download(
            repo_id,
            revision=info.sha,
            local_dir=directory,
            token=token,
            allow_patterns=[glob.escape(file.rfilename) for file in missing],
        )
    for file in missing:
        if not is_intact(directory, file):
            (directory / file.rfilename).unlink(missing_ok=True)
            raise ValueError(
                f"--repo_id {repo_id}: {file.rfilename} did not arrive intact (its checksum is not "
                "the hub's) and was thrown away; run the command again"
            )


def check_space(files: Sequence[RepoSibling], directory: Path) -> None:
    size = sum(file.size or 0 for file in files)
    free = shutil.disk_usage(directory).free
    if size > free:
        raise ValueError(
            f"--out_dir {directory} has {free / 1e9:.2f} GB free, {size / 1e9:.2f} GB are still "
            "to be downloaded; make room or name another directory"
        )


def is_intact(directory: Path, file: RepoSibling) -> bool:
    path = directory / file.rfilename
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.lfs else hashlib.sha1(f"blob {file.size}\0".encode())
    return hash_file(path, digest) == checksum(file)


def checksum(file: RepoSibling) -> str | None:
    """sha256 of a large file, git's sha1 of any other."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def with_local_models(config: RunConfig) -> RunConfig:
    """`config` with a directory for every model named as on the hub, fetched if needed. Raises
    ValueError if that fails."""
    model = config.model
    draft = config.draft
    model = replace(model, model=find_local(flag_of(model, "model"), model.model))
    if draft is not None:
        draft = replace(draft, model=find_local(flag_of(draft, "model"), draft.model))
    return replace(config, model=model, draft=draft)


def find_local(flag: str, name: str) -> str:
    """`name` itself, or the directory of the hub's model of that name."""
    path = Path(name)
    directory = DIRECTORY / name
    if path.suffix in WEIGHT_SUFFIXES or path.exists() or not HUB_NAME.fullmatch(name):
        return name
    if (directory / SOURCE_FILE).is_file():  # written last
        return str(directory)
    if path.parent.is_dir() or nearest(path) is not None:
        raise ValueError(
            f"{flag} {name}: {no_such(path, 'directory')} (`magicdec model get {name}` looks for it"
            " on the hub)"
        )
    if is_launched():
        raise ValueError(
            f"{flag} {name} is neither a directory nor in {DIRECTORY}; "
            f"`magicdec model get {name}` fetches it"
        )
    try:
        print(f"{name} is no directory; looking for it on the hub", file=sys.stderr, flush=True)
        info = find_repository(name, "main", None)
        print(f"fetching {name} into {directory}", file=sys.stderr, flush=True)
        download(info, name, directory, None)
    except ValueError as error:
        reason = str(error).replace("--repo_id ", "")
        raise ValueError(f"{flag} {name} is no directory; on the hub: {reason}") from None
    except OSError as error:
        raise ValueError(f"{flag} {name}: {error.filename}: {error.strerror or error}") from None
    return str(directory)
