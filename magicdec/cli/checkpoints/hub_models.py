"""Models that a run names as on the Hugging Face hub, such as meta-llama/Llama-3.2-1B: they are
fetched once, into a directory of their name.

Owns which names are looked up on the hub, and the directory. `model/checkpoint/hub.py` fetches.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.ranks import is_launched
from magicdec.model.presets.presets import WEIGHT_SUFFIXES

if TYPE_CHECKING:
    from magicdec.model.checkpoint.hub import RemoteFile

DIRECTORY = Path("checkpoints")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    from magicdec.model.checkpoint.hub import SOURCE_FILE

    directory = DIRECTORY / name
    if not (directory / SOURCE_FILE).is_file():  # written last
        if is_launched():
            raise ValueError(
                f"{flag} {name} is neither a directory nor in {DIRECTORY}; "
                f"`magicdec model get {name}` fetches it"
            )
        fetch(flag, name, directory)
    return str(directory)


def fetch(flag: str, name: str, directory: Path) -> None:
    from magicdec.model.checkpoint.hub import download, find_repository

    try:
        repository = find_repository(name, "main", None)
        print(f"fetching {name} into {directory}", file=sys.stderr, flush=True)
        download(repository, directory, None, announce)
    except ValueError as error:
        reason = str(error).replace("--repo_id ", "")
        raise ValueError(f"{flag} {name} is no directory; on the hub: {reason}") from None
    except OSError as error:
        raise ValueError(f"{flag} {name}: {error.filename}: {error.strerror or error}") from None


def announce(file: RemoteFile) -> None:
    """Print a line for each file, which is also useful in a log file."""
    print(f"  {file.name}, {file.size / 1e9:.2f} GB", flush=True)
