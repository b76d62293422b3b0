"""The sections of a run's config: settings with default, bounds, flag and meaning. Imports no
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from magicdec.config.capabilities import policy_called, policy_name
from magicdec.config.setting import flag_of as flag_of
from magicdec.config.setting import setting
from magicdec.names import (
    ATTENTION_BACKENDS,
    AUTO_BACKENDS,
    COLLECTIVES,
    DEFAULT_KV_POLICY,
    DEVICES,
    DRAFT_WEIGHTS,
    DRAFTERS,
    DTYPES,
    EAGLE,
    ELEMENTWISE,
    ELEMENTWISE_BESIDE_PACKED,
    ELEMENTWISE_ON_CUDA,
    HEADS,
    KV_DTYPES,
    KV_POLICIES,
    LINEARS,
    MTP,
    NGRAM_AND,
    PORTABLE_ELEMENTWISE,
    SAME,
    WEIGHT_DTYPES,
)

SELF = "self"
MODEL = "model"
NGRAM = "ngram"
NONE = "none"
MODEL_PREFIX = "model:"
EAGLE_PREFIX = f"{EAGLE}:"
# Drafters that need a model beside the target: in `--draft`, a colon and its name follow.
NAMED = ("model", EAGLE)
# What drafts beside the target; the head for multi-token prediction is in the target's checkpoint.
BESIDE_TARGET = (*NAMED, MTP)
NO_MTP_WEIGHTS = (
    f"the head of --draft {MTP} multiplies with the target's matrix of logits; choose "
    "--target_dtype int8, or leave it out"
)
PLAIN = "plain"
CHAT = "chat"
PROMPT_FORMATS = (PLAIN, CHAT)
DEFAULT_GEN_LEN = 64
DEFAULT_BATCHES = 5  # whose speedups have an interval that is not much wider than their spread
FIXED_GAMMA = 4  # what a model drafts without `--gamma`
MAX_AUTO_GAMMA = 8  # the largest number that `--gamma auto` may choose
# What a lookup proposes at most without a number in `--gamma`: with the newest token that is a
# verification of 32, two blocks of rows in tile registers.
MAX_LOOKUP_GAMMA = 31
PROBABILITY = {"least": 0, "most": 1}


@dataclass(frozen=True)
class ParallelSection:
    rank_group: tuple[int, ...] | None = setting(
        None,
        "The ranks of the target's tensor-parallel group, in shard order. Default: all ranks.",
    )
    device: str = setting("auto", "The device to run on.", choices=("auto", *DEVICES))
    collectives: str = setting(
        "auto",
        "How ranks exchange tensors. auto takes nccl on CUDA and shared_memory between CPU ranks "
        "of one host. Stages of a pipeline on CUDA may also take gloo or shared_memory.",
        choices=("auto", *COLLECTIVES),
    )
    threads: int | None = setting(
        None,
        "CPU threads of each rank. Default: the host's cores divided by its ranks.",
        least=1,
    )
    nproc: int | None = setting(
        None,
        "Ranks to start on this host, which share the model. Default: one, or those that torchrun "
        "started.",
        least=1,
        other_defaults="2 in gate save",
        synonyms=("nproc_per_node", "tp", "tensor_parallel_size", "tensor_parallel", "world_size"),
    )


@dataclass(frozen=True)
class KVSection:
    policy: str = setting(
        DEFAULT_KV_POLICY,
        "Which entries of the KV cache a draft step reads.",
        "--kv_policy",
        choices=tuple(KV_POLICIES),
    )
    budget: int = setting(
        257,
        "KV entries of the context that a draft step reads, sinks included. -1 reads them all.",
        other_defaults="65 257 in latency, acceptance and advise; those of the records in plan",
    )
    num_sink_tokens: int = setting(
        16,
        "First tokens (attention sinks) that stay visible, where the policy keeps any.",
        least=0,
    )
    window_size: int = setting(
        32,
        "Newest prompt tokens that are observed and kept, where the policy copies what they "
        "attend to.",
        least=1,
    )
    pooling: str = setting(
        "avg",
        "How neighbouring tokens share a score, where the policy copies tokens by their scores.",
        choices=("avg", "max"),
    )
    reselect_every: int = setting(
        0,
        "Tokens after which a policy that copies chooses again. 0 chooses once, after prefill.",
        least=0,
    )
    draft_kv_dtype: str = setting(
        "int4",
        "The dtype of the copy that drafts read, where the policy copies all tokens in fewer bits "
        "than the target's cache has. The target's own is --kv_dtype.",
        choices=tuple(KV_DTYPES),
    )
    recent_window: int | None = setting(
        None,
        "Newest tokens that stay visible, where the policy chooses blocks. Default: a quarter of "
        "the budget without the sinks.",
        least=1,
    )

    @property
    def num_recent_tokens(self) -> int:
        if self.recent_window is not None:
            return self.recent_window
        return max(1, (self.budget - self.num_sink_tokens) // 4)

    @property
    def chooses_once(self) -> bool:
        """Whether the policy copies what it chooses after prefill, and never chooses again."""
        return "reselect_every" in policy_called(self.policy).settings and not self.reselect_every

    def check(self, gamma: int, flag: str | None = None) -> None:
        """Raises ValueError if the policy refuses the settings, naming `flag` for the budget."""
        policy_called(policy_name(self.policy, self.budget)).check(self, gamma, flag)

    def resolve(self) -> KVSection:
        """The section with the policy `full` for a budget of -1, as in the original suite."""
        policy = policy_name(self.policy, self.budget)
        window = self.recent_window
        if "recent_window" in policy_called(policy).settings:
            window = self.num_recent_tokens
        return dataclasses.replace(self, policy=policy, recent_window=window)


@dataclass(frozen=True)
class AttentionSection:
    backend: str = setting(
        "auto",
        "The attention backend. auto takes the first that can serve the run: on a CPU "
        f"{', '.join(AUTO_BACKENDS['cpu'])}, on CUDA {', '.join(AUTO_BACKENDS['cuda'])}.",
        "--attention",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    prefill_chunk: int = setting(512, "Prompt tokens in each forward of prefill.", least=1)
    kv_dtype: str = setting(
        "auto",
        "The dtype in which the target's KV cache is stored, with drafts and without. fp8 is e4m3 "
        "without scales, int8 has a scale for each token and head, int4 one for 32 of their "
        "dimensions; all are the arithmetic of another model. auto is --dtype.",
        choices=("auto", *KV_DTYPES),
    )


def model_drafter_of(drafter: str | None) -> str | None:
    """The part of a drafter's name that says which model drafts; None if none does."""
    name = (drafter or "").removeprefix(NGRAM_AND)
    return name if name in (SELF, *BESIDE_TARGET) else None


