"""One decoder in a process of its own, driven by JSON lines: what `bench_peers.py` compares.

    python scripts/peer_worker.py run PEER MODEL_DIR DTYPE THREADS MAX_TOKENS BATCH
    python scripts/peer_worker.py export PEER MODEL_DIR DIRECTORY

Commands, a JSON object a line: {"do": "prefill", "prompts": [[ids]]}, {"do": "step", "count": n},
{"do": "verify", "drafts": [[ids]], "count": n} and {"do": "generate", "prompts": [[ids]],
"num_new": n} (prefill and decoding in one); the end of input ends the process. Each is answered by
one line, {"seconds": [a count of them], "tokens": [[ids emitted so far] a row], "verified": [[ids]
a row] of the last verification}. The first line, before any command, tells what was started.
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
    """One command; what a verification returned."""
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
    os.dup2(2, 1)  # whatever a library prints goes to stderr
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
