"""The decoders that `bench_peers.py` compares: a file each, and a line each in `PEERS`.

Imports nothing but the standard library: it is read in the environments of all peers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """`where` is "module:class". A peer that needs `modules` of an environment of its own is given
    one by the flag `--NAME_python`, or is left out, and loads what its `export` wrote. Peers that
    `decode` are in the table of decode steps, the others in that of whole generations alone."""

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
