"""What tests of several ranks share: a script of tests/ and what its ranks answer, the tokens that
one process generates, and the checks after a rank was killed."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from conftest import Launch, decode, make_runner, tiny_transformer
from identities import check_command, check_record

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.model.transformer import Transformer
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import parse_line
from magicdec.runner.request import Request
from magicdec.speculation.steps.strategy import Setup
from magicdec.workload.request_shapes import poisson

PROMISED_S = 30  # until all ranks have ended after one was killed


def answer_of(launch: Launch, script: str, *args: object, num_ranks: int) -> Any:
    """What the first rank prints last, as JSON. All ranks must end well."""
    done = launch(script, *args, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def disturbed(model: Transformer) -> Transformer:
    """A draft of which some is accepted: the same weights with a little noise."""
    noise = tiny_transformer(model.config, seed=1).state_dict()
    draft = deepcopy(model)
    draft.load_state_dict({n: w + 0.04 * noise[n] for n, w in model.state_dict().items()})
    return draft


def check_numbers(*command: dict[str, Any]) -> None:
    """The metrics of the passes of a command are those of their requests and groups."""
    records = [parse_line(json.dumps(raw), PassRecord) for raw in command]
    assert check_command(records) == []
    for record in records:
        check_record(record)


def generate_alone(
    model: Transformer, requests: Sequence[Request], max_tokens: int
) -> list[list[int]]:
    """The tokens of the engine in this process, which serves one request after the other."""
    runner = make_runner(model, 1, max_tokens)
    outputs = []
    for request in requests:
        engine = Engine(runner, 16)
        engine.prefill([request])
        (done,) = decode(
            engine, "autoregressive", Setup(runner, DecodingSection(), KVSection("full"))
        )
        outputs.append(list(done.output_ids))
    return outputs


def arrive_over_time(requests: Sequence[Request], begin_s: float, mean_ms: float) -> None:
    """Let `requests` arrive one after the other, with exponential gaps. Also before the first one
    there is nothing to do."""
    arrivals_ms = poisson(mean_ms, len(requests), Random(3))
    for request, arrival_ms in zip(requests, arrivals_ms, strict=True):
        request.arrived_s = begin_s + (mean_ms + arrival_ms) / 1e3


def check_killed(
    done: subprocess.CompletedProcess[str], killed: int, num_ranks: int, directory: Path
) -> None:
    """Each other rank of `distributed/killed_rank.py` has named the killed one within the time that
    is promised. A rank may also name one that has ended because of the first."""
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert time.monotonic() - float((directory / "killed_at").read_text()) < PROMISED_S
    for other in set(range(num_ranks)) - {killed}:
        pattern = rf"rank {other}: (rank {killed} has|ranks [\d, ]*{killed}[\d, ]* have) ended"
        assert any(re.fullmatch(pattern, line) for line in done.stderr.splitlines()), done.stderr
