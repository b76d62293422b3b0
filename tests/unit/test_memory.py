"""The memory plan: held to what a run allocates; what the system says is free; the refusals; and
the estimates of what a run needs for a short time."""

import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    HANG,
    TINY,
    make_requests,
    make_runner,
    num_parameters,
    random_prompts,
    tiny_transformer,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.check.replays import PrefilledMeans
from magicdec.bench.measure import execute
from magicdec.bench.prepare import prepare as prepare_serving
from magicdec.cli.drivers import TargetSection
from magicdec.cli.serve import COMMANDS, RecordFile
from magicdec.config.capacity import Capacity
from magicdec.config.choices.choice import Choice
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig, ResolvedDraft
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.hardware.costs import stored_bytes
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import load_transformer
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.config import ExpertsConfig, ModelConfig
from magicdec.model.linear.packed import Linear, PackedLinear, exchange
from magicdec.model.presets.presets import PRESETS
from magicdec.model.transformer import Transformer
from magicdec.names import LOW_BIT
from magicdec.records.reading import load_passes
from magicdec.runner.request import Batch
from magicdec.setup import loading, prepare
from magicdec.setup.memory_check import check_memory, free_host_memory, largest, needed
from magicdec.setup.memory_plan import (
    Models,
    first_choice_bytes,
    forward_bytes,
    plan_of,
    plan_rank,
    working_bytes,
)
from magicdec.setup.model_plan import Kinds, ModelPlan, StagePart
from magicdec.speculation.policies.policy import keep_queries, make_draft_kv, make_policy
from magicdec.systems.modes import Pass

ALONE = Launch(0, 1, 0, 1)
SMALL = WorkloadSection(
    batch_size=2, prefix_len=100, gen_len=8, num_batches=1, warmup_batches=0, dataset="demo"
)


def parameter_bytes(model: Transformer) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(2, 3)], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_weights_are_those_of_the_model(tied: bool, shard: Shard, biases: bool) -> None:
    config = replace(
        TINY, tie_word_embeddings=tied, qkv_bias=biases, output_bias=biases, mlp_bias=biases
    )
    model = Transformer(config, shard)
    assert stored_bytes(config, shard, 4, is_packed=False) == parameter_bytes(model)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_replace_the_others(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        TINY,
        vocab_size=128,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=64,
        tie_word_embeddings=tied,
    )
    monkeypatch.setattr("magicdec.model.linear.packed.library", lambda: FakeLibrary)
    model = Transformer(config).to(torch.bfloat16)
    model.pack()
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    assert stored_bytes(config, Shard(), 2, is_packed=True) == parameter_bytes(model)
    for low_bit in LOW_BIT:
        model = loaded(config, low_bit)
        plain = stored_bytes(config, Shard(), 2, is_packed=False, low_bit=low_bit)
        assert plain == parameter_bytes(model)
        model.pack()
        packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
        assert packed and all(m.packed.dtype == torch.uint8 for m in packed)
        stored = stored_bytes(config, Shard(), 2, is_packed=True, low_bit=low_bit)
        assert stored == parameter_bytes(model) == plain


