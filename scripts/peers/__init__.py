"""The decoders that `bench_peers.py` compares: each has a file here and an entry in `PEERS`.

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
    whole generations."""

    where: str
    modules: tuple[str, ...] = ()
    decodes: bool = True
    generates: bool = False

    def load(self) -> Any:
        """The class, a `peers.peer.Peer`."""
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(module), name)


PEERS = {
    "magicdec": Entry("peers.magicdec_engine:Magicdec", generates=True),
    "magicdec_selfspec": Entry(
        "peers.magicdec_engine:MagicdecSelfSpeculation", decodes=False, generates=True
    ),
    "transformers": Entry("peers.transformers_sdpa:Transformers"),
    "transformers_generate": Entry(
        "peers.transformers_sdpa:TransformersGenerate", decodes=False, generates=True
    ),
    "transformers_assisted": Entry(
        "peers.transformers_sdpa:TransformersAssisted", decodes=False, generates=True
    ),
    "openvino": Entry("peers.openvino_genai:OpenVINO", ("openvino_genai", "optimum.intel")),
    "llama_cpp": Entry("peers.llama_cpp:LlamaCpp", ("llama_cpp", "gguf")),
}
