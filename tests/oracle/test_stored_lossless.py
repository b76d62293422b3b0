"""Weights in the formats that checkpoints store them in: under every arithmetic, speculation emits
the tokens of decoding without it, whoever drafts, in ragged batches, in flight, on two ranks, in a
ring and in pipelined speculation.

A new format is a row of tests/stored_formats.py, a new drafter a row in DRAFTS."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from conftest import Launch as LaunchRanks
from conftest import decode_both, make_requests, random_prompts
from draft_heads import HeadForm, write_head
from fake_clock import VirtualClock
from several_ranks import read_records
from stored_formats import FORMATS, VOCAB, stored

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.engine.engine import Engine
from magicdec.model.checkpoint.source import find_model
from magicdec.names import (
    DEFAULT_KV_POLICY,
    DRAFTERS,
    EAGLE,
    FULL_KV_POLICY,
    KV_POLICIES,
    LOW_BIT,
    MTP,
    NGRAM_AND,
    SAME,
    STORED,
    WITHOUT_BUDGET,
)
from magicdec.output.console import Silent
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.step_plan import BatchLimits
from magicdec.setup.loading import LoadedModels, make_draft, make_runner
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import ResolvedRun, SetupCache, find
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.strategy import Setup, make_strategy

ALONE = Launch(0, 1, 0, 1)
LENGTHS = (5, 70, 1, 33)
NEW = (20, 16, 20, 9)
GAMMA = 3
MOST = max(LENGTHS) + max(NEW) + GAMMA
BUDGET = 40
# By name: --linear and --dtype. In bfloat16 only native kernels compute a row's bits whatever else
# they compute.
ARITHMETICS = {
    "exact": ("packed", "float32"),
    "exact, bfloat16": ("packed", "bfloat16"),
    "a8": ("packed_a8", "float32"),
    "a8, bfloat16": ("packed_a8", "bfloat16"),
    "torch": ("torch", "float32"),
}
GROUPED_ARITHMETICS = ("a8", "a8, bfloat16")  # there are no others whose activations are rounded


HEADS = TemporaryDirectory(prefix="magicdec-heads-")


@cache
def head_for(path: Path) -> Path:
    """A random head for the model in a directory or file."""
    config = find_model("--model", str(path)).config
    head = Path(HEADS.name) / path.name
    write_head(head, config, HeadForm(capture=(0, 1, config.num_layers)))
    return head


@dataclass(frozen=True)
class Draft:
    """What `--draft` names, "model" for the checkpoint itself as a standalone draft, and how it
    drafts. `modes`: those of `magicdec serve` whose stages draft from it."""

    drafter: str
    kv: str = DEFAULT_KV_POLICY
    weights: str | None = None
    modes: tuple[str, ...] = ()

    @property
    def section(self) -> KVSection:
        return KVSection() if self.drafter == "ngram" else KVSection(self.kv, BUDGET, 4, 8)

    def name(self, path: Path) -> str:
        head = f"eagle:{head_for(path)}" if self.drafter.endswith(EAGLE) else EAGLE
        return self.drafter.replace("model", f"model:{path}").replace(EAGLE, head)

    def flags(self, path: Path) -> list[str]:
        flags = ["--draft", self.name(path), "--gamma", str(GAMMA)]
        if self.drafter != "ngram":
            flags += ["--kv_policy", self.kv]
            flags += [] if self.kv in WITHOUT_BUDGET else ["--budget", str(BUDGET)]
        return flags if self.weights is None else [*flags, "--draft_weights", self.weights]


DRAFTS = {
    "streaming_llm": Draft("self", modes=("pipeinfer",)),
    "snapkv": Draft("self", "snapkv", modes=("pipeinfer",)),
    "verified": Draft("self", "verified"),
    "retrieval": Draft("self", "retrieval"),
    "quantised": Draft("self", "quantised"),
    "same": Draft("self", weights="same", modes=("pipeinfer",)),
    "int4": Draft("self", weights="int4", modes=("pipeinfer",)),
    "int8": Draft("self", weights="int8", modes=("pipeinfer",)),
    "lookup": Draft("ngram", modes=("ring+draft", "pipeinfer")),
    "lookup and self": Draft("ngram+self"),
    "model": Draft("model", modes=("ring+draft", "pipeinfer")),
    "lookup and model": Draft("ngram+model"),
    "head": Draft("eagle"),
    "lookup and head": Draft("ngram+eagle"),
}
NAMES = "name", "draft", "arithmetic"
CASES = [
    (name, draft, arithmetic)
    for name, form in FORMATS.items()
    for draft, how in DRAFTS.items()
    for arithmetic in ARITHMETICS
    if how.weights in (None, SAME, *form.low_bit)
    and (form.has_groups or arithmetic not in GROUPED_ARITHMETICS)
    and (form.takes_heads or not how.drafter.endswith(EAGLE))
    and not (how.weights == "int8" and ARITHMETICS[arithmetic][1] == "float32")
]
NATIVE = [case for case in CASES if case[2] != "torch"]


@dataclass(frozen=True)
class Opened:
    """A run's model and what drafts for it."""

    run: ResolvedRun
    runner: ModelRunner
    draft: DraftModel | None