@dataclass(frozen=True)
class DecodingSection:
    strategy: str = "autoregressive"
    drafter: str | None = setting(None, "What proposes draft tokens.", choices=tuple(DRAFTERS))
    gamma: int | str | None = setting(
        None,
        "Draft tokens in each step, or in the depth of a microbatch of pipelined speculation; of "
        "prompt lookup the most. auto measures how many pay, and drafts none where none do. "
        f"Default: {FIXED_GAMMA} of a model, up to {MAX_LOOKUP_GAMMA} of a lookup, and "
        "auto with both.",
        "--gamma",
        words=("auto",),
        least=1,
        other_defaults=f"{FIXED_GAMMA} in advise and in pipelined speculation, 8 in acceptance",
        synonyms=(
            "num_draft_tokens",
            "num_speculative_tokens",
            "speculative_tokens",
            "num_draft",
            "draft_len",
            "k",
        ),
    )
    pa: float | None = setting(
        None,
        "A chain of drafts stops when its best candidate is less probable than this.",
        **PROBABILITY,
        other_defaults="0.5 in serve, inflight, recurrent, pipeline, simulate",
    )
    draft_weights: str | None = setting(
        None,
        "The matrices that draft. int8 has a scale for up to 128 inputs of an output, int4 for 32, "
        "int4_g128 for up to 128, which GPUs multiply faster; fp8 (e4m3) has one for each output, "
        "and rounds activations too. In self-speculation they are a copy of the model's own, "
        "beside it. same is the default: the model's own, or a standalone draft's as they are "
        "stored; latency times these, too.",
        choices=(*DRAFT_WEIGHTS, SAME),
    )
    cuda_graphs: str = setting(
        "auto",
        "Record each kind of step once and replay it as a CUDA graph. auto does so on CUDA.",
        choices=("auto", "on", "off"),
    )
    ignore_eos: bool = setting(False, "Decode to the full length, past any end token.")
    baseline: bool = setting(
        True, "Skip the autoregressive baseline and the check against it.", "--no_baseline"
    )
    emulate_acceptance: tuple[float, ...] | None = setting(
        None,
        "Draft and verify as ever, but accept drafts by chance, whatever they are. A number below "
        "1 is the probability of each draft, one from 1 on the tokens that a step emits on "
        "average, and several are rates by position, with all drafts before it. The text means "
        "nothing. On emulated stages it takes the place of --draft in pipelined speculation: a "
        "drafted token is right with this probability.",
        metavar="A",
        least=0,
    )
    lookup_corpus: str | None = setting(
        None,
        "Prompt lookup also searches these files: text as --dataset takes it, or the .jsonl that "
        "--save_tokens wrote in runs of a model with the same tokenizer.",
        metavar="FILE",
        is_joined=True,
    )
    # What a step takes more for its drafts, and for each draft token of a row, in decode steps:
    # given to `--gamma auto` in place of measured times, so that a case of the gate repeats.
    step_cost: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.draft_weights == SAME:
            object.__setattr__(self, "draft_weights", None)

    @property
    def emulated_rates(self) -> tuple[float, ...] | None:
        """For each draft position how often it is accepted, given that all before it are; None
        where the target judges. A length is emulated with as little variance as possible, as vLLM
        does (`rejection_sample_method` synthetic)."""
        given = self.emulate_acceptance
        if given is None:
            return None
        joint = given
        if len(given) == 1 and given[0] < 1:
            joint = tuple(given[0] ** position for position in range(1, self.max_gamma + 1))
        elif len(given) == 1:
            accepted = given[0] - 1
            whole = int(accepted)
            joint = (*[1.0] * whole, accepted - whole)
        padded = (*joint, *[0.0] * self.max_gamma)[: self.max_gamma]
        before = (1.0, *padded)
        return tuple(p / q if q > 0 else 0.0 for p, q in zip(padded, before, strict=False))

    @property
    def looks_up(self) -> bool:
        return (self.drafter or "").startswith(NGRAM)

    @property
    def model_drafter(self) -> str | None:
        """The model that drafts, also beside prompt lookup: self, model, eagle, mtp, or None."""
        return model_drafter_of(self.drafter)

    @property
    def drafts_itself(self) -> bool:
        """Whether the target drafts, or a low-bit copy of it."""
        return self.model_drafter == SELF

    @property
    def has_draft_model(self) -> bool:
        """Whether a model or a head beside the target drafts."""
        return self.model_drafter in BESIDE_TARGET

    @property
    def has_head(self) -> bool:
        """Whether a head drafts from hidden states of the target."""
        return self.model_drafter in HEADS

    @property
    def has_eagle_head(self) -> bool:
        return self.model_drafter == EAGLE

    @property
    def has_mtp_head(self) -> bool:
        """Whether a head drafts that is in the target's checkpoint."""
        return self.model_drafter == MTP

    @property
    def max_draft_forwards(self) -> int:
        """The most draft forwards in a step, and draft tokens that a row accepts in it."""
        return self._longest_chain(self.looks_up and self.model_drafter is None)

    @property
    def max_gamma(self) -> int:
        """The most tokens that a step may draft for a row, and append to it."""
        return self._longest_chain(self.looks_up)

    @property
    def gamma_or_default(self) -> int | str:
        """`gamma`, or its default for this drafter."""
        if self.gamma is not None:
            return self.gamma
        if not self.looks_up:
            return FIXED_GAMMA
        return MAX_LOOKUP_GAMMA if self.model_drafter is None else "auto"

    def _longest_chain(self, is_looked_up: bool) -> int:
        gamma = self.gamma_or_default
        if isinstance(gamma, int):
            return gamma
        return MAX_LOOKUP_GAMMA if is_looked_up else MAX_AUTO_GAMMA


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = setting(
        0.0,
        "Divides the logits before sampling. 0 decodes greedily.",
        least=0,
        other_defaults="1 0.6 in audit, at one place after the other",
    )
    top_k: int = setting(0, "Sample from the k most likely tokens. 0 is off.", least=0)
    top_p: float = setting(
        1.0,
        "Sample from the most likely tokens that hold this probability. 1 is off.",
        above=0,
        most=1,
    )
    min_p: float = setting(
        0.0, "Drop tokens below this share of the highest probability. 0 is off.", least=0, most=1
    )
    repetition_penalty: float = setting(
        1.0,
        "Makes tokens of the prompt and the output less likely. 1 is off.",
        above=0,
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens of the output. 0 is off.", least=-2, most=2
    )
    seed: int = setting(
        0,
        "With a request's id, the seed of its random numbers.",
        "--sampling_seed",
        least=0,
        below=1 << 63,
    )


