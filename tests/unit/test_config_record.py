"""The `config` of a record, key by key: tools read it, so that it stays as it is however the config
is held inside."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_records import ENVIRONMENT
from test_config import DRIVER, LONGSPEC

from magicdec.cli import latency
from magicdec.cli.front import config_of
from magicdec.cli.serve import COMMANDS, is_unused
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.toml_file import to_toml
from magicdec.distributed.groups import Launch
from magicdec.latency.record import LatencyRecord
from magicdec.serving.modes import SPECULATIVE
from magicdec.serving.record import ServingRecord

MACHINE = Machine(
    8, 2, 2,
    has_compiler=True, has_shared_memory=True, has_bfloat16_products=True,
)  # fmt: skip
SELFSPEC: dict[str, Any] = {
    "model": {
        "model": "demo", "dtype": "bfloat16", "linear": "packed", "elementwise": "native",
        "elementwise_reason": "auto: --linear packed", "native_steps": "on",
        "native_steps_reason": "auto: on", "target_dtype": "bfloat16",
    },
    "draft": None,
    "parallel": {
        "rank_group": [0, 1], "device": "cpu", "collectives": "shared_memory",
        "collectives_reason": "auto: one host", "threads": 4,
    },
    "kv": {
        "policy": "streaming_llm", "budget": 257, "num_sink_tokens": 16, "window_size": 32,
        "pooling": "avg", "reselect_every": 0, "recent_window": None,
    },
    "attention": {"backend": "native", "backend_reason": "auto: native", "prefill_chunk": 512},
    "decoding": {
        "strategy": "speculative", "drafter": "self", "num_draft_tokens": 4, "tree": None,
        "pa": None, "draft_weights": None, "cuda_graphs": "off",
        "cuda_graphs_reason": "auto: off, --device cpu has none", "ignore_eos": False,
        "baseline": True, "lookup_corpus": None,
        "tree_nodes": None,
    },
    "sampling": {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "seed": 0,
    },
    "workload": {
        "dataset": "demo", "batch_size": 4, "prefix_len": 4096, "gen_len": 64, "max_len": 4160,
        "num_batches": 2, "warmup_batches": 1, "seed": 123,
    },
    "output": {
        "results": "results/runs.jsonl", "save_tokens": None, "printoutput": False,
        "benchmark": False,
    },
}  # fmt: skip
LONGSPEC_CHANGES: dict[str, Any] = {
    "draft": {
        "model": "demo-draft", "rank_group": [0], "backend": "native",
        "backend_reason": "auto: native", "native_steps": "on",
        "native_steps_reason": "auto: on", "draft_dtype": "bfloat16",
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


# Each serves in the last of its modes again.
EXPERIMENTS = {
    "inflight": "inflight --modes sequential inflight --arrival constant:5 --B 3 "
    "--goodput ttft:500 --cache_tokens 200 --temperature 0.5 --top_k 9",
    "inflight with drafts": "inflight --modes inflight+draft --draft self --gamma 2 --budget 33",
    "static beside a ring": "serve --draft ngram --modes ring+draft static --layer_split 2 --B 2",
    "ring": "recurrent --draft ngram --gamma 3 --modes sequential ring+draft --n_samples 2",
    "sync": "pipeline --draft self --budget 33 --pa 0.3 --pr 0.1 --layer_split 1.0/head --gamma 3 "
    "--modes sequential sync",
    "async that follows a script": "pipeline --emulate_acceptance 0.5 --gamma 3 "
    "--modes static async",
    "emulated stages": "pipeline --emulate_stage_ms 0.1 --emulate_acceptance 0.5 --gamma 2",
}
# Resolved in the record, or of other modes of the command.
OTHERS = ("modes", "passes", "n_samples", "has_rows_of_ring")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_of_a_record_makes_its_pass_again(
    name: str, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    command, *flags = EXPERIMENTS[name].split()
    out, alone = tmp_path / "r.jsonl", Launch(0, 1, 0, 1)
    sizes = "--num_requests 2 --prefix_len 40 --gen_len uniform:3:6 --dtype float32 --threads 1"
    place = ["--model", str(tiny_checkpoint), "--dataset", str(text_file), "--out", str(out)]
    words = [*place, *sizes.split(), *flags]
    experiment = COMMANDS[command].parse(words, alone)
    assert experiment.run(words, alone) == 0
    record = config_of.find_record(config_of.RecordSection(records=out, kind="serving"))
    file = tmp_path / "again.toml"
    file.write_text(to_toml(config_of.flags_of(record)))
    words = ["--config", str(file), "--out", str(out)]
    again = COMMANDS["serve"].parse(words, alone)
    last = experiment.options.passes[-1]
    assert again.options.passes[-1] == last and len(again.options.passes) <= 2
    for each in dataclasses.fields(experiment.options):
        is_used = not is_unused(f"serving.{each.name}", [last])
        is_used &= each.name != "speculation" or last.system == SPECULATIVE
        is_used &= each.name != "draft" or last.is_drafting
        if is_used and each.name not in OTHERS:
            values = [getattr(e.options, each.name) for e in (experiment, again)]
            assert values[0] == values[1], each.name
    for part in ("sampling", "workload", *(("kv",) * last.is_drafting)):
        assert getattr(again.config, part) == getattr(experiment.config, part)
    assert again.config.model.model == experiment.config.model.model
    if last.is_drafting:
        gammas = [e.config.decoding.num_draft_tokens for e in (experiment, again)]
        assert gammas[0] == gammas[1]
    assert again.run(words, alone) == 0
    newest = config_of.find_record(config_of.RecordSection(records=out, kind="serving"))
    assert config_of.flags_of(newest) == config_of.flags_of(record)


def test_a_mode_of_one_rank_of_several_takes_its_threads_anew(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """The rank that served alone had the threads of both, and a group of its own."""
    out, alone = tmp_path / "r.jsonl", Launch(0, 1, 0, 1)
    sizes = "--num_requests 1 --prefix_len 9 --gen_len 2 --threads 1 --modes sequential"
    place = ["--model", str(tiny_checkpoint), "--dataset", str(text_file), "--out", str(out)]
    words = [*place, *sizes.split()]
    assert COMMANDS["serve"].parse(words, alone).run(words, alone) == 0
    record = config_of.find_record(config_of.RecordSection(records=out, kind="serving"))
    assert isinstance(record, ServingRecord) and config_of.flags_of(record)["threads"] == 1
    environment = dataclasses.replace(record.environment, world_size=2)
    of_two = dataclasses.replace(record, environment=environment, threads=[2, 0])
    flags = config_of.flags_of(of_two)
    assert flags["nproc"] == 2 and not {"threads", "rank_group"} & set(flags)


def test_the_file_of_a_record_of_latency_makes_its_grid_again(tmp_path: Path) -> None:
    words = "--model demo --B 1 2 --prefix_len 64 --T 1 2 --budget 33 65 --kv_policy snapkv full"
    words += " --window_size 8 --threads 1 --repeats 2 --warmup 1"
    _, grid, _ = latency.parse(words.split())
    config = resolve(RunConfig(), MACHINE).to_dict()
    drafts = [
        {"kv_policy": kv.policy, "budget": None if kv.policy == "full" else kv.budget,
         "recent_window": kv.resolve().recent_window}
        for kv in grid.drafts
    ]  # fmt: skip
    parts = {name: config[name] for name in ("model", "parallel", "attention", "decoding")}
    parts["kv"] = {"num_sink_tokens": 16, "window_size": 8}
    parts["grid"] = dataclasses.asdict(grid) | {"drafts": drafts}
    record = LatencyRecord(config=parts, environment=ENVIRONMENT, rows=[])
    file = tmp_path / "again.toml"
    file.write_text(to_toml(config_of.flags_of(record)))
    _, again, _ = latency.parse(["--config", str(file)])
    assert dataclasses.replace(again, drafts=()) == dataclasses.replace(grid, drafts=())
    kept = [[(kv.policy, kv.budget, kv.window_size) for kv in g.drafts] for g in (grid, again)]
    assert kept[0] == kept[1]