class Loaded:
    """What was found and loaded, and what each model emits without drafts, once for all cases of a
    process."""

    def __init__(self) -> None:
        self.cache = SetupCache()
        self.models = LoadedModels(torch.device("cpu"), Silent())
        self.baselines: dict[tuple[str, str], list[list[int]]] = {}

    def open(self, name: str, draft: Draft, arithmetic: str, rows: int) -> Opened:
        path = stored(name)
        linear, dtype = ARITHMETICS[arithmetic]
        config = RunConfig(
            model=ModelSection(str(path), dtype, linear),
            attention=AttentionSection(prefill_chunk=16),
            parallel=ParallelSection(device="cpu", threads=1),
            kv=draft.section,
            decoding=DecodingSection(gamma=GAMMA, draft_weights=draft.weights),
            workload=WorkloadSection(batch_size=rows, prefix_len=max(LENGTHS), gen_len=max(NEW)),
        )
        run = find(config.with_draft(draft.name(path)), ALONE, self.cache)
        form = FORMATS[name]
        assert run.config.model.target_dtype == (STORED if form.has_groups else dtype)
        group = Group((0,), 0)
        plan = ModelPlan(run.config, run.source.config, (0,), 0, row_tokens=MOST)
        runner = make_runner(plan, run.source, group, self.models)
        groups = ParallelGroups(0, 1, group, group)
        return Opened(run, runner, make_draft(run, groups, self.models, MOST))

    def baseline(self, name: str, arithmetic: str) -> list[list[int]]:
        """By decoding without drafts, of a ragged batch."""
        key = name, arithmetic
        if key not in self.baselines:
            opened = self.open(name, Draft("none"), arithmetic, len(LENGTHS))
            names = ("autoregressive",)
            _, tokens, _ = decode_both(
                opened.runner, requests(), KVSection("full"), GAMMA, 16, names=names
            )
            assert len({token for row in tokens for token in row}) > 20, "unlike tokens"
            self.baselines[key] = tokens
        return self.baselines[key]


def requests() -> list[Request]:
    return make_requests(random_prompts(LENGTHS, VOCAB), NEW)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded()


