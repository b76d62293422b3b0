"""The sections of a run: each field with its default, its flag and what it means. Imports no torch.

A component is given its own section, never the whole. `RunConfig` puts them together and checks
them; `config.resolve` makes of them what runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from magicdec.config.options import count_or_auto, option
from magicdec.names import (
    ATTENTION_BACKENDS,
    COLLECTIVES,
    DEVICES,
    DRAFTERS,
    KV_POLICIES,
)

MOST_DRAFT_TOKENS = 8  # that auto chooses from


@dataclass(frozen=True)
class ParallelSection:
    rank_group: tuple[int, ...] | None = option(
        None,
        "ranks of the target's tensor-parallel group, in shard order; default: all",
        "--rank_group",
    )
    device: str = option("auto", "where to run", "--device", choices=("auto", *DEVICES))
    collectives: str = option(
        "auto",
        "how ranks exchange; auto: nccl on CUDA (symmetric_memory with ENABLE_INTRA_NODE_COMM=1 in "
        "the environment), shared_memory between CPU ranks of one host",
        "--collectives",
        choices=("auto", *COLLECTIVES),
    )
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

    draft_kv_dtype: str = option(
        "auto",
        "of a draft's own KV cache (a standalone draft's; what snapkv copies); int8: a scale for "
        "each token and head; auto: as --dtype",
        "--draft_kv_dtype",
        choices=("auto", "int8"),
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
    cuda_graphs: str = option(
        "auto",
        "record each kind of step once and replay it, without the host in between; auto: on CUDA",
        "--cuda_graphs",
        choices=("auto", "on", "off"),
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
        False, "time draft and verify apart on CUDA too, by events on its stream", "--benchmark"
    )
    profile: str | None = option(
        None, "trace an unmeasured pass of each strategy into this directory, a file a rank",
        "--profile",
    )  # fmt: skip