def loaded(config: ModelConfig, low_bit: str) -> Transformer:
    source = RandomWeights(expected_shapes(config))
    place = (Shard(), None, torch.bfloat16, torch.device("cpu"))
    return load_transformer(config, source, *place, stored_as=low_bit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *LOW_BIT])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "experts", [None, ExpertsConfig(7, 2, 32, shared_width=64, has_shared_gate=True)]
)
def test_what_fills_up_packed_weights_is_planned(
    experts: ExpertsConfig | None, tied: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of outputs of the tiny model is that of a whole block."""
    monkeypatch.setattr("magicdec.model.linear.packed.library", lambda: FakeLibrary)
    config = replace(TINY, tie_word_embeddings=tied, experts=experts)
    if dtype in LOW_BIT:
        config = replace(config, hidden_size=96, intermediate_size=96)
        model = loaded(config, dtype)
    else:
        model = Transformer(config).to(getattr(torch, dtype))
    model.pack()
    kinds = Kinds("float32" if dtype == "float32" else "bfloat16", dtype, "packed")
    plan = ModelPlan(config_of("llama-68m"), config, (0,), 0)
    monkeypatch.setattr(ModelPlan, "kinds", kinds)
    assert plan.weight_bytes == parameter_bytes(model)


class FakeLibrary:
    """Sizes count here, not values."""

    @staticmethod
    def magicdec_pack(*args: object) -> None:
        pass

    magicdec_pack_groups = magicdec_pack_float32 = magicdec_pack


def speculative(drafter: str, kv: KVSection, backend: str = "auto") -> RunConfig:
    """Under a rolling cache, prompts are longer than a chunk."""
    config = RunConfig(
        kv=kv,
        decoding=DecodingSection("speculative", drafter, 3),
        attention=AttentionSection(backend),
    )
    if drafter == "self":
        return config
    config = replace(config, model=TargetSection(), draft=DraftSection())
    if kv.policy != "streaming_llm":
        return config
    attention = replace(config.attention, prefill_chunk=20)
    return replace(config, attention=attention, workload=replace(SMALL, prefix_len=300))


NARROW = ("baseline", "snapkv", "snapkv draft", "rolling draft", "quantised")
PLAIN = RunConfig(decoding=DecodingSection("autoregressive"))
RUNS = {
    "baseline": PLAIN,
    "sdpa": replace(PLAIN, attention=AttentionSection("sdpa")),
    "int8 sdpa": replace(PLAIN, attention=AttentionSection("sdpa", kv_dtype="int8")),
    "int4 sdpa": replace(PLAIN, attention=AttentionSection("sdpa", kv_dtype="int4")),
    "streaming": speculative("self", KVSection(budget=33)),
    "snapkv": speculative("self", KVSection("snapkv", 40)),
    "snapkv sdpa": speculative("self", KVSection("snapkv", 40), "sdpa"),
    "quantised": speculative("self", KVSection("quantised"), "sdpa"),
    "quantised int8": speculative("self", KVSection("quantised", draft_kv_dtype="int8"), "native"),
    "rolling draft": speculative("model", KVSection(budget=33)),
    "full draft": speculative("model", KVSection("full")),
    "snapkv draft": speculative("model", KVSection("snapkv", 40)),
}


@pytest.mark.parametrize(
    "name", [n if n in NARROW else pytest.param(n, marks=pytest.mark.wide) for n in RUNS]
)
def test_caches_are_those_of_a_run(
    name: str, tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The verdict's caches of single layers come after the passes, and go again.
    monkeypatch.setattr(PrefilledMeans, "forwards", lambda *given: None)
    config = RUNS[name]
    backend = "grouped" if config.attention.backend == "auto" else config.attention.backend
    dtype = "float32" if config.attention.kv_dtype == "auto" else "bfloat16"
    config = replace(
        config,
        workload=config.workload if config.workload.prefix_len == 300 else SMALL,
        model=replace(config.model, dtype=dtype),
        attention=replace(config.attention, backend=backend),
        parallel=ParallelSection(device="cpu", threads=1),
        output=OutputSection(results=str(tmp_path / "runs.jsonl")),
    )
    prepared = prepare.prepare(config, ALONE)
    assert made == [] and prepared.memory.endswith("GB free")
    draft = prepared.draft_source
    models = Models(prepared.source.config, None if draft is None else draft.config)
    plan = plan_rank(prepared.config, models, 0)
    execute(prepared)
    target, *drafts = made
    assert plan.kv == target
    standalone = config.draft is not None
    # A standalone draft has its cache and what SnapKV gathers of it; self-speculation gathers anew
    # each pass, and lets the old copy go.
    expected = sum(set(drafts)) if standalone else max(drafts, default=0)
    draft_config = models.target if models.draft is None else models.draft
    drafts_kept = make_policy(config.kv).observed_tokens * SMALL.batch_size
    queries = drafts_kept * draft_config.num_layers * draft_config.num_heads * draft_config.head_dim
    assert plan.draft_kv == expected + 4 * queries
    assert (plan.draft_weights > 0) == standalone


@pytest.mark.narrow(4)
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((name, "") for name in ("sequential", "inflight+draft", "ring", "ring+draft")),
        *((name, "") for name in ("pipeline", "pipeinfer")),
        ("inflight+draft", "--prefix_cache --block_tokens 16 --cache_tokens 4000"),
        ("inflight+draft", "--prefix_cache --block_tokens 16 --cache_tokens 40"),
        ("inflight+draft", "--prefix_cache --kv_policy streaming_llm --budget 17"),
        ("inflight+draft", "--prefix_cache --budget 17 --cache_tokens 4000"),
    ],
)
def test_what_a_mode_loads_is_what_was_planned(
    mode: str, options: str, tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = list[int]()
    load = loading.load_kind

    def record_model(*args: Any) -> Transformer:
        weights.append(parameter_bytes(model := load(*args)))
        return model

    monkeypatch.setattr(loading, "load_kind", record_model)
    draft = "--draft model:demo-draft" if Pass.named(mode).is_drafting else ""
    words = f"--modes {mode} --num_requests 4 --prefix_len 20 --gen_len 4 --dtype float32 {draft} "
    words += f"--attention grouped --linear torch --threads 1 --out {tmp_path / 'out.jsonl'} "
    words += options
    experiment = COMMANDS["serve"].parse(words.split(), ALONE)
    prepared = prepare_serving(experiment.config, experiment.options, ALONE)
    plan = prepared.systems[0].plan(Pass.named(mode), (0,))
    experiment.measure(prepared, RecordFile(tmp_path / "out.jsonl"))
    assert weights == [size for size in (plan.weights, plan.draft_weights) if size]
    assert made == [size for size in (plan.kv, plan.draft_kv) if size]
    assert len(made) == 1 + Pass.named(mode).is_drafting


def config_of(
    name: str, ranks: int = 1, B: int = 4, prefix: int = 4096, **more: object
) -> ResolvedConfig:
    """For a preset in bfloat16 on CPUs."""
    machine = Machine(
        num_cpus=8,
        world_size=ranks,
        local_world_size=ranks,
        has_cuda=False,
        has_compiler=False,
        shared_memory_obstacle=None,
        has_bfloat16_products=False,
    )
    config = RunConfig(
        model=ModelSection(f"random:{name}", "bfloat16"),
        workload=WorkloadSection(batch_size=B, prefix_len=prefix),
        decoding=DecodingSection("autoregressive"),
    )
    return resolve(config, machine)


ENDS = (True, False, None)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_layers_alone(tied: bool) -> None:
    model = replace(TINY, num_layers=5, tie_word_embeddings=tied)
    config = config_of("llama-3.2-1b")
    whole = plan_rank(config, Models(model), 0)
    for layers, has_ends in itertools.product((range(2), range(2, 5), range(1, 3)), ENDS):
        plan = plan_of([ModelPlan(config, model, (0,), 0, StagePart(layers, has_ends))])
        loaded = Transformer(model, Shard(), layers, has_ends).to(torch.bfloat16)
        assert plan.weights == parameter_bytes(loaded) and plan.kv * 5 == whole.kv * len(layers)


def test_numbers_of_a_known_model() -> None:
    """Llama-2-7B: 6.74e9 parameters, 0.5 MB of KV a token in bfloat16."""
    plan = plan_rank(
        config_of("llama-2-7b", B=2, prefix=4000), Models(PRESETS["llama-2-7b"].config), 0
    )
    assert plan.weights == 2 * num_parameters(PRESETS["llama-2-7b"].config)
    assert plan.kv == 2 * 4064 * 2 * 32 * 4096 * 2
    assert plan.draft_weights == plan.draft_kv == 0
    assert plan.total == plan.weights + plan.kv + plan.working


def test_int8_weights_are_a_byte_each() -> None:
    """Llama-3.2-1B: the embedding stays in bfloat16, the tied head becomes a matrix of its own."""
    model = PRESETS["llama-3.2-1b"].config
    config = config_of("llama-3.2-1b", B=1)
    config = replace(config, model=replace(config.model, target_dtype="int8"))
    plan = plan_rank(config, Models(model), 0)
    matrices = 16 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192)
    head = 128256 * 2048
    norms = 33 * 2048
    scales = (matrices + head) // 128 * 2
    assert plan.weights == matrices + head + scales + 2 * (head + norms)
    section = ResolvedDraft("demo-draft", (0,), Choice("grouped"), Choice("off"), "int8")
    draft = replace(config, draft=section, model=replace(config.model, target_dtype="bfloat16"))
    both = plan_rank(draft, Models(model, model), 0)
    assert both.draft_weights == plan.weights
    assert both.weights == 2 * num_parameters(model)


def test_ranks_of_a_host_share_its_memory() -> None:
    models = Models(PRESETS["llama-2-7b"].config)
    one = needed(config_of("llama-2-7b"), models, ALONE)
    two = needed(config_of("llama-2-7b", 2), models, Launch(1, 2, 1, 2))
    assert two.kv == one.kv
    embedding = 2 * 32000 * 4096
    vectors = 2 * 65 * 4096
    assert two.weights == one.weights + embedding + vectors  # these are whole on both
    hosts = needed(config_of("llama-2-7b", 4), models, Launch(3, 4, 1, 2))
    assert hosts.kv == one.kv // 2
    device = config_of("llama-2-7b", 2)
    device = replace(device, parallel=replace(device.parallel, device="cuda"))
    assert needed(device, models, Launch(0, 2, 0, 2)).kv == one.kv // 2


def refusal(config: ResolvedConfig, models: Models, free: int, launch: Launch = ALONE) -> str:
    with pytest.raises(ValueError) as caught:
        check_memory(config, models, launch, free)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plan_that_no_gpu_of_the_host_holds_is_refused() -> None:
    config = config_of("llama-2-7b", 2)
    config = replace(config, parallel=replace(config.parallel, device="cuda"))
    models = Models(PRESETS["llama-2-7b"].config)
    text = refusal(config, models, 10**9, Launch(0, 2, 0, 2))
    assert text.startswith("--B ") and " 1.00 GB are free" in text and "GPU" in text


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    config = config_of("llama-2-7b", B=64)
    models = Models(PRESETS["llama-2-7b"].config)
    plan = needed(config, models, ALONE)
    assert check_memory(config, models, ALONE, plan.total).endswith(
        f"on this host; {plan.total / 1e9:.2f} GB free"
    )
    text = refusal(config, models, 64 * 10**9)
    assert text.startswith(f"--B 64 --prefix_len 4096 needs {plan.total / 1e9:.2f} GB (weights 13.")
    B, prefix = (int(text.split(f"--{flag} ")[-1].split()[0]) for flag in ("B", "prefix_len"))
    assert text.endswith(f"; --B {B} at this prefix or --prefix_len {prefix} at this B would fit")

    def total(batch_size: int, prefix_len: int) -> int:
        changed = Capacity(batch_size, prefix_len, max_len=prefix_len + 64, new_tokens=64)
        return needed(replace(config, capacity=changed), models, ALONE).total

    assert total(B, 4096) <= 64 * 10**9 < total(B + 1, 4096)
    assert total(64, prefix) <= 64 * 10**9 < total(64, prefix + 1)
    assert "how much is free is not known" in check_memory(config, models, ALONE, None)


def test_advice_at_the_edges() -> None:
    config = config_of("llama-2-7b", B=16)
    models = Models(PRESETS["llama-2-7b"].config)

    def free(B: int, prefix: int) -> int:
        return needed(config_of("llama-2-7b", B=B, prefix=prefix), models, ALONE).total

    text = refusal(config, models, free(16, 50))
    assert text.endswith("; --prefix_len 50 at this B would fit, at this prefix not even --B 1")
    assert refusal(config, models, free(1, 100)).endswith("; --B 1 --prefix_len 100 would fit")
    one_token = config_of("llama-2-7b", B=16, prefix=1)
    assert refusal(one_token, models, free(3, 1)).endswith("; --B 3 at this prefix would fit")
    text = refusal(config, models, 13 * 10**9)
    assert text.endswith(
        "; no --B and --prefix_len would fit: choose a smaller model, or more ranks elsewhere"
    )


def test_a_model_too_large_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "free_device_memory", lambda kind, rank: 16 * 10**9)
    monkeypatch.setattr(
        "magicdec.model.checkpoint.random_weights.RandomWeights.read",
        lambda *args: pytest.fail("read"),
    )
    config = RunConfig(
        model=ModelSection("random:llama-3.1-70b", "bfloat16", "torch"),
        parallel=ParallelSection(device="cpu"),
        attention=AttentionSection("grouped"),
        workload=SMALL,
    )
    with pytest.raises(ValueError) as caught:
        prepare.prepare(config, ALONE)
    text = str(caught.value)
    assert (
        text.startswith("--B 2 --prefix_len 100 needs 14") and "16.00 GB are free; no --B" in text
    )
    assert "(weights 141.1" in text


def test_largest() -> None:
    for answer in range(1, 20):
        fits: Callable[[int], bool] = lambda n, a=answer: n <= a  # noqa: E731
        assert largest(fits, 20) == min(answer, 19)
    assert largest(lambda n: False, 20) == 0 == largest(lambda n: True, 1)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_is_free(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert free_host_memory(tmp_path) == 500 * 1024
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    groups = tmp_path / "sys/fs/cgroup"
    for name, limit in (("a", "400000"), ("a/b", "max")):
        write(groups / name / "memory.max", limit + "\n")
        write(groups / name / "memory.current", "300000\n")
        write(groups / name / "memory.stat", "anon 1\ninactive_file 20000\nactive_file 1000\n")
    assert free_host_memory(tmp_path) == 121_000
    write(tmp_path / "proc/self/cgroup", "3:cpu:/\n2:memory:/gone\n")  # version 1, in a container
    write(groups / "memory/memory.limit_in_bytes", "200000\n")
    write(groups / "memory/memory.usage_in_bytes", "150000\n")
    write(groups / "memory/memory.stat", "inactive_file 10\n")
    assert free_host_memory(tmp_path) == 50_010
    write(groups / "memory/memory.usage_in_bytes", "250000\n")
    assert free_host_memory(tmp_path) == 0


def test_a_model_is_made_without_torchs_compiler() -> None:
    """Which would be imported to draw an embedding that nobody reads: 130 MB of every process."""
    code = (
        "import sys, torch; from magicdec.model.presets.presets import PRESETS\n"
        "from magicdec.model.transformer import Transformer\n"
        "with torch.device('meta'): model = Transformer(PRESETS['llama-68m'].config)\n"
        "assert model.embedding.weight.is_meta and 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "grouped": GroupedBackend,
    "sdpa": SDPABackend,
}
ROWS = 3
PREFIX = 900
NEW = 8


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's allocator held at once beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = 0
    most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def make_model_plan(backend: str, kv: KVSection) -> ModelPlan:
    config = RunConfig(
        model=ModelSection(dtype="float32"),
        kv=kv,
        attention=AttentionSection(backend),
        decoding=DecodingSection("speculative", "self", 3),
        workload=WorkloadSection(batch_size=ROWS, prefix_len=PREFIX, gen_len=NEW),
    )
    return ModelPlan(resolve(config, Machine(2)), TINY, (0,), 0)


@pytest.mark.parametrize(
    "kv",
    [
        KVSection("snapkv", 60),
        KVSection("snapkv", 60, window_size=8),
        KVSection("verified"),
        KVSection("retrieval"),
    ],
    ids=["snapkv", "snapkv, window of 8", "verified", "retrieval"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_first_choice_takes(backend: str, kv: KVSection) -> None:
    """The caches that a reader keeps are counted apart."""
    runner = make_runner(tiny_transformer(), ROWS, PREFIX + NEW + 3, BACKENDS[backend](), NEW + 3)
    requests = make_requests(random_prompts([PREFIX] * ROWS, TINY.vocab_size), NEW)
    keep_queries(runner, kv)
    batch = Batch(tuple(Engine(runner, 128).prefill(requests)))
    reader = make_draft_kv(runner, kv)
    found = peak_bytes(lambda: reader.admit(batch.requests))
    if kv.policy == "snapkv":
        found -= reader.runner.cache.num_bytes
    plan = make_model_plan(backend, kv)
    estimate = first_choice_bytes(plan)
    print(f"{backend} {kv.policy}: {found} allocated, {estimate} estimated")
    assert found / 1.5 < estimate < 2 * found
    assert working_bytes(plan) >= estimate


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_of_a_prompt(backend: str) -> None:
    runner = make_runner(tiny_transformer(), 1, PREFIX, BACKENDS[backend]())
    engine = Engine(runner, 128)
    chunk = 128
    requests = make_requests(random_prompts([PREFIX - 1], TINY.vocab_size), NEW)
    found = peak_bytes(lambda: engine.prefill(requests))
    plan = make_model_plan(backend, KVSection("full"))
    estimate = forward_bytes(plan, (1, chunk, PREFIX))
    print(f"{backend} chunk: {found} allocated, {estimate} estimated")
    assert found / 1.5 < estimate < 2 * found


def test_no_first_choice_for_a_view_of_fixed_positions() -> None:
    for kv in (KVSection("full"), KVSection("streaming_llm")):
        assert first_choice_bytes(make_model_plan("grouped", kv)) == 0


def test_a_layer_is_freed_before_the_next_is_packed() -> None:
    """Else a model is in memory twice while it is packed."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
    )
    seen = list[weakref.ref[nn.Module]]()

    def make(layer: Linear) -> Linear:
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(layer))
        return nn.Linear(4, 4)

    exchange(model, make)
    assert len(seen) == 3 and all(earlier() is None for earlier in seen)


@pytest.mark.wide
def test_a_model_takes_what_was_planned(tmp_path: Path) -> None:
    """Of the process that loads, packs and decodes, by the peak of its resident memory."""
    out = tmp_path / "runs.jsonl"
    few = [
        "--B",
        "1",
        "--prefix_len",
        "128",
        "--gen_len",
        "4",
        "--num_batches",
        "1",
        "--warmup_batches",
        "0",
    ]
    command = [sys.executable, "-m", "magicdec", "run", "--model", "random:gpt2", "--out", str(out)]
    subprocess.run([*command, *few], check=True, capture_output=True, timeout=HANG)
    *_, record = load_passes(out)  # the pass that drafts holds most
    memory = record.memory
    assert memory is not None and memory.peak_bytes is not None
    assert memory.process_bytes is not None
    taken = memory.peak_bytes - memory.process_bytes
    assert 0.8 * memory.total_bytes < taken < 1.2 * memory.total_bytes
