"""RunConfig: every default and every check of what a user can write. Imports no torch.

Owns the sections of a run, their command-line names, the tables of names a user may choose from,
and the resolution of `auto`. A component is given its own section, never the whole. Must not know
how any choice is implemented.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

from magicdec.checks import (
    check_budget,
    check_filters_act,
    check_lengths,
    check_rank_group,
    check_sampling,
)
from magicdec.draft_section import DraftSection
from magicdec.machine import Machine, choose_backend, choose_collectives, choose_linear
from magicdec.options import count_or_auto, option

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
MOST_DRAFT_TOKENS = 8  # that auto chooses from


def load_named(table: dict[str, str], name: str) -> Any:
    """The class behind a name of one of the tables above."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


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
class TargetSection(ModelSection):
    """Where `--model` names the draft, as in the original suite."""

    model: str = option(
        "demo", "the target, which verifies; named as --model names a draft", "--target"
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
        257, "KV entries a draft step reads of the committed context, sinks included; -1: all",
        "--streamingllm_budget", "--draft_budget",
    )  # fmt: skip
    num_sink_tokens: int = option(
        16, "first tokens that stay visible (streaming_llm, verified)", "--num_sink_tokens"
    )
    window_size: int = option(
        32, "newest prompt tokens that are observed and kept (SnapKV)", "--window_size"
    )
    pooling: str = option(
        "avg", "how neighbours share a score (SnapKV)", "--pooling", choices=("avg", "max")
    )
    reselect_every: int = option(
        0, "choose anew after so many tokens; 0: once after prefill (SnapKV)", "--reselect_every"
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

    def resolve(self) -> KVSection:
        """A budget of -1 is the original suite's spelling of the full cache."""
        policy = "full" if self.budget == -1 else self.policy
        window = self.num_recent_tokens if policy == "verified" else self.recent_window
        return dataclasses.replace(self, policy=policy, recent_window=window)


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
    drafter: str | None = option(
        None, "what proposes draft tokens", "--drafter", choices=tuple(DRAFTERS)
    )
    num_draft_tokens: int | str = option(
        4,
        "draft tokens a step; auto: as many as pay, by measurement, none included",
        "--gamma",
        parse=count_or_auto,
    )
    ignore_eos: bool = option(
        False, "decode to the full length, past any end token", "--ignore_eos"
    )
    baseline: bool = option(
        True, "skip the autoregressive baseline and the check against it", "--no_baseline"
    )

    @property
    def most_draft_tokens(self) -> int:
        """No step drafts more."""
        if isinstance(self.num_draft_tokens, int):
            return self.num_draft_tokens
        return MOST_DRAFT_TOKENS


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = option(0.0, "0: greedy; else divides the logits", "--temperature")
    top_k: int = option(0, "sample from the k likeliest tokens; 0: off", "--top_k")
    top_p: float = option(
        1.0, "sample from the likeliest tokens that hold this probability; 1: off", "--top_p"
    )
    min_p: float = option(0.0, "drop tokens below this share of the likeliest; 0: off", "--min_p")
    repetition_penalty: float = option(
        1.0, "weakens tokens of the prompt and the output; 1: off", "--repetition_penalty"
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens of the output; 0: off", "--presence_penalty"
    )
    seed: int = option(0, "of every request's random numbers, with its id", "--sampling_seed")


@dataclass(frozen=True)
class WorkloadSection:
    dataset: str = option(
        "demo",
        "demo, pg19, or a path to .jsonl/.json/.parquet/.txt text; with known answers: "
        "recall, recall:<any of these>, ruler:<task>",
        "--dataset",
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
    seed: int = option(
        123, "order of the prefixes, and what is drawn for recall and ruler", "--seed"
    )

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
    draft: DraftSection | None = None
    parallel: ParallelSection = ParallelSection()
    kv: KVSection = KVSection()
    attention: AttentionSection = AttentionSection()
    decoding: DecodingSection = DecodingSection()
    sampling: SamplingSection = SamplingSection()
    workload: WorkloadSection = WorkloadSection()
    output: OutputSection = OutputSection()

    def check(self, world_size: int) -> None:
        """Raise ValueError, one line naming the flag, for anything that is wrong whatever the
        model."""
        w, kv = self.workload, self.kv
        for flag, value, least in (
            ("--gamma", self.decoding.most_draft_tokens, 1),
            ("--B", w.batch_size, 1),
            ("--prefix_len", w.prefix_len, 1),
            ("--num_batches", w.num_batches, 1),
            ("--warmup_batches", w.warmup_batches, 0),
            ("--prefill_chunk", self.attention.prefill_chunk, 1),
            ("--num_sink_tokens", kv.num_sink_tokens, 0),
            ("--window_size", kv.window_size, 1),
            ("--reselect_every", kv.reselect_every, 0),
            ("--recent_window", kv.num_recent_tokens, 1),
            ("--threads", 1 if self.parallel.threads is None else self.parallel.threads, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} {value} is too small; it must be at least {least}")
        check_lengths(w.prefix_len, w.gen_len, w.max_len)
        if self.decoding.strategy == "autoregressive" and self.decoding.drafter is not None:
            raise ValueError(
                f"--drafter {self.decoding.drafter}: the baseline drafts nothing; "
                "that flag is for selfspec and longspec"
            )
        check_budget(kv, self.decoding.most_draft_tokens)
        check_rank_group("--rank_group", self.parallel.rank_group, world_size)
        check_sampling(self.sampling)
        check_filters_act(self.sampling)
        self._check_draft(world_size)

    def _check_draft(self, world_size: int) -> None:
        drafter = self.decoding.drafter
        if self.draft is None:
            if drafter == "model":
                raise ValueError("--drafter model: no draft is named here; that is longspec")
            return
        self.draft.check(world_size)
        if drafter != "model":
            raise ValueError(
                f"--drafter {drafter}: the draft --model would do nothing; "
                "choose model, or run selfspec"
            )
        if self.kv.policy == "verified" and self.kv.budget != -1:
            raise ValueError(
                "--kv_policy verified: a standalone draft is never verified itself; "
                "choose from full, streaming_llm, snapkv"
            )
        if self.kv.reselect_every:
            raise ValueError(
                f"--reselect_every {self.kv.reselect_every}: a standalone draft keeps no whole "
                "context to choose from anew; leave it at 0"
            )

    def resolve(self, machine: Machine, head_dim: int = 64, draft_head_dim: int = 64) -> RunConfig:
        """Turn every `auto` and every None into what will run, for models of these head sizes.

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
        rank_group = self.parallel.rank_group or tuple(range(machine.world_size))
        draft = self.draft and self.draft.resolve(
            self.attention.backend, rank_group, device, machine, draft_head_dim
        )
        replace = dataclasses.replace
        return replace(
            self,
            draft=draft,
            kv=self.kv.resolve(),
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
                rank_group=rank_group,
                threads=self.parallel.threads
                or max(1, machine.num_cpus // machine.local_world_size),
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
