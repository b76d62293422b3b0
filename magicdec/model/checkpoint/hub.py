"""A model's files from the Hugging Face hub: which ones are needed, fetched in a way that can be
continued, each held against its checksum.

Owns the choice of files and their checks. Must not know of command lines;
never prints or raises a token. `huggingface_hub` finds the token (environment, stored login) and
moves the bytes; that a download whose process was killed goes on where it stopped is done here,
since the library throws its unfinished files away.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.model.checkpoint.hub_errors import explained
from magicdec.model.families.hf_config import load_model_config

CONFIG_FILES = ("config.json", "generation_config.json")
# The first is what runs; the others only what other programs want with it.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json")
# Preferred first: (single file, index of several).
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
SOURCE_FILE = "download.json"  # where the files came from
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository. `sha256` of large files, `blob` (git's sha1) of the others."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Repository:
    """What a revision holds. `commit` pins it: files of one download are all of this commit."""

    repo_id: str
    commit: str
    files: dict[str, RemoteFile]


def find_repository(repo_id: str, revision: str, token: str | None) -> Repository:
    """Ask the hub. Raises ValueError, one line naming the flag, for what it refuses."""
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


def choose_small(repository: Repository) -> list[RemoteFile]:
    """Config, tokenizer, and the index of the weights: what says which files the rest are.

    Raises ValueError when the repository holds no config or no weights that can be read.
    """
    held = repository.files
    if "config.json" not in held:
        raise ValueError(f"--repo_id {repository.repo_id} holds no config.json; is it a model?")
    names = [name for name in (*CONFIG_FILES, *TOKENIZER_EXTRAS) if name in held]
    names += [name for name in TOKENIZER_FILES if name in held][:1]
    weights = choose_weights(repository)
    return [held[name] for name in (*names, *([weights] if weights.endswith(".json") else []))]


def choose_weights(repository: Repository) -> str:
    """The single file or the index; safetensors before .bin."""
    for pair in WEIGHTS:
        for name in pair:
            if name in repository.files:
                return name
    shown = ", ".join(sorted({Path(name).suffix for name in repository.files} - {""}))
    raise ValueError(
        f"--repo_id {repository.repo_id} holds no {' or '.join(single for single, _ in WEIGHTS)}, "
        f"whole or in shards; its files end in {shown}"
    )


def choose_large(repository: Repository, directory: Path) -> list[RemoteFile]:
    """The files of weights; an index is read from `directory`, where it was fetched to."""
    first = choose_weights(repository)
    if not first.endswith(".json"):
        return [repository.files[first]]
    try:
        table = json.loads((directory / first).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / first}: not an index of weight files ({error})") from None
    for name in names:
        if name not in repository.files or ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(
                f"--repo_id {repository.repo_id} lacks {name}, though its {first} names it"
            )
    return [repository.files[name] for name in names]


def download(
    repository: Repository,
    directory: Path,
    token: str | None,
    progress: Callable[[RemoteFile], None] = lambda file: None,
) -> list[RemoteFile]:
    """Fetch what is needed to run the model into `directory`; the files, all verified.

    Files that are there already are kept if their checksum is right, unfinished ones continued.
    `progress` is told of each large file before it is fetched.
    Raises ValueError before any large file when the config is of a model that cannot run or the
    disk is too full.
    """
    small = choose_small(repository)
    directory.mkdir(parents=True, exist_ok=True)
    for file in small:
        fetch(repository, file, directory, token)
    load_model_config(directory)
    large = choose_large(repository, directory)
    check_space(large, directory)
    for file in large:
        progress(file)
        fetch(repository, file, directory, token)
    files = [*small, *large]
    sums = {file.name: {"size": file.size, "sum": file.sha256 or file.blob} for file in files}
    source = {"repo_id": repository.repo_id, "commit": repository.commit, "files": sums}
    (directory / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n")
    return files


def check_space(files: Sequence[RemoteFile], directory: Path) -> None:
    """Raises ValueError when what is missing of `files` does not fit the disk."""
    needed = 0
    for file in files:
        held = [directory / file.name, unfinished_path(directory, file)]
        needed += max(0, file.size - max(p.stat().st_size if p.exists() else 0 for p in held))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ValueError(
            f"--out_dir {directory} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are still "
            "to be downloaded; make room or name another directory"
        )


def unfinished_path(directory: Path, file: RemoteFile) -> Path:
    """Named after the content: never continued with bytes of another revision."""
    place = directory / file.name
    return place.with_name(f".{place.name}.{(file.sha256 or file.blob or '')[:12]}.unfinished")


def fetch(repository: Repository, file: RemoteFile, directory: Path, token: str | None) -> None:
    """One file, unless it is there. It appears under its name once it is complete and right."""
    place, unfinished = directory / file.name, unfinished_path(directory, file)
    if place.is_file() and place.stat().st_size == file.size and is_right(place, file):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.exists() and unfinished.stat().st_size > file.size:
        unfinished.unlink()
    with explained(repository.repo_id, repository.commit, token), unfinished.open("ab") as handle:
        _get(repository, file, handle, token)
    if unfinished.stat().st_size != file.size or not is_right(unfinished, file):
        unfinished.unlink()
        raise ValueError(
            f"--repo_id {repository.repo_id}: {file.name} arrived damaged (its checksum is not the "
            "hub's) and was thrown away; run the command again"
        )
    unfinished.replace(place)


def _get(repository: Repository, file: RemoteFile, handle: Any, token: str | None) -> None:
    """Append what is missing, with the library's progress bar and retries."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository.repo_id, file.name, revision=repository.commit)
    http_get(
        url,
        handle,
        resume_size=handle.tell(),
        headers=build_hf_headers(token=token),
        expected_size=file.size,
        displayed_filename=file.name,
    )


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether the content is what the hub has; True where it names no checksum."""
    if file.sha256 is None and file.blob is None:
        return True
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode())
    with path.open("rb") as handle:
        while data := handle.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest() == (file.sha256 or file.blob)
