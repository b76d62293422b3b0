"""Stage `demo_tokens` of `quick`: the demo model's float32 tokens on this device are the CPU's,
decoded step by step and replayed from CUDA graphs, alone and with drafts of itself, drafts in int4
and requests in flight; and the acceptance that forks of a text find is that of a run. Each run also
compares itself with autoregressive decoding on its device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu.in_process import call_magicdec, words_of
from gpu.scale import Suite

SELF = ("--draft", "self", "--gamma", 3)
SPARSE = ("--kv_policy", "streaming_llm", "--budget", 65)
# What is decoded, the most important first: flags of `magicdec run`.
WAYS: dict[str, Sequence[object]] = {
    "autoregressive, eager": ("--draft", "none", "--cuda_graphs", "off"),
    "autoregressive, graphs": ("--draft", "none"),
    "self-speculation, eager": (*SELF, *SPARSE, "--cuda_graphs", "off"),
    "self-speculation, graphs": (*SELF, *SPARSE),
    "snapkv": (*SELF, "--kv_policy", "snapkv", "--budget", 65),
    "int4 drafts": (*SELF, *SPARSE, "--draft_weights", "int4"),
    "int4_g128 drafts": (*SELF, *SPARSE, "--draft_weights", "int4_g128"),
    "fp8 drafts": (*SELF, *SPARSE, "--draft_weights", "fp8"),
    "retrieval": (*SELF, "--kv_policy", "retrieval", "--budget", 65),
    "model drafts": ("--draft", "model:demo-draft", "--gamma", 3),
    "grouped attention": (*SELF, *SPARSE, "--attention", "grouped"),
}
ON_CPU = ("autoregressive, graphs", "self-speculation, graphs", "int4 drafts")  # to test this stage
# On a CPU by torch's operators alone: to compile our kernels for it would take too long. One thread
# needs no core that another test uses.
PLAIN: dict[str, object] = {
    "--attention": "grouped",
    "--linear": "torch",
    "--elementwise": "torch",
    "--threads": 1,
}
MODES = ("sequential", "inflight", "inflight+draft")


def run(suite: Suite) -> None:
    cell = suite.results.cell
    cell("cpu", partial(decode, suite, "cpu", WAYS["autoregressive, eager"][:2]))
    for name, flags in WAYS.items():
        if suite.device.type == "cuda" or name in ON_CPU:
            cell(name, partial(decode_alike, suite, flags))
    cell("in flight", partial(serve, suite))
    cell("acceptance in forks", partial(accept, suite))


def common(suite: Suite, device: str, out: Path, flags: Sequence[object] = ()) -> list[object]:
    """`flags`, and those of every command."""
    settings: dict[str, object] = {
        "--model": "demo",
        "--dataset": "demo",
        "--device": device,
        "--dtype": "float32",
        "--prefix_len": 128 if suite.is_tiny else 1024,
        "--gen_len": 8 if suite.is_tiny else 32,
        "--out": out,
    }
    if device == "cpu":
        settings |= {flag: word for flag, word in PLAIN.items() if flag not in flags}
    return [*words_of(settings), *flags]


def decode(suite: Suite, device: str, flags: Sequence[object]) -> dict[str, Any]:
    """The tokens of each prompt, and what the record says of the run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "runs.jsonl")
        tokens = Path(folder, "tokens.jsonl")
        words = common(suite, device, out, flags)
        words += ["--B", 4, "--num_batches", 1, "--warmup_batches", 0]
        call_magicdec("run", [*words, "--save_tokens", tokens])
        record = json.loads(out.read_text().splitlines()[-1])
        emitted = [json.loads(line)["output_ids"] for line in tokens.read_text().splitlines()]
    metrics = record["metrics"]
    return {
        "tokens": emitted,
        "status": record["status"],
        "draft_acceptance_rate": metrics["draft_acceptance_rate"],
        "step_ms": metrics["median_step_ms"],
    }


def decode_alike(suite: Suite, flags: Sequence[object]) -> dict[str, Any]:
    """As `decode`, without tokens. Raises RuntimeError if they are not the CPU's."""
    if "cpu" not in suite.results.cells:
        raise RuntimeError("the CPU's tokens, with which these are compared, are not there")
    found = decode(suite, suite.device.type, flags)
    expected = suite.results.cells["cpu"]["tokens"]
    tokens = found.pop("tokens")
    pairs = list(zip(tokens, expected, strict=True))
    if wrong := [row for row, (ours, right) in enumerate(pairs) if ours != right]:
        row = wrong[0]
        first = next(i for i, (a, b) in enumerate(zip(*pairs[row], strict=False)) if a != b)
        raise RuntimeError(f"rows {wrong} differ from the CPU's, row {row} from token {first} on")
    return found


def serve(suite: Suite) -> dict[str, Any]:
    """The status of each mode, whose tokens are compared with those of one request at a time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "passes.jsonl")
        words = [*common(suite, suite.device.type, out), "--num_requests", 6]
        call_magicdec("serve", [*words, "--arrival", "burst", "--draft", "self", "--modes", *MODES])
        records = [json.loads(line) for line in out.read_text().splitlines()]
    found = {record["name"]: record["status"] for record in records}
    if wrong := [
        name for name, status in found.items() if status not in ("verified", "unverified")
    ]:
        raise RuntimeError(f"other tokens than one request at a time: {', '.join(wrong)}")
    return found


def accept(suite: Suite) -> dict[str, Any]:
    """Tokens a step by the acceptance at every position, in forks, and of a run with the same
    texts. Raises RuntimeError if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "acceptance.jsonl")
        runs = Path(folder, "runs.jsonl")
        shape = [*SELF, *SPARSE, "--B", 4]
        call_magicdec("acceptance", [*common(suite, suite.device.type, table), *shape])
        once = ["--num_batches", 1, "--warmup_batches", 0, "--no_baseline", "--ignore_eos"]
        call_magicdec("run", [*common(suite, suite.device.type, runs), *shape, *once])
        record = json.loads(table.read_text().splitlines()[-1])
        run = json.loads(runs.read_text().splitlines()[-1])
    ours = record["rows"][-1]["tokens_per_step"]
    length = run["metrics"]["mean_acceptance_length"]
    if not record["is_forked"] or abs(ours - length) > 1e-9:
        raise RuntimeError(f"forks say {ours} tokens a step, the run has {length}")
    num_drafts = sum(map(len, record["accepted"])) * record["config"]["decoding"]["gamma"]
    return {"tokens_per_step": ours, "draft_tokens_per_s": num_drafts / record["seconds"]}
