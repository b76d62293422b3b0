"""Name tables: what a flag accepts, and where it lives. Imports nothing of ours and no torch.

A new strategy, policy, drafter or backend is a line here and a file there; the file is imported
only when its name is chosen.
"""

from __future__ import annotations

import importlib
from typing import Any

ATTENTION_BACKENDS = {
    "sdpa": "magicdec.attention.sdpa:SDPABackend",
    "grouped": "magicdec.attention.grouped:GroupedBackend",
    "native": "magicdec.attention.native:NativeBackend",
}
KV_POLICIES = {
    "full": "magicdec.kv.full:FullKV",
    "streaming_llm": "magicdec.kv.streaming_llm:StreamingLLM",
    "snapkv": "magicdec.kv.snapkv:SnapKV",
    "verified": "magicdec.kv.verified:VerifiedKV",
}
DRAFT_READERS = {
    "view": "magicdec.decoding.view_reader:ViewReader",
    "gathered": "magicdec.decoding.gathered_reader:GatheredReader",
    "heaviest": "magicdec.decoding.heaviest_reader:HeaviestReader",
}
STRATEGIES = {
    "autoregressive": "magicdec.decoding.autoregressive:Autoregressive",
    "speculative": "magicdec.decoding.speculative:Speculative",
}
DRAFTERS = {
    "self": "magicdec.decoding.self_draft:SelfDrafter",
    "model": "magicdec.decoding.model_draft:ModelDrafter",
    "ngram": "magicdec.decoding.ngram:NgramDrafter",
}
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
LINEARS = ("torch", "packed")
COLLECTIVES = ("gloo", "shared_memory", "nccl")


def load_named(table: dict[str, str], name: str) -> Any:
    """The class behind a name of one of the tables above."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
