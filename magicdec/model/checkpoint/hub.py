"""A model's files from the Hugging Face hub: which are needed, and whether they arrived intact; and
the models that a run names as on the hub, which are fetched once, into a directory of their name.

`huggingface_hub` lists and transfers the files, tries again when a connection is lost, and finds
the token (environment, stored login). It compares sizes only, so the checksums are compared here.
Its own messages may hold a token and run over many lines, so every refusal becomes a line of ours,
which never has a token. Imports no torch."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.ranks import is_launched
from magicdec.files import hash_file
from magicdec.model.families.hf_config import load_model_config
from magicdec.model.presets.presets import WEIGHT_SUFFIXES

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
    """What follows the name of the repository."""
    from huggingface_hub import errors, get_token

    has_token = bool(token or get_token())
    gated = "this token may not read it" if has_token else "no token was found"
    absent = "or this token may not see it" if has_token else "or is private (no token)"
    reasons: tuple[tuple[type[BaseException], str], ...] = (  # before those that they derive from
        (
            errors.GatedRepoError,
            f" is gated and {gated}; accept its terms on its page, then give --hf_token, set "
            "HF_TOKEN or log in",
        ),
        (errors.RevisionNotFoundError, f" has no --revision {revision}"),
        (errors.RepositoryNotFoundError, f" does not exist on the hub, {absent}"),
        (errors.HFValidationError, " is not a name on the hub; it looks like owner/model"),
        (errors.OfflineModeIsEnabled, ": HF_HUB_OFFLINE is set; unset it to download"),
    )
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        texts = {401: "the token is not valid", 403: "this token may not read it"}
        return f": the hub answered {status}; {texts.get(status, AGAIN)}"
    return f": the hub cannot be reached ({type(error).__name__}); {AGAIN}"


CONFIG_FILES = ("config.json", "generation_config.json")
# The first one found is needed to run; the extras are for other programs.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json")
# The preferred format first: a single file, or the index of the shards.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
SOURCE_FILE = "download.json"  # the repository, the commit and the checksums of the files


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository. `sha256` is given for large files, git's sha1 (`blob`) for all."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Repository:
    """The files of one revision. All files of a download are of `commit`."""

    repo_id: str
    commit: str
    files: dict[str, RemoteFile]


def find_repository(repo_id: str, revision: str, token: str | None) -> Repository:
    """Ask the hub what the revision holds. Raises ValueError, in one line that names the flag, when
    the hub refuses."""
    from huggingface_hub import HfApi

    with explained(repo_id, revision, token):
        info = HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, token=token, timeout=30
        )
    assert info.sha is not None and info.siblings is not None, "asked for"
    files = {
        s.rfilename: RemoteFile(
            s.rfilename, s.size or 0, None if s.lfs is None else s.lfs.sha256, s.blob_id
        )
        for s in info.siblings
    }
    return Repository(repo_id, info.sha, files)


def choose_small(repository: Repository) -> tuple[list[str], str]:
    """The config, one tokenizer and, for weights in shards, the index that names the shards; and
    the file of weights or the index. Safetensors come before .bin.

    Raises ValueError when the repository holds no config or no weights that can be read.
    """
    files = repository.files
    if "config.json" not in files:
        raise ValueError(f"--repo_id {repository.repo_id} holds no config.json; is it a model?")
    weights = next((name for name in WEIGHTS if name in files), None)
    if weights is None:
        suffixes = ", ".join(sorted({Path(name).suffix for name in files} - {""}))
        raise ValueError(
            f"--repo_id {repository.repo_id} holds no {' or '.join(WEIGHTS[::2])}, "
            f"whole or in shards; its files end in {suffixes}"
        )
    names = [name for name in (*CONFIG_FILES, *TOKENIZER_EXTRAS) if name in files]
    names += [name for name in TOKENIZER_FILES if name in files][:1]
    return [*names, *([weights] if weights.endswith(".json") else [])], weights


def shards_of(repository: Repository, index: Path) -> list[str]:
    """The files of weights that an index names. Raises ValueError if one is not there."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of weight files ({error})") from None
    for name in names:
        if name not in repository.files or ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(
                f"--repo_id {repository.repo_id} lacks {name}, though its {index.name} names it"
            )
    return names


