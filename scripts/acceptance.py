"""Measure the acceptance baselines of the gate again: demo models, every drafter and KV policy.

    python scripts/acceptance.py --out results/baselines/acceptance.jsonl

Runs on one rank in float32. The records keep their samples, so that `magicdec table --check` can
compute their metrics again.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from magicdec.config.draft_section import DraftSection
from magicdec.config.model_section import ModelSection
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.records.record import RunRecord, append_record
from magicdec.run.run import execute
from magicdec.setup.prepare import prepare

# The share of the acceptance rate whose loss `magicdec compare` tolerates.
MARGIN, FULL_MARGIN = 0.02, 0.0


@dataclass(frozen=True)
class Case:
    drafter: str
    kv: KVSection
    gamma: int = 4
    batch_size: int = 4

    @property
    def is_certain(self) -> bool:
        """Whether all drafts are accepted, because the draft is the target with the full KV."""
        return self.drafter == "self" and self.kv.policy == "full"

    def __str__(self) -> str:
        budget = "" if self.kv.policy == "full" else f" {self.kv.budget}"
        return f"{self.drafter} {self.kv.policy}{budget}, gamma {self.gamma}"


FULL = KVSection("full")
CASES = (
    *(
        Case("self", kv, gamma, batch_size=8)
        for gamma in (2, 4)
        for kv in (*(KVSection("streaming_llm", b) for b in (33, 65, 129, 257, 513)), FULL)
    ),
    *(Case("self", KVSection("snapkv", budget)) for budget in (129, 257, 513)),
    *(Case("self", KVSection("verified", budget)) for budget in (129, 257, 513)),
    *(Case("self", KVSection("retrieval", budget)) for budget in (129, 257, 513)),
    Case("ngram", FULL),  # reads no cache: one row for all policies
    Case("model", FULL),
    Case("model", KVSection("streaming_llm", 257)),
    Case("model", KVSection("snapkv", 257)),
)


def make_config(case: Case, dataset: str, threads: int | None) -> RunConfig:
    return RunConfig(
        model=ModelSection("demo", "float32"),
        draft=DraftSection("demo-draft") if case.drafter == "model" else None,
        parallel=ParallelSection(threads=threads),
        kv=case.kv,
        decoding=DecodingSection("speculative", case.drafter, case.gamma, ignore_eos=True),
        workload=WorkloadSection(
            dataset,
            batch_size=case.batch_size,
            prefix_len=4096,
            num_batches=1,
            warmup_batches=0,
        ),
    )


def measure(case: Case, dataset: str, threads: int | None) -> RunRecord:
    config = make_config(case, dataset, threads)
    record = execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=True).record
    assert record.metrics is not None, "a baseline run passes its check"
    return dataclasses.replace(record, margin=FULL_MARGIN if case.is_certain else MARGIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results/baselines/acceptance.jsonl"))
    parser.add_argument("--dataset", default="demo")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads [number of cores]")
    args = parser.parse_args()
    partial = args.out.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    for case in CASES:
        started = time.perf_counter()
        record = measure(case, args.dataset, args.threads)
        append_record(partial, record)
        assert record.metrics is not None
        rate, took = record.metrics.acceptance_rate, time.perf_counter() - started
        print(f"{case}: {rate:.4f} ({took:.0f} s)", flush=True)
    partial.replace(args.out)


if __name__ == "__main__":
    main()