@dataclass(frozen=True)
class WorkloadSection:
    dataset: str = setting(
        "demo",
        "The prompts: demo, pg19, or paths to .jsonl/.json/.parquet/.txt text or folders of such "
        "files. With known answers: recall, recall:<any of these>, ruler:<task>. Of prompt sets, "
        "each a path or a name on the hub: sharegpt:<set>, or messages, speed_bench, mt_bench, "
        "spec_bench, gsm8k, math500, mbpp, humaneval, longbench, mrcr.",
        is_joined=True,
        synonyms=("dataset_path", "dataset_name", "data", "input_file", "text"),
    )
    batch_size: int = setting(
        4,
        "Rows that are decoded together, at most; in a ring, those of one message.",
        "--B",
        least=1,
        other_defaults="1 4 8 in latency and plan, 1 in recurrent and advise, 8 in "
        "acceptance and gate save",
        synonyms=("batch_size", "batch", "bs", "max_num_seqs", "max_concurrency"),
    )
    prefix_len: int = setting(
        4096,
        "Prompt tokens of each sequence: a number or, where requests are served, uniform:LOW:HIGH.",
        metavar="LENGTH",
        least=1,
        other_defaults="1024 4096 16384 in latency and plan, 1024 4096 in acceptance, 512 2048 "
        "in audit, 2048 in advise, 1024 in longdecode; those of a trace",
        synonyms=(
            "prompt_len",
            "input_len",
            "random_input_len",
            "context_len",
            "context",
            "seq_len",
        ),
    )
    gen_len: int | None = setting(
        None,
        "Tokens to generate after each prompt: a number or, where requests are served, "
        "uniform:LOW:HIGH. Default: 64, or those of a trace.",
        metavar="LENGTH",
        least=1,
        other_defaults="256 in acceptance, 16384 in longdecode",
        synonyms=("max_new_tokens", "max_tokens", "output_len", "random_output_len", "new_tokens"),
    )
    num_batches: int | None = setting(
        None,
        f"Batches that are measured. Default: {DEFAULT_BATCHES}, or fewer where the text holds no "
        "more prompts. At least 3 give the speedups an interval.",
        least=1,
        other_defaults="2 in gate save, 5 in advise, 1 in longdecode",
    )
    warmup_batches: int = setting(
        1,
        "Times that the first batch is decoded before measuring.",
        least=0,
        other_defaults="0 in longdecode",
    )
    seed: int = setting(
        123,
        "Seed of what is drawn: the order of the prompts, the answers of recall and ruler, "
        "arrivals and lengths of requests, and the acceptance of a simulation.",
    )
    skip_tokens: int | None = setting(
        None,
        "Tokens left out at the start of each book. Default: 8000 of pg19, which are title page, "
        "contents and preface; none of any other text.",
        least=0,
    )
    prompt_format: str = setting(
        PLAIN,
        "How a prompt's text is given to the model. chat puts the tokenizer's own chat template "
        "around it, within --prefix_len: as around a message of the user, or around those that a "
        "prompt set has.",
        choices=PROMPT_FORMATS,
        synonyms=("apply_chat_template", "chat_template", "chat"),
    )

    @property
    def num_new_tokens(self) -> int:
        """Tokens to generate in each sequence."""
        return DEFAULT_GEN_LEN if self.gen_len is None else self.gen_len

    @property
    def most_batches(self) -> int:
        """The batches of a run, unless the text holds fewer."""
        return DEFAULT_BATCHES if self.num_batches is None else self.num_batches

    @property
    def num_prompts(self) -> int:
        return self.batch_size * self.most_batches


