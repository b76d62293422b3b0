"""The decoders that `bench_peers.py` and `bench_serving_peers.py` compare: each has an entry in
`PEERS`, and a file here for each of its classes.

Imports only the standard library, because it is imported in the environments of all peers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """`where` is "module:class". A peer with `modules` runs in an environment of its own, given by
    the flag `--NAME_python`, and loads a model written by its `export`; without the flag it is left
    out. `decodes` and `generates`: whether it is in the table of decode steps and in the table of
    whole generations. `serving`: "module:class" of what serves requests, if it does."""

    where: str
    modules: tuple[str, ...] = ()
    decodes: bool = True
    generates: bool = False
    serving: str = ""

    def load(self) -> Any:
        """The class, a `peers.peer.Peer`."""
        return load(self.where)

    def load_serving(self) -> Any:
        """The class that serves requests, a `peers.serving_peer.ServingPeer`."""
        return load(self.serving)


def load(where: str) -> Any:
    """The class at "module:class"."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


PEERS = {
    "magicdec": Entry(
        "peers.magicdec_engine:Magicdec",
        generates=True,
        serving="peers.magicdec_serving:MagicdecServing",
    ),
    "magicdec_selfspec": Entry(
        "peers.magicdec_engine:MagicdecSelfSpeculation", decodes=False, generates=True
    ),
    "transformers": Entry(
        "peers.transformers_sdpa:Transformers",
        serving="peers.transformers_serving:TransformersServing",
    ),
    "transformers_generate": Entry(
        "peers.transformers_sdpa:TransformersGenerate", decodes=False, generates=True
    ),
    "transformers_assisted": Entry(
        "peers.transformers_sdpa:TransformersAssisted", decodes=False, generates=True
    ),
    "openvino": Entry(
        "peers.openvino_genai:OpenVINO",
        ("openvino_genai", "optimum.intel"),
        serving="peers.openvino_serving:OpenVINOServing",
    ),
    "llama_cpp": Entry("peers.llama_cpp:LlamaCpp", ("llama_cpp", "gguf")),
}
