"""The sections of a config: each field with its default, its flag and its meaning. Imports no torch
itself.

A component gets only its own section. `RunConfig` holds all sections and checks them, and
`config.resolve` resolves them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from magicdec.config.checks import policy_called, policy_name
from magicdec.config.threads import Threads, parse_threads
from magicdec.config.tree_shape import TreeShape, parse_expansion
from magicdec.names import (
    ATTENTION_BACKENDS,
    COLLECTIVES,
    DEFAULT_KV_POLICY,
    DEVICES,
    DRAFTERS,
    DTYPES,
    ELEMENTWISE,
    ELEMENTWISE_BESIDE_PACKED,
    ELEMENTWISE_ON_CUDA,
    KV_POLICIES,
    LINEARS,
    PORTABLE_ELEMENTWISE,
    WEIGHT_DTYPES,
)


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that `cli.flags` turns into a command-line flag. `parse` makes a value of
    the text; by default this is the type of the field."""
    metadata = {"flags": flags, "help": help, "choices": choices, "parse": parse}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(section: Any, name: str) -> str:
    """The first spelling of the flag of that field, for messages."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    flag: str = fields[name].metadata["flags"][0]
    return flag


def count_or_auto(text: str) -> int | str:
    """A whole number, or the word auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known; choose a whole number or auto"
        ) from None


MOST_DRAFT_TOKENS = 8  # the largest number that `--gamma auto` may choose
MOST_TREE_NODES = 255  # draft tokens of a tree


@dataclass(frozen=True)
class ParallelSection:
    rank_group: tuple[int, ...] | None = option(
        None,
        "The ranks of the target's tensor-parallel group, in shard order. Default: all ranks.",
        "--rank_group",
    )
    device: str = option("auto", "The device to run on.", "--device", choices=("auto", *DEVICES))
    collectives: str = option(
        "auto",
        "How ranks exchange tensors. auto takes nccl on CUDA (symmetric_memory with "
        "ENABLE_INTRA_NODE_COMM=1 in the environment) and shared_memory between CPU ranks of one "
        "host. Stages of a pipeline on CUDA may also take gloo or shared_memory.",
        "--collectives",
        choices=("auto", *COLLECTIVES),
    )
    threads: Threads | None = option(
        None,
        "CPU threads of each rank: one number for all of them, or one for each, such as 2,1,1. "
        "Default: the host's cores divided by its ranks.",
        "--threads", parse=parse_threads,
    )  # fmt: skip
    nproc: int | None = option(
        None,
        "Ranks to start on this host, which share the model. Default: one, or those that torchrun "
        "started.",
        "--nproc",
    )