@dataclass(frozen=True)
class DraftSection:
    model: str = setting(
        "demo-draft",
        "The draft, named as --target names the target.",
        "--draft",
    )
    rank_group: tuple[int, ...] | None = setting(
        None,
        "The ranks that hold the draft, in shard order. Default: the first of the target's; of "
        "mtp all of them.",
        "--draft_ranks",
    )
    eagle_layers: tuple[int, ...] | None = setting(
        None,
        "Numbers of the target's layers after which an EAGLE-3 head takes hidden states, as in "
        "2 15 27 of 30. Default: those of the head's config, if programs agree about them.",
        least=0,
    )


@dataclass(frozen=True)
class OutputSection:
    results: str = setting(
        "results/runs.jsonl",
        "The file that records are appended to, one JSON line for each run or pass.",
        "--out",
        metavar="FILE",
        synonyms=("output", "output_file", "result_filename", "save_result"),
    )
    save_tokens: str | None = setting(
        None,
        "Write prompt and output ids to this file, one JSON line for each sequence.",
        metavar="FILE",
    )
    printoutput: bool = setting(False, "Print the generated text.")
    verbose: bool = setting(
        False,
        "Print every setting before, with what auto chose and why, and all metrics and checks "
        "after. The record has them.",
    )
    benchmark: bool = setting(
        False,
        "Time draft and verify separately on CUDA too, by events on its stream.",
    )