@pytest.mark.narrow(8, "pairs")
@pytest.mark.parametrize(NAMES, NATIVE)
def test_a_ragged_batch_emits_the_baselines_tokens(
    name: str, draft: str, arithmetic: str, loaded: Loaded, trusted_lookups: None
) -> None:
    opened = loaded.open(name, how := DRAFTS[draft], arithmetic, len(LENGTHS))
    kv = opened.run.config.kv
    names = ("speculative",)
    _, tokens, accepted = decode_both(
        opened.runner, requests(), kv, GAMMA, 16, how.drafter, opened.draft, names=names
    )
    assert tokens == loaded.baseline(name, arithmetic)
    counts = {count for step in accepted for count in step}
    assert min(counts) < GAMMA
    is_lucky = how.drafter == "ngram" or how.drafter.endswith(EAGLE)
    assert max(counts) > 0 or is_lucky, "nothing is repeated, and heads are random"


@pytest.mark.narrow(8, "values")
@pytest.mark.parametrize(NAMES, CASES)
def test_requests_in_flight_emit_the_baselines_tokens(
    name: str, draft: str, arithmetic: str, loaded: Loaded, trusted_lookups: None
) -> None:
    """Two rows for four requests, which arrive one after the other, and prefill in parts."""
    opened = loaded.open(name, how := DRAFTS[draft], arithmetic, rows=2)
    runner = opened.runner
    config = opened.run.config
    drafts = opened.draft.runner if opened.draft is not None else None
    keep_queries(drafts or runner, config.kv)
    decoding = DecodingSection("speculative", how.drafter, GAMMA)
    setup = Setup(runner, decoding, config.kv, draft=opened.draft, is_in_flight=True)
    shape = runner.cache.shape
    limits = BatchLimits(MOST, shape.block_size, shape.num_blocks, 1 + GAMMA, prefill_tokens=7)
    served = requests()
    for request in served:
        request.arrived_s = 3.0 * request.request_id
    Engine(runner, 16, limits, VirtualClock(1.0)).serve(make_strategy("speculative", setup), served)
    assert [request.output_ids for request in served] == loaded.baseline(name, arithmetic)


@pytest.mark.narrow(2, "values")
@pytest.mark.parametrize(NAMES, NATIVE)
def test_two_ranks_emit_the_tokens_of_lone_requests(
    name: str, draft: str, arithmetic: str, launch: LaunchRanks, tmp_path: Path, text_file: Path
) -> None:
    """As stages, and as ranks that share layers. A sum over ranks is rounded otherwise than on one
    rank, which only exact arithmetic in float32 does not show."""
    how = DRAFTS[draft]
    linear, dtype = ARITHMETICS[arithmetic]
    has_stages = bool(how.modes) or arithmetic == "exact"
    modes = ["tensor_parallel", "tensor_parallel+draft"]
    if has_stages:
        modes = ["sequential", *(how.modes or ["ring"])]
        modes += ["tensor_parallel+draft"] * (arithmetic == "exact")
    alone = ["--batch_ranks", "first"] * has_stages
    out = tmp_path / "out.jsonl"
    done = launch(
        "inflight_benchmark.py",
        "--model",
        stored(name),
        "--device",
        "cpu",
        "--threads",
        1,
        "--linear",
        linear,
        "--dtype",
        dtype,
        "--num_requests",
        3,
        "--B",
        2,
        "--out",
        out,
        "--dataset",
        text_file,
        "--prefix_len",
        "uniform:5:60",
        "--gen_len",
        "uniform:9:20",
        "--modes",
        *modes,
        *alone,
        *how.flags(stored(name)),
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    records = read_records(out)
    assert [record["name"] for record in records] == modes
    for record in records:
        assert (record["status"], record["num_differing"]) == ("verified", 0), record["name"]


def test_every_drafter_and_policy_has_a_row() -> None:
    # A checkpoint with stored numbers has no head for multi-token prediction.
    without = {MTP, f"{NGRAM_AND}{MTP}"}
    assert {draft.drafter for draft in DRAFTS.values()} == set(DRAFTERS) - without
    assert {draft.kv for draft in DRAFTS.values()} == set(KV_POLICIES) - {FULL_KV_POLICY}
    assert {draft.weights for draft in DRAFTS.values()} == {None, SAME, *LOW_BIT}