def download(repository: Repository, directory: Path, token: str | None) -> list[RemoteFile]:
    """Fetch what is needed to run the model into `directory`. Returns the files, all verified.

    Raises ValueError before any weights are fetched if the model cannot run or the disk is too
    full.
    """
    small, weights = choose_small(repository)
    directory.mkdir(parents=True, exist_ok=True)
    fetch(repository, small, directory, token)
    load_model_config(directory)
    large = [weights] if weights not in small else shards_of(repository, directory / weights)
    fetch(repository, large, directory, token)
    files = [repository.files[name] for name in (*small, *large)]
    sums = {file.name: {"size": file.size, "sum": file.sha256 or file.blob} for file in files}
    source = {"repo_id": repository.repo_id, "commit": repository.commit, "files": sums}
    (directory / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n")
    return files


def fetch(repository: Repository, names: Sequence[str], directory: Path, token: str | None) -> None:
    """Fetch those files that are not in `directory` yet or are damaged there. Prints a line for
    each, which is also useful in a log file."""
    from huggingface_hub import snapshot_download

    files = [repository.files[name] for name in names]
    missing = [file for file in files if not is_intact(directory, file)]
    if not missing:
        return
    for file in missing:
        (directory / file.name).unlink(missing_ok=True)  # the library would keep it, by its date
    for rest in (directory / ".cache" / "huggingface").rglob("*.incomplete"):
        rest.unlink()  # of a download that was killed; the library does not continue it
    check_space(missing, directory)
    for file in missing:
        print(f"  {file.name}, {file.size / 1e9:.2f} GB", flush=True)
    with explained(repository.repo_id, repository.commit, token):
        snapshot_download(
            repository.repo_id,
            revision=repository.commit,
            local_dir=directory,
            token=token,
            allow_patterns=[glob.escape(file.name) for file in missing],
        )
    for file in missing:
        if not is_intact(directory, file):
            (directory / file.name).unlink(missing_ok=True)
            raise ValueError(
                f"--repo_id {repository.repo_id}: {file.name} did not arrive intact (its checksum "
                "is not the hub's) and was thrown away; run the command again"
            )


def check_space(files: Sequence[RemoteFile], directory: Path) -> None:
    """Raises ValueError when the disk has no room for `files`."""
    size, free = sum(file.size for file in files), shutil.disk_usage(directory).free
    if size > free:
        raise ValueError(
            f"--out_dir {directory} has {free / 1e9:.2f} GB free, {size / 1e9:.2f} GB are still "
            "to be downloaded; make room or name another directory"
        )


def is_intact(directory: Path, file: RemoteFile) -> bool:
    """Whether the file is there with the hub's size and checksum, as far as the hub names one."""
    path = directory / file.name
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.sha256 is None and file.blob is None:
        return True
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode())
    return hash_file(path, digest) == (file.sha256 or file.blob)


def with_local_models(config: RunConfig) -> RunConfig:
    """`config` with a directory in place of every model that is named as on the hub. Models that
    are not there yet are fetched. Raises ValueError, one line naming the flag, if that fails."""
    model, draft = config.model, config.draft
    model = replace(model, model=find_local(flag_of(model, "model"), model.model))
    if draft is not None:
        draft = replace(draft, model=find_local(flag_of(draft, "model"), draft.model))
    return replace(config, model=model, draft=draft)


def find_local(flag: str, name: str) -> str:
    """`name` itself, or the directory of the model of that name on the hub."""
    is_file = Path(name).suffix in WEIGHT_SUFFIXES
    if is_file or Path(name).exists() or not HUB_NAME.fullmatch(name):
        return name
    directory = DIRECTORY / name
    if (directory / SOURCE_FILE).is_file():  # written last
        return str(directory)
    if is_launched():
        raise ValueError(
            f"{flag} {name} is neither a directory nor in {DIRECTORY}; "
            f"`magicdec model get {name}` fetches it"
        )
    try:
        repository = find_repository(name, "main", None)
        print(f"fetching {name} into {directory}", file=sys.stderr, flush=True)
        download(repository, directory, None)
    except ValueError as error:
        reason = str(error).replace("--repo_id ", "")
        raise ValueError(f"{flag} {name} is no directory; on the hub: {reason}") from None
    except OSError as error:
        raise ValueError(f"{flag} {name}: {error.filename}: {error.strerror or error}") from None
    return str(directory)
