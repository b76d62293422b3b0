"""Runs peers in separate processes for `bench_peers.py` and `bench_serving_peers.py`: checks the
Python interpreter, exports the model, and sends commands to the worker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from peers import ENVIRONMENTS
from peers.serving_peer import ServingSizes

SCRIPT = Path(__file__).parents[1] / "peer_worker.py"
# Prints the installed versions of the distributions in its arguments as a JSON object.
FIND_VERSIONS = """
import json, sys
from importlib.metadata import distributions
installed = {
    d.metadata["Name"].lower().replace("_", "-").replace(".", "-"): d.version
    for d in distributions()
}
print(json.dumps({name: installed.get(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class PeerStart:
    """A peer of `PEERS`, the Python that runs it and the model that it loads."""

    name: str
    python: str
    model: Path


@dataclass(frozen=True)
class Sizes:
    """CPU threads, cached tokens per row and rows for which a peer is created."""

    threads: int
    max_tokens: int
    batch: int


def check_python(environment: str, python: str) -> None:
    """Raises ValueError, in one line with the command that installs what is needed, if `python`
    cannot be run, if its environment lacks a requirement of `ENVIRONMENTS[environment]`, or if what
    peers import from it does not work; the line has the error of the import."""
    flag = f"--{environment}_python {python}"
    needed = ENVIRONMENTS[environment]
    requirements = [Requirement(text) for text in needed.requirements]
    command = [python, "-c", FIND_VERSIONS, *(canonicalize_name(r.name) for r in requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        install = needed.install_command("python")
        raise ValueError(
            f"{flag}: {error.strerror}; choose the python of an environment made by: {install}"
        ) from None
    if done.returncode:
        raise ValueError(f"{flag}: {last_line(done.stderr)}; choose a Python interpreter")
    versions = json.loads(done.stdout)
    obstacles = [
        f"{requirement.name} is {version or 'missing'}"
        + (f", not {requirement.specifier}" if version else "")
        for requirement in requirements
        if (version := versions[canonicalize_name(requirement.name)]) is None
        or not requirement.specifier.contains(version)
    ]
    if obstacles:
        install = needed.install_command(python)
        raise ValueError(f"{flag}: {'; '.join(obstacles)}; install with: {install}")
    done = subprocess.run([python, "-c", needed.imports], capture_output=True, text=True)
    if done.returncode:
        install = needed.install_command(python)
        reason = first_error(done.stderr)
        raise ValueError(f"{flag}: `{needed.imports}` fails: {reason}; install with: {install}")


def export_model(start: PeerStart, source: Path) -> None:
    """Write `start.model` from transformers' checkpoint in `source`, with the peer's own Python.
    Raises RuntimeError if that fails."""
    command = [start.python, str(SCRIPT), "export", start.name, str(source), str(start.model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"export for {start.name} failed: {last_line(done.stderr)}")


def first_error(text: str) -> str:
    """The error that caused the others in what Python printed, or the last line."""
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", text, re.MULTILINE)
    return errors[0] if errors else last_line(text)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["(no message)"])[-1]


class PeerProcess:
    """A loaded peer in its process, which ends when the context is left. Raises RuntimeError with
    the last line of its stderr if the peer does not answer."""

    def __init__(self, do: str, start: PeerStart, dtype: str, sizes: Sequence[str]) -> None:
        self.name = start.name
        command = [start.python, str(SCRIPT), do, start.name, str(start.model), dtype, *sizes]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.ready = self._answer()
        self.version: str = self.ready["version"]

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            message = last_line(self.errors.read())
            raise RuntimeError(f"{self.name} ended with code {code}: {message}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class PeerWorker(PeerProcess):
    """A peer that decodes a fixed batch."""

    def __init__(self, start: PeerStart, dtype: str, sizes: Sizes) -> None:
        numbers = (sizes.threads, sizes.max_tokens, sizes.batch)
        super().__init__("run", start, dtype, [str(number) for number in numbers])
        self.can_verify: bool = self.ready["can_verify"]
        self.can_score: bool = self.ready["can_score"]


class ServingWorker(PeerProcess):
    """A peer that serves requests."""

    def __init__(self, start: PeerStart, dtype: str, sizes: ServingSizes) -> None:
        super().__init__("serve", start, dtype, [json.dumps(asdict(sizes))])


def started_here(name: str, model: Path) -> PeerStart:
    """The PeerStart of a peer that runs in this environment."""
    return PeerStart(name, sys.executable, model)
