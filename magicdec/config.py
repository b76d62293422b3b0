"""RunConfig: every default and every check of what a user can write. Imports no torch.

Owns the sections of a run, their command-line names, the tables of names a user may choose from,
and the resolution of `auto`. A component is given its own section, never the whole. Must not know
how any choice is implemented.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any

from magicdec.machine import Machine, choose_backend, choose_collectives, choose_linear

# Name tables: what a flag accepts -> where it lives (imported only when chosen). A new one is a
# line here and a file there.
ATTENTION_BACKENDS = {
    "sdpa": "magicdec.attention.sdpa:SDPABackend",
    "grouped": "magicdec.attention.grouped:GroupedBackend",
    "native": "magicdec.attention.native:NativeBackend",
}
KV_POLICIES = {
    "full": "magicdec.kv.full:FullKV",
    "streaming_llm": "magicdec.kv.streaming_llm:StreamingLLM",
    "verified": "magicdec.kv.verified:VerifiedKV",
}
DRAFT_READERS = {
    "view": "magicdec.decoding.view_reader:ViewReader",
    "heaviest": "magicdec.decoding.heaviest_reader:HeaviestReader",
}
STRATEGIES = {
    "autoregressive": "magicdec.decoding.autoregressive:Autoregressive",
    "speculative": "magicdec.decoding.speculative:Speculative",
}
DRAFTERS = {
    "self": "magicdec.decoding.self_draft:SelfDrafter",
}
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
LINEARS = ("torch", "packed")
COLLECTIVES = ("gloo", "shared_memory", "nccl")
MOST_WATCHED = 31  # new tokens of a forward whose attention every backend can add up


def load_named(table: dict[str, str], name: str) -> Any:
    """The class behind a name of one of the tables above."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def option(default: Any, help: str, *flags: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that `bench.cli` turns into a command-line flag."""
    return field(default=default, metadata={"flags": flags, "help": help, "choices": choices})


@dataclass(frozen=True)
class ModelSection:
    model: str = option(
        "demo",
        "demo, demo-draft, random:<preset>, a Hugging Face directory, or a .pth/.safetensors file "
        "beside its config.json",
        "--model",
    )
    dtype: str = option(
        "auto", "auto: bfloat16 where the hardware computes in it, else float32",
        "--dtype", choices=("auto", *DTYPES),
    )  # fmt: skip
    linear: str = option(
        "auto",
        "linear layers; packed: weights laid out once for bfloat16 dot products (CPU)",
        "--linear",
        choices=("auto", *LINEARS),
    )


@dataclass(frozen=True)
class ParallelSection:
    rank_group: tuple[int, ...] | None = option(
        None,
        "ranks of the target's tensor-parallel group, in shard order; default: all",
        "--rank_group",
    )
    device: str = option("auto", "where to run", "--device", choices=("auto", *DEVICES))
    collectives: str | None = option(
        "auto",
        "how ranks exchange; auto: nccl on CUDA, shared_memory between CPU ranks of one host",
        "--collectives",
        choices=("auto", *COLLECTIVES),
    )
    collectives_reason: str | None = None  # why `auto` became what it is; set by `resolve`
    threads: int | None = option(None, "CPU threads a rank; default: cores / ranks", "--threads")


