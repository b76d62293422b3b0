"""The `config` of a record, key by key: tools read it, so that it stays as it is however the config
is held inside."""

import json
from typing import Any

import pytest
from test_config import DRIVER, LONGSPEC

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig

MACHINE = Machine(
    8,
    2,
    2,
    has_compiler=True,
    shared_memory_obstacle=None,
    has_bfloat16_products=True,
)
SELFSPEC: dict[str, Any] = {
    "model": {
        "model": "demo",
        "dtype": "bfloat16",
        "linear": "packed",
        "elementwise": "native",
        "elementwise_reason": "auto: --linear packed",
        "native_steps": "on",
        "native_steps_reason": "auto: on",
        "target_dtype": "bfloat16",
    },
    "draft": None,
    "parallel": {
        "rank_group": [0, 1],
        "device": "cpu",
        "collectives": "shared_memory",
        "collectives_reason": "auto: one host",
        "threads": 4,
    },
    "kv": {
        "policy": "streaming_llm",
        "budget": 257,
        "num_sink_tokens": 16,
        "window_size": 32,
        "pooling": "avg",
        "reselect_every": 0,
        "draft_kv_dtype": "int4",
        "recent_window": None,
    },
    "attention": {
        "backend": "native",
        "backend_reason": "auto: native",
        "prefill_chunk": 512,
        "kv_dtype": "bfloat16",
    },
    "decoding": {
        "strategy": "speculative",
        "drafter": "self",
        "gamma": 4,
        "pa": None,
        "draft_weights": None,
        "cuda_graphs": "off",
        "cuda_graphs_reason": "auto: off, --device cpu has none",
        "ignore_eos": False,
        "baseline": True,
        "emulate_acceptance": None,
        "lookup_corpus": None,
        "step_cost": None,
    },
    "sampling": {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "seed": 0,
    },
    "workload": {
        "dataset": "demo",
        "batch_size": 4,
        "prefix_len": 4096,
        "gen_len": 64,
        "num_batches": 5,
        "warmup_batches": 1,
        "seed": 123,
        "skip_tokens": None,
        "prompt_format": "plain",
        "max_len": 4160,
    },
    "output": {
        "results": "results/runs.jsonl",
        "save_tokens": None,
        "printoutput": False,
        "verbose": False,
        "benchmark": False,
    },
}
LONGSPEC_CHANGES: dict[str, Any] = {
    "draft": {
        "model": "demo-draft",
        "rank_group": [0],
        "backend": "native",
        "backend_reason": "auto: native",
        "native_steps": "on",
        "native_steps_reason": "auto: on",
        "draft_dtype": "bfloat16",
        "state_layers": [],
    },
    "decoding": SELFSPEC["decoding"] | {"drafter": "model"},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(DRIVER, SELFSPEC), (LONGSPEC, SELFSPEC | LONGSPEC_CHANGES)],
    ids=["selfspec", "longspec"],
)
def test_every_key_and_value_stays(config: RunConfig, expected: dict[str, Any]) -> None:
    """In their order, which `json.dumps` keeps."""
    found = json.dumps(resolve(config, MACHINE).to_dict(), indent=1)
    assert found == json.dumps(expected, indent=1)


def test_one_rank_has_no_collectives() -> None:
    parallel = resolve(RunConfig(), Machine(1)).to_dict()["parallel"]
    assert (parallel["collectives"], parallel["collectives_reason"]) == (None, None)
