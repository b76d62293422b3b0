"""The presets of `magicdec serve`: the commands of the original suites, as descriptions, modes, and
the defaults in which they differ. Imports no torch.

`modes` are those that a command compares without `--modes`: those of them that the ranks can have,
and that draft if something drafts; without it, all that systems declare. With `rows_of`, every mode
has as many rows as this one, if it is among them.
"""

from __future__ import annotations

from typing import Any

from magicdec.workload.request_shapes import BURST

PRESETS: dict[str, dict[str, Any]] = {
    "serve": {
        "description": "Serve the same requests in every mode that is named: one after the other, "
        "in batches, in flight, by tensor parallelism, in a ring of stages, and by pipelined "
        "speculation. All tokens are compared with those of the first mode.",
    },
    "inflight": {
        "description": "Serve requests that arrive over time: one after the other, in static and "
        "dynamic batches, and in flight (`serve` with these modes, and with all ranks in each of "
        "them).",
        "modes": ("sequential", "static", "dynamic", "inflight", "inflight+draft"),
        "defaults": {"batch_ranks": "all", "ignore_eos": True},
    },
    "recurrent": {
        "description": "Divide a model by its layers among ranks; samples circulate through them "
        "(`serve` with a ring, beside one process and tensor parallelism).",
        "modes": ("sequential", "inflight", "tensor_parallel", "ring", "ring+draft"),
        "defaults": {"arrival": BURST, "batch_size": 1},
        "rows_of": "ring",
    },
    "pipeline": {
        "description": "Divide a model by its layers among ranks, and let a draft run ahead of it: "
        "asynchronous pipelined speculation, whose wrong runs are cancelled inside the stages, "
        "beside synchronous speculation and plain decoding (`serve` with these modes).",
        "modes": ("sequential", "pipeline", "pipeline+draft", "pipeinfer"),
        "defaults": {"arrival": BURST, "draft": "model:demo-draft"},
    },
}