@dataclass(frozen=True)
class KVSection:
    policy: str = option(
        "streaming_llm",
        "what the draft reads of the KV cache",
        "--kv_policy",
        choices=tuple(KV_POLICIES),
    )
    budget: int = option(
        257, "KV entries a draft step reads of the committed context, sink tokens included",
        "--streamingllm_budget", "--draft_budget",
    )  # fmt: skip
    num_sink_tokens: int = option(
        16, "first tokens that stay visible (streaming_llm, verified)", "--num_sink_tokens"
    )
    recent_window: int | None = option(
        None,
        "newest tokens that stay visible (verified); default: a quarter of the budget past the "
        "sinks",
        "--recent_window",
    )

    @property
    def num_recent_tokens(self) -> int:
        """The recent window, asked for or not."""
        if self.recent_window is not None:
            return self.recent_window
        return max(1, (self.budget - self.num_sink_tokens) // 4)


@dataclass(frozen=True)
class AttentionSection:
    backend: str = option(
        "auto", "attention kernels", "--attention", choices=("auto", *ATTENTION_BACKENDS)
    )
    backend_reason: str | None = None  # why `auto` became what it is; set by `resolve`
    prefill_chunk: int = option(512, "prompt tokens a prefill forward takes", "--prefill_chunk")


@dataclass(frozen=True)
class DecodingSection:
    strategy: str = "autoregressive"
    drafter: str | None = None
    num_draft_tokens: int = option(4, "draft tokens a step (gamma)", "--gamma")
    ignore_eos: bool = option(
        False, "decode to the full length, past any end token", "--ignore_eos"
    )
    baseline: bool = option(
        True, "skip the autoregressive baseline and the check against it", "--no_baseline"
    )


@dataclass(frozen=True)
class WorkloadSection:
    dataset: str = option(
        "demo", "demo, pg19, or a path to .jsonl/.json/.parquet/.txt text", "--dataset"
    )
    batch_size: int = option(4, "sequences decoded together", "--B")
    prefix_len: int = option(4096, "prompt tokens a sequence", "--prefix_len")
    gen_len: int | None = option(None, "tokens to generate a sequence; default 64", "--gen_len")
    max_len: int | None = option(
        None, "prefix plus generated tokens, instead of --gen_len", "--max_len"
    )
    num_batches: int = option(2, "measured batches", "--num_batches")
    warmup_batches: int = option(
        1, "unmeasured decodes of the first batch beforehand", "--warmup_batches"
    )
    seed: int = option(123, "order of the prefixes", "--seed")

    @property
    def num_new_tokens(self) -> int:
        """Tokens to generate a sequence, whichever of the two spellings was used."""
        if self.max_len is not None:
            return self.max_len - self.prefix_len
        return 64 if self.gen_len is None else self.gen_len

    @property
    def num_prompts(self) -> int:
        return self.batch_size * self.num_batches


@dataclass(frozen=True)
class OutputSection:
    results: str = option(
        "results/runs.jsonl", "records are appended here, a JSON line a run", "--results"
    )
    save_tokens: str | None = option(
        None, "write prompt and output ids here, a JSON line a sequence", "--save_tokens"
    )
    printoutput: bool = option(False, "print the generated text", "--printoutput")
    benchmark: bool = option(
        False, "time draft and verify apart (on CUDA this synchronises)", "--benchmark"
    )


@dataclass(frozen=True)
class RunConfig:
    model: ModelSection = ModelSection()
    parallel: ParallelSection = ParallelSection()
    kv: KVSection = KVSection()
    attention: AttentionSection = AttentionSection()
    decoding: DecodingSection = DecodingSection()
    workload: WorkloadSection = WorkloadSection()
    output: OutputSection = OutputSection()

    def check(self, world_size: int) -> None:
        """Raise ValueError, one line naming the flag, for anything that is wrong whatever the
        model."""
        w, kv = self.workload, self.kv
        for flag, value, least in (
            ("--gamma", self.decoding.num_draft_tokens, 1),
            ("--B", w.batch_size, 1),
            ("--prefix_len", w.prefix_len, 1),
            ("--num_batches", w.num_batches, 1),
            ("--warmup_batches", w.warmup_batches, 0),
            ("--prefill_chunk", self.attention.prefill_chunk, 1),
            ("--num_sink_tokens", kv.num_sink_tokens, 0),
            ("--recent_window", kv.num_recent_tokens, 1),
            ("--threads", 1 if self.parallel.threads is None else self.parallel.threads, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} {value} is too small; it must be at least {least}")
        if (
            w.gen_len is not None
            and w.max_len is not None
            and w.prefix_len + w.gen_len != w.max_len
        ):
            raise ValueError(
                f"--max_len {w.max_len} is not --prefix_len {w.prefix_len} + "
                f"--gen_len {w.gen_len}; give one of the two"
            )
        if w.num_new_tokens < 1:
            flag = "--gen_len" if w.max_len is None else "--max_len minus --prefix_len"
            raise ValueError(f"{flag} is {w.num_new_tokens}; it must be at least 1")
        check_budget(kv, self.decoding)
        check_rank_group("--rank_group", self.parallel.rank_group, world_size)

    def resolve(self, machine: Machine, head_dim: int = 64) -> RunConfig:
        """Turn every `auto` and every None into what will run, for a model of that head size.

        Raises ValueError for what is not there: a device, a compiler, a way to exchange."""
        device = self.parallel.device
        if device == "auto":
            device = "cuda" if machine.has_cuda else "cpu"
        elif device == "cuda" and not machine.has_cuda:
            raise ValueError("--device cuda: no CUDA device here; choose from auto, cpu")
        fast_bfloat16 = device == "cuda" or machine.has_fast_bfloat16
        dtype = self.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if fast_bfloat16 else "float32"
        collectives, reason = self.parallel.collectives, self.parallel.collectives_reason
        if reason is None:
            collectives, reason = choose_collectives(collectives, device, machine)
        backend, backend_reason = self.attention.backend, self.attention.backend_reason
        if backend_reason is None:
            backend, backend_reason = choose_backend(backend, device, machine, head_dim)
        replace = dataclasses.replace
        return replace(
            self,
            model=replace(
                self.model,
                dtype=dtype,
                linear=choose_linear(self.model.linear, device, dtype, machine),
            ),
            parallel=replace(
                self.parallel,
                device=device,
                collectives=collectives,
                collectives_reason=reason,
                rank_group=self.parallel.rank_group or tuple(range(machine.world_size)),
                threads=self.parallel.threads
                or max(1, machine.num_cpus // machine.local_world_size),
            ),
            kv=replace(
                self.kv,
                recent_window=self.kv.num_recent_tokens
                if self.kv.policy == "verified"
                else self.kv.recent_window,
            ),
            attention=replace(self.attention, backend=backend, backend_reason=backend_reason),
            workload=replace(
                self.workload,
                gen_len=self.workload.num_new_tokens,
                max_len=self.workload.prefix_len + self.workload.num_new_tokens,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested by section, for the record."""
        return dataclasses.asdict(self)


def check_budget(kv: KVSection, decoding: DecodingSection) -> None:
    """The budget must hold what always stays visible, and a verification must be one that can be
    watched."""
    if kv.policy != "full" and kv.budget <= kv.num_sink_tokens:
        raise ValueError(
            f"--streamingllm_budget {kv.budget} must be larger than "
            f"--num_sink_tokens {kv.num_sink_tokens}"
        )
    if kv.policy != "verified":
        return
    if kv.num_sink_tokens + kv.num_recent_tokens > kv.budget:
        raise ValueError(
            f"--recent_window {kv.num_recent_tokens} does not fit --draft_budget {kv.budget} "
            f"beside --num_sink_tokens {kv.num_sink_tokens}"
        )
    if decoding.num_draft_tokens >= MOST_WATCHED:
        raise ValueError(
            f"--gamma {decoding.num_draft_tokens} is too large for --kv_policy verified; "
            f"it must be at most {MOST_WATCHED - 1}"
        )


def check_rank_group(flag: str, ranks: tuple[int, ...] | None, world_size: int) -> None:
    """The target group must be every launched rank, each once, in any order."""
    if ranks is None:
        return
    shown = " ".join(map(str, ranks))
    launched = f"the launched ranks: {' '.join(map(str, range(world_size)))}"
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{flag} {shown} names a rank twice; name each of {launched}")
    outside = [r for r in ranks if not 0 <= r < world_size]
    if outside:
        raise ValueError(
            f"{flag} {shown} names rank {outside[0]}, which does not exist; choose from {launched}"
        )
    if len(ranks) != world_size:
        raise ValueError(
            f"{flag} {shown} leaves out some of {launched}; the target group must be all of them"
        )
