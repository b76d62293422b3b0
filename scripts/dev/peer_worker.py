"""Runs one decoder of `bench_peers.py` or `bench_serving_peers.py` in a process of its own,
controlled by JSON lines.

    python scripts/dev/peer_worker.py run PEER MODEL_DIR DTYPE THREADS MAX_TOKENS BATCH
    python scripts/dev/peer_worker.py serve PEER MODEL_DIR DTYPE SIZES
    python scripts/dev/peer_worker.py export PEER MODEL_DIR DIRECTORY

With `run`, each command is one line with a JSON object: {"do": "prefill", "prompts": [[ids]]},
{"do": "step", "count": n}, {"do": "verify", "drafts": [[ids]], "count": n} or {"do": "generate",
"prompts": [[ids]], "num_new": n} (prefill and decoding). Each answer is one line: {"seconds": [one
per repetition], "tokens": [[ids emitted so far] per row], "verified": [[ids] per row] of the last
verification}. That of {"do": "score", "texts": [[ids]]} is {"log_probs": [[of each token but the
first] per row]}. With `serve`, SIZES is a JSON object with the fields of `ServingSizes`. Each
command has the requests to serve, {"requests": [{"arrival_s", "prompt", "output_len"}]}, and its
answer the tokens of each request and their times: {"served": [{"token_ids", "times_s"}]}. The first
line, before any command, has the version. The process ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from peers import PEERS
from peers.peer import Peer
from peers.serving_peer import ServingPeer, ServingSizes, TimedRequest, serve_requests


def perform(peer: Peer, command: dict[str, Any]) -> list[list[int]] | None:
    """Perform one command. Returns the verified ids, or None for other commands."""
    match command["do"]:
        case "prefill":
            peer.prefill(command["prompts"])
        case "step":
            peer.step()
        case "verify":
            return peer.verify(command["drafts"])
        case "generate":
            peer.generate(command["prompts"], command["num_new"])
        case other:
            raise ValueError(f"do: {other!r} is not one of prefill, step, verify, generate, score")
    return None


def decode(peer: Peer, answers: TextIO) -> None:
    for line in sys.stdin:
        print(json.dumps(answer_of(peer, json.loads(line))), file=answers, flush=True)


def answer_of(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "score":
        return {"log_probs": peer.score(command["texts"])}
    return time_command(peer, command)


def time_command(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    seconds = []
    for _ in range(command.get("count", 1)):
        started = time.perf_counter()
        verified = perform(peer, command)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "tokens": peer.tokens(), "verified": verified}


def serve(peer: ServingPeer, answers: TextIO) -> None:
    for line in sys.stdin:
        requests = [TimedRequest(**one) for one in json.loads(line)["requests"]]
        served = [asdict(one) for one in serve_requests(peer, requests)]
        print(json.dumps({"served": served}), file=answers, flush=True)


def run(name: str, model: str, dtype: str, *sizes: str) -> None:
    answers = open_answers()
    peer: Peer = PEERS[name].load()(model, dtype, *map(int, sizes))
    print(json.dumps(what_is_ready(peer)), file=answers, flush=True)
    decode(peer, answers)


def what_is_ready(peer: Peer) -> dict[str, Any]:
    """What the first answer says."""
    return {
        "version": peer.version(),
        "can_verify": peer.can_verify,
        "can_score": peer.can_score,
    }


def run_serving(name: str, model: str, dtype: str, sizes: str) -> None:
    answers = open_answers()
    peer: ServingPeer = PEERS[name].load_serving()(model, dtype, ServingSizes(**json.loads(sizes)))
    print(json.dumps({"version": peer.version()}), file=answers, flush=True)
    try:
        serve(peer, answers)
    finally:
        peer.close()


def open_answers() -> TextIO:
    """Where answers are written. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    do, name, *rest = sys.argv[1:]
    match do:
        case "export":
            PEERS[name].load().export(*map(Path, rest))
        case "serve":
            run_serving(name, *rest)
        case _:
            run(name, *rest)


if __name__ == "__main__":
    main()