@dataclass(frozen=True)
class ModelSection:
    model: str = setting(
        "demo",
        "The model: demo, demo-draft, random:<preset>, a Hugging Face directory, a model's name on "
        "the Hugging Face hub, a .gguf file, or a .safetensors/.pth/.bin file beside its "
        "config.json.",
        synonyms=("model_path", "model_name", "model_name_or_path", "checkpoint_path"),
    )
    dtype: str = setting(
        "auto",
        "The dtype of activations, KV cache and weights. auto is bfloat16 where the hardware "
        "computes in it, else float32.",
        choices=("auto", *DTYPES),
        other_defaults="bfloat16 in plan, float32 in gate save, as stored in model convert",
    )
    linear: str = setting(
        "auto",
        "How linear layers multiply. packed lays weights out once for the products of a few rows "
        "on a CPU.",
        choices=("auto", *LINEARS),
    )
    elementwise: str = setting(
        "auto",
        "What computes norms, rotation, gates and states between linear layers. auto takes "
        f"{ELEMENTWISE_BESIDE_PACKED} (C++) beside packed layers, {ELEMENTWISE_ON_CUDA} on CUDA "
        f"where it is installed, else {PORTABLE_ELEMENTWISE}.",
        choices=("auto", *ELEMENTWISE),
    )
    native_steps: str = setting(
        "auto",
        "Compute each forward, and each chain of greedy drafts, in one call of a "
        "C++ library. auto does so on a CPU where attention, linear layers and elementwise "
        "operations are all native. MAGICDEC_NATIVE_STEPS=off in the environment turns auto off.",
        choices=("auto", "on", "off"),
    )
    target_dtype: str = setting(
        "auto",
        "The dtype of the target's matrices, while activations and KV stay in --dtype: int8 has a "
        "scale for up to 128 inputs of an output, stored is what the checkpoint has. auto is "
        "stored if that is numbers in groups, else --dtype.",
        choices=("auto", *WEIGHT_DTYPES),
    )


