"""Runs one decoder of `bench_peers.py` in a process of its own, controlled by JSON lines.

    python scripts/peer_worker.py run PEER MODEL_DIR DTYPE THREADS MAX_TOKENS BATCH
    python scripts/peer_worker.py export PEER MODEL_DIR DIRECTORY

Each command is one line with a JSON object: {"do": "prefill", "prompts": [[ids]]}, {"do": "step",
"count": n}, {"do": "verify", "drafts": [[ids]], "count": n} or {"do": "generate", "prompts":
[[ids]], "num_new": n} (prefill and decoding). Each answer is one line: {"seconds": [one per
repetition], "tokens": [[ids emitted so far] per row], "verified": [[ids] per row] of the last
verification}. The first line, before any command, has the version. The process ends at the end of
its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from peers import PEERS
from peers.peer import Peer


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
            raise ValueError(f"do: {other!r} is not one of prefill, step, verify, generate")
    return None


def serve(peer: Peer, answers: TextIO) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        seconds = []
        for _ in range(command.get("count", 1)):
            started = time.perf_counter()
            verified = perform(peer, command)
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": seconds, "tokens": peer.tokens(), "verified": verified}
        print(json.dumps(answer), file=answers, flush=True)


def run(name: str, model: str, dtype: str, *sizes: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    peer: Peer = PEERS[name].load()(model, dtype, *map(int, sizes))
    ready = {"version": peer.version(), "can_verify": peer.can_verify}
    print(json.dumps(ready), file=answers, flush=True)
    serve(peer, answers)


def main() -> None:
    do, name, *rest = sys.argv[1:]
    if do == "export":
        PEERS[name].load().export(*map(Path, rest))
    else:
        run(name, *rest)


if __name__ == "__main__":
    main()