@dataclass(frozen=True)
class KVSection:
    policy: str = option(
        DEFAULT_KV_POLICY,
        "Which entries of the KV cache a draft step reads.",
        "--kv_policy",
        choices=tuple(KV_POLICIES),
    )
    budget: int = option(
        257,
        "KV entries of the context that a draft step reads, sinks included. -1 reads them all.",
        "--budget", "--streamingllm_budget", "--draft_budget",
    )  # fmt: skip
    num_sink_tokens: int = option(
        16,
        "First tokens (attention sinks) that stay visible, where the policy keeps any.",
        "--num_sink_tokens",
    )
    window_size: int = option(
        32,
        "Newest prompt tokens that are observed and kept, where the policy copies what they "
        "attend to.",
        "--window_size",
    )
    pooling: str = option(
        "avg",
        "How neighbouring tokens share a score, where the policy copies tokens by their scores.",
        "--pooling",
        choices=("avg", "max"),
    )
    reselect_every: int = option(
        0,
        "Tokens after which a policy that copies chooses again. 0 chooses once, after prefill.",
        "--reselect_every",
    )
    recent_window: int | None = option(
        None,
        "Newest tokens that stay visible, where the policy chooses blocks. Default: a quarter of "
        "the budget without the sinks.",
        "--recent_window",
    )

    draft_kv_dtype: str = option(
        "auto",
        "The dtype of a draft's own KV cache: a standalone draft's, or what the policy copies. "
        "int8 has a scale for each token and head; auto is --dtype.",
        "--draft_kv_dtype",
        choices=("auto", "int8"),
    )

    @property
    def num_recent_tokens(self) -> int:
        """The size of the recent window, also if the user did not give it."""
        if self.recent_window is not None:
            return self.recent_window
        return max(1, (self.budget - self.num_sink_tokens) // 4)

    def resolve(self) -> KVSection:
        """The policy is `full` for a budget of -1, which in the original suite means the whole
        cache."""
        policy, window = policy_name(self.policy, self.budget), self.recent_window
        if "recent_window" in policy_called(policy).settings:
            window = self.num_recent_tokens
        return dataclasses.replace(self, policy=policy, recent_window=window)


@dataclass(frozen=True)
class AttentionSection:
    backend: str = option(
        "auto", "The attention backend.", "--attention", choices=("auto", *ATTENTION_BACKENDS)
    )
    prefill_chunk: int = option(512, "Prompt tokens in each forward of prefill.", "--prefill_chunk")


@dataclass(frozen=True)
class DecodingSection:
    strategy: str = "autoregressive"
    drafter: str | None = option(
        None, "What proposes draft tokens.", "--drafter", choices=tuple(DRAFTERS)
    )
    num_draft_tokens: int | str = option(
        4,
        "Draft tokens in each step. auto measures how many pay, and drafts none where none do.",
        "--gamma",
        parse=count_or_auto,
    )
    tree: str | None = option(
        None,
        "Draft a tree in each step: the children of each token by level, such as 3,2,1,1. A step "
        "accepts at most as many tokens as there are levels. Default: a chain of --gamma tokens.",
        "--tree",
    )
    machine: str | None = option(
        None,
        "File that `magicdec probe` wrote with the same ranks and threads. --gamma auto predicts "
        "the first step times from it. Default: they are measured before decoding.",
        "--machine",
    )
    cuda_graphs: str = option(
        "auto",
        "Record each kind of step once and replay it as a CUDA graph. auto does so on CUDA.",
        "--cuda_graphs",
        choices=("auto", "on", "off"),
    )
    ignore_eos: bool = option(
        False, "Decode to the full length, past any end token.", "--ignore_eos"
    )
    baseline: bool = option(
        True, "Skip the autoregressive baseline and the check against it.", "--no_baseline"
    )

    @property
    def tree_shape(self) -> TreeShape | None:
        """Raises ValueError if `tree` is no expansion configuration."""
        return None if self.tree is None else TreeShape.of(parse_expansion(self.tree))

    @property
    def num_draft_steps(self) -> int:
        """The largest number of draft forwards in a step, and of draft tokens that a row accepts
        in it."""
        shape = self.tree_shape
        return self.most_draft_tokens if shape is None else shape.depth

    @property
    def most_draft_tokens(self) -> int:
        """The largest number of tokens that a step may draft for a row, and append to it."""
        if self.tree_shape is not None:
            return self.tree_shape.num_nodes
        if isinstance(self.num_draft_tokens, int):
            return self.num_draft_tokens
        return MOST_DRAFT_TOKENS


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = option(
        0.0, "Divides the logits before sampling. 0 decodes greedily.", "--temperature"
    )
    top_k: int = option(0, "Sample from the k most likely tokens. 0 is off.", "--top_k")
    top_p: float = option(
        1.0, "Sample from the most likely tokens that hold this probability. 1 is off.", "--top_p"
    )
    min_p: float = option(
        0.0, "Drop tokens below this share of the highest probability. 0 is off.", "--min_p"
    )
    repetition_penalty: float = option(
        1.0,
        "Makes tokens of the prompt and the output less likely. 1 is off.",
        "--repetition_penalty",
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens of the output. 0 is off.", "--presence_penalty"
    )
    seed: int = option(0, "With a request's id, the seed of its random numbers.", "--sampling_seed")


@dataclass(frozen=True)
class WorkloadSection:
    dataset: str = option(
        "demo",
        "The prompts: demo, pg19, or a path to .jsonl/.json/.parquet/.txt text. With known "
        "answers: recall, recall:<any of these>, ruler:<task>.",
        "--dataset",
    )
    batch_size: int = option(4, "Sequences that are decoded together.", "--B")
    prefix_len: int = option(4096, "Prompt tokens of each sequence.", "--prefix_len")
    gen_len: int | None = option(
        None, "Tokens to generate in each sequence. Default: 64.", "--gen_len"
    )
    max_len: int | None = option(
        None,
        "Tokens of a finished sequence, prompt included. Use it instead of --gen_len.",
        "--max_len",
    )
    num_batches: int = option(2, "Batches that are measured.", "--num_batches")
    warmup_batches: int = option(
        1, "Times that the first batch is decoded before measuring.", "--warmup_batches"
    )
    seed: int = option(
        123, "Seed for the order of the prompts and for what recall and ruler draw.", "--seed"
    )
    extra_new_tokens: int = 0  # by which a request with a shorter prompt may exceed `gen_len`

    @property
    def num_new_tokens(self) -> int:
        """Tokens to generate in each sequence, whichever of the two flags the user gave."""
        if self.max_len is not None:
            return self.max_len - self.prefix_len
        return 64 if self.gen_len is None else self.gen_len

    @property
    def num_prompts(self) -> int:
        return self.batch_size * self.num_batches


@dataclass(frozen=True)
class DraftSection:
    """The model that drafts in a run with a standalone draft, and the ranks that hold it."""

    model: str = option(
        "demo-draft",
        "The draft: demo, demo-draft, random:<preset>, a Hugging Face directory, or a "
        ".safetensors/.pth/.bin file beside its config.json.",
        "--model",
    )
    rank_group: tuple[int, ...] | None = option(
        None,
        "The ranks that hold the draft, in shard order. Default: the first of the target's.",
        "--draft_ranks",
        "--draft_rank_group",
        "--draft_group",
    )
    draft_dtype: str = option(
        "auto",
        "The dtype of the draft's matrices, as --target_dtype is of the target's.",
        "--draft_dtype",
        choices=("auto", *WEIGHT_DTYPES),
    )


@dataclass(frozen=True)
class OutputSection:
    """What a run writes, and where."""

    results: str = option(
        "results/runs.jsonl",
        "The file that records are appended to, one JSON line for each run.",
        "--out",
        "--results",
    )
    save_tokens: str | None = option(
        None,
        "Write prompt and output ids to this file, one JSON line for each sequence.",
        "--save_tokens",
    )
    printoutput: bool = option(False, "Print the generated text.", "--printoutput")
    benchmark: bool = option(
        False,
        "Time draft and verify separately on CUDA too, by events on its stream.",
        "--benchmark",
    )
    profile: str | None = option(
        None, "Trace an unmeasured pass of each strategy into this directory, a file per rank.",
        "--profile",
    )  # fmt: skip


@dataclass(frozen=True)
class ModelSection:
    """The model of a run, and how it is stored and computed."""

    model: str = option(
        "demo",
        "The model: demo, demo-draft, random:<preset>, a Hugging Face directory, a model's name on "
        "the Hugging Face hub, or a .safetensors/.pth/.bin file beside its config.json.",
        "--model",
    )
    dtype: str = option(
        "auto",
        "The dtype of activations, KV cache and weights. auto is bfloat16 where the hardware "
        "computes in it, else float32.",
        "--dtype", choices=("auto", *DTYPES),
    )  # fmt: skip
    linear: str = option(
        "auto",
        "How linear layers multiply. packed lays weights out once for the products of a few rows "
        "on a CPU.",
        "--linear",
        choices=("auto", *LINEARS),
    )
    elementwise: str = option(
        "auto",
        "What computes norms, rotation and gates between linear layers. auto takes "
        f"{ELEMENTWISE_BESIDE_PACKED} (C++) beside packed layers, {ELEMENTWISE_ON_CUDA} on CUDA "
        f"where it is installed, else {PORTABLE_ELEMENTWISE}.",
        "--elementwise",
        choices=("auto", *ELEMENTWISE),
    )
    native_steps: str = option(
        "auto",
        "Compute each forward of a few tokens, and each chain of greedy drafts, in one call of a "
        "C++ library. auto does so on a CPU where attention, linear layers and elementwise "
        "operations are all native. MAGICDEC_NATIVE_STEPS=off in the environment turns auto off.",
        "--native_steps",
        choices=("auto", "on", "off"),
    )
    target_dtype: str = option(
        "auto",
        "The dtype of the target's matrices. int8 has a scale for each output, while activations "
        "and KV stay in --dtype. auto is int8 if they are stored so, else --dtype.",
        "--target_dtype",
        choices=("auto", *WEIGHT_DTYPES),
    )


@dataclass(frozen=True)
class TargetSection(ModelSection):
    """Where `--model` names the draft, as in the original suite."""

    model: str = option(
        "demo", "The target, which verifies. Named as --model names a draft.", "--target"
    )