@dataclass(frozen=True)
class DraftChoice:
    """The drafter in one word, from which `RunConfig.with_draft` makes a drafter and a draft."""

    draft: str = setting(
        "self",
        "What proposes draft tokens: self (the model itself, with a small part of its KV cache), "
        "model:NAME (a smaller model, named as --model is), eagle:DIR (an EAGLE-3 head), mtp "
        "(the head for multi-token prediction in the model's own checkpoint), ngram (text of the "
        "prompt and the output), ngram+self, ngram+model:NAME, ngram+eagle:DIR or ngram+mtp (a "
        "lookup where it promises more, else the model), or none. Commands that serve requests "
        "serve them without drafts too. In acceptance settings may follow that take the place of "
        "the command's for this draft: self,kv_policy=snapkv,budget=257.",
        metavar="DRAFT",
        other_defaults="none in serve, inflight, recurrent and gate save, model:demo-draft in "
        "pipeline, self ngram ngram+self in advise",
        synonyms=("draft_model", "speculative_model", "speculative_config"),
    )


@dataclass(frozen=True)
class StagesSection:
    """The division of a model by layers, and emulated stages and links; None stands for real
    ones."""

    layer_split: str | None = setting(
        None,
        "Layers of each stage: counts (10,12), shares (0.25,0.75), or auto, which minimises "
        "the slowest stage by times of layers. With more ranks than stages, the ranks of a stage "
        "share its layers by tensor parallelism: auto:2 has two stages. In pipelined speculation, "
        "the place of the draft follows a slash: 0.1,0.4,0.5/1.0 has it on a rank of its own, and "
        "0.5,0.5/head on the first; a first share of 0 is a head without layers. Default: equal "
        "shares, the draft on the head.",
        metavar="SPLIT",
    )
    emulate_stage_ms: float | None = setting(
        None,
        "Stages sleep so long for a message of any size, in place of computing. Their tokens mean "
        "nothing, and only modes with stages can have them. Default: stages compute.",
        metavar="MS",
        above=0,
    )
    emulate_link_ms: float | None = setting(
        None,
        "Messages and cancellations between stages arrive later by so much. Default: as fast as "
        "the link is.",
        metavar="MS",
        above=0,
    )


@dataclass(frozen=True)
class ClusterSection:
    """The hosts and stages of a prediction."""

    nodes: tuple[int, ...] | None = setting(
        None,
        "Number of hosts: over which a plan spreads the ranks, by default 1; or which share the "
        "work of a simulated pipeline, the hosts of a stage by tensor parallelism.",
        least=1,
    )
    stages: tuple[int, ...] | None = setting(
        None,
        "Number of stages of a pipeline. Default: 4; with --nodes, every number that divides them.",
        least=1,
    )


@dataclass(frozen=True)
class PictureSection:
    plot: Path | None = setting(
        None,
        "Draw what was measured to this file, .png, .svg or .pdf: requests or stages over time, "
        "of the first repeat, acceptance by context, or where drafts pay.",
    )
    plot_ms: float | None = setting(
        None,
        "A chart of stages shows so much time, in ms. Default: some rounds of the slowest stage.",
        metavar="MS",
        above=0,
    )


@dataclass(frozen=True)
class WrittenSection:
    """The output of a command that appends no records."""

    out: Path | None = setting(
        None,
        "The file or directory to write. Default: machine.json for probe, DIR/model.pth for model "
        "convert (with --quantize DIR/model_FORMAT.pth), checkpoints/ID for model get; "
        "config prints, and report and export need it.",
        metavar="PATH",
    )
