"""The `config` of a record, key by key: tools read it, so that it stays as it is however the config
is held inside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from magicdec.cli.serving import inflight, pipeline, recurrent, steps
from test_config import DRIVER, LONGSPEC

from magicdec.cli.front import config_of
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.toml_file import to_toml
from magicdec.distributed.groups import Launch

MACHINE = Machine(
    8, 2, 2,
    has_compiler=True, has_shared_memory=True, has_fast_bfloat16=True, has_avx512_bf16=True,
)  # fmt: skip
SELFSPEC: dict[str, Any] = {
    "model": {
        "model": "demo", "dtype": "bfloat16", "linear": "packed",
        "elementwise": "native", "elementwise_reason": "auto: --linear packed",
        "native_steps": "on", "native_steps_reason": "auto: on", "target_dtype": "bfloat16",
    },
    "draft": None,
    "parallel": {
        "rank_group": [0, 1], "device": "cpu",
        "collectives": "shared_memory", "collectives_reason": "auto: one host", "threads": 4,
    },
    "kv": {
        "policy": "streaming_llm", "budget": 257, "num_sink_tokens": 16, "window_size": 32,
        "pooling": "avg", "reselect_every": 0, "recent_window": None,
        "draft_kv_dtype": "bfloat16",
    },
    "attention": {"backend": "native", "backend_reason": "auto: native", "prefill_chunk": 512},
    "decoding": {
        "strategy": "speculative", "drafter": "self", "num_draft_tokens": 4,
        "tree": None, "tree_nodes": None, "machine": None,
        "cuda_graphs": "off", "cuda_graphs_reason": "auto: off, --device cpu has none",
        "ignore_eos": False, "baseline": True,
    },
    "sampling": {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "seed": 0,
    },
    "workload": {
        "dataset": "demo", "batch_size": 4, "prefix_len": 4096, "gen_len": 64, "max_len": 4160,
        "num_batches": 2, "warmup_batches": 1, "seed": 123,
    },
    "output": {
        "results": "results/runs.jsonl", "save_tokens": None, "printoutput": False,
        "benchmark": False, "profile": None,
    },
}  # fmt: skip
LONGSPEC_CHANGES: dict[str, Any] = {
    "draft": {
        "model": "demo-draft", "rank_group": [0],
        "backend": "native", "backend_reason": "auto: native",
        "native_steps": "on", "native_steps_reason": "auto: on", "draft_dtype": "bfloat16",
    },
    "decoding": SELFSPEC["decoding"] | {"drafter": "model"},
}  # fmt: skip


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


EXPERIMENTS: dict[str, tuple[Any, str]] = {
    "inflight": (
        inflight,
        "--modes inflight --arrival constant:5 --B 3 --goodput ttft:500 --cache_tokens 200 "
        "--temperature 0.5 --top_k 9",
    ),
    "inflight with drafts": (inflight, "--modes inflight --draft self --gamma 2 --budget 33"),
    "recurrent": (recurrent, "--draft ngram --gamma 3 --modes sequential ring --n_samples 2"),
    "pipeline": (
        pipeline,
        "--draft self --budget 33 --pa 0.3 --np 2 --layer_split 1.0/head --modes sequential sync",
    ),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_of_a_record_makes_its_command_again(
    name: str, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """The last record is that of the pass with drafts, where there is one."""
    module, flags = EXPERIMENTS[name]
    out, alone = tmp_path / "r.jsonl", Launch(0, 1, 0, 1)
    sizes = "--num_requests 2 --prefix_len 40 --gen_len uniform:3:6 --dtype float32 --threads 1"
    place = ["--model", str(tiny_checkpoint), "--dataset", str(text_file), "--out", str(out)]
    words = [*place, *sizes.split(), *flags.split()]
    experiment = module.parse(words, alone)
    assert steps.serve(experiment, words, alone) == 0
    kind = json.loads(out.read_text().splitlines()[0])["kind"]
    record = config_of.find_record(config_of.RecordSection(records=out, kind=kind))
    file = tmp_path / "again.toml"
    file.write_text(to_toml(config_of.flags_of(record)))
    again = module.parse(["--config", str(file), "--out", str(out)], alone)
    for each in dataclasses.fields(experiment.options):
        if each.name not in ("modes", "n_samples"):  # resolved in the record
            values = [getattr(e.options, each.name) for e in (experiment, again)]
            assert values[0] == values[1], each.name
    for part in ("sampling", "kv", "workload"):
        assert getattr(again.config, part) == getattr(experiment.config, part)
    assert again.config.model.model == experiment.config.model.model
