"""`magicdec plan`: predicts when speculation is faster, from the model's shape, the machine's rates
and an acceptance (`predict/`). It runs no model and imports no torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.cli.parsing.record_files import given_flags
from magicdec.config.capabilities import check_standalone
from magicdec.config.choices.backend import check_codes, check_fewer_bits
from magicdec.config.choices.layers import check_copy, choose_weights
from magicdec.config.machine import ModelTraits
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    MODEL_PREFIX,
    NO_MTP_WEIGHTS,
    SELF,
    AttentionSection,
    ClusterSection,
    DecodingSection,
    DraftChoice,
    KVSection,
    ModelSection,
    OutputSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.config.weight_formats import WEIGHT_FORMATS
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine, load_quiet_machine
from magicdec.hardware.costs import DTYPE_BYTES, Deployment, mixers_of
from magicdec.model.config import ModelConfig
from magicdec.model.presets.presets import PRESETS, find_config
from magicdec.names import (
    DEFAULT_KV_POLICY,
    DTYPES,
    EVERY_TOKEN,
    FULL_KV_POLICY,
    KV_POLICIES,
    MTP,
    NARROW,
    SAME,
    STORED,
    WITHOUT_BUDGET,
)
from magicdec.output.tables import print_tables
from magicdec.output.writing import check_record_file, check_writable, write_text
from magicdec.predict.acceptance_file import RecordsByKind, load_by_kind
from magicdec.predict.curves import (
    AcceptanceSection,
    find_conditional,
    find_curves,
    is_file,
    known_gammas,
    longest,
)
from magicdec.predict.draft_table import FORMATS, DraftTable, fastest_runs
from magicdec.predict.golden import is_golden
from magicdec.predict.plan import SpeculationPlan, describe_model, make_record, tables
from magicdec.predict.speculation import SelectionCost
from magicdec.records.record import append_records

MAX_GAMMA = 8
LONG_CONTEXT = 1 << 20  # tokens; a policy runs again no more than of this many


@dataclass(frozen=True)
class PlanSection(AcceptanceSection):
    model: str = same(ModelSection, "model")
    draft: str = same(DraftChoice, "draft")
    dtype: str = same(ModelSection, "dtype", "bfloat16", choices=DTYPES)
    target_dtype: str = same(ModelSection, "target_dtype")
    draft_weights: str | None = same(DecodingSection, "draft_weights")
    kv_dtype: str = same(AttentionSection, "kv_dtype")
    machine: Path | None = setting(
        None,
        "The file that `magicdec probe` wrote on this machine with the same ranks and threads: the "
        "machine of a prediction.",
        metavar="FILE",
        other_defaults="machine.json in advise, which probes if it is not there",
    )
    allow_busy_machine: bool = setting(
        False,
        "Take a --machine that was probed while another load took cores. Without it, such a file "
        "is refused.",
    )
    bandwidth: float | None = setting(
        None, "GB/s that one rank reads. With --flops it replaces --machine.", above=0
    )
    flops: float | None = setting(
        None,
        "TFLOP/s of one rank in --dtype. With --bandwidth it replaces --machine.",
        above=0,
    )
    link: float | None = setting(
        None, "GB/s between the ranks of a node. Default: from --machine.", above=0
    )
    link_latency_us: float | None = setting(
        None, "Us of a small all-reduce in a node. Default: from --machine.", least=0
    )
    node_link: float | None = setting(None, "GB/s between nodes. Default: from --machine.", above=0)
    node_link_latency_us: float | None = setting(
        None, "Us of a small all-reduce between nodes. Default: from --machine.", least=0
    )
    overhead_us: float | None = setting(
        None,
        "Us of fixed cost for each forward of --model (kernel launches, Python). Default: from "
        "--machine, otherwise 0.",
        least=0,
    )
    B: tuple[int, ...] = same(WorkloadSection, "batch_size", (1, 4, 8))
    prefix_len: tuple[int, ...] = same(WorkloadSection, "prefix_len", (1024, 4096, 16384))
    budget: tuple[int, ...] | None = same(KVSection, "budget", None, is_default=True, least=1)
    kv_policy: str = same(
        KVSection,
        "policy",
        choices=tuple(name for name in KV_POLICIES if name != FULL_KV_POLICY),
    )
    draft_kv_dtype: str = same(KVSection, "draft_kv_dtype")
    gen_len: int | None = same(WorkloadSection, "gen_len")
    max_gamma: int | None = setting(
        None,
        f"Largest number of draft tokens in a step to predict. Default: {MAX_GAMMA}, or as many as "
        "--acceptance has.",
        least=1,
    )
    tp: int = setting(1, "Ranks that share the model by tensor parallelism.", least=1)
    nodes: int = same(ClusterSection, "nodes", 1)
    out: Path | None = same(OutputSection, "results", None, is_default=True)
    export: tuple[str, ...] | None = setting(
        None,
        "Write the best number of draft tokens by batch size and context to a file, as a format "
        f"and a FILE: {' or '.join(FORMATS)}. Further pairs write further files.",
        metavar="FORMAT FILE",
    )

    acceptance_curve: str | None = setting(
        None,
        "The curve of a golden file of --acceptance, such as thinking_on or self_streaming_llm_65. "
        "Default: its only one.",
    )

    @property
    def exports(self) -> list[tuple[str, Path]]:
        """The formats and files of `--export`. Raises ValueError for what cannot be written."""
        words = self.export or ()
        pairs = []
        for name, file in zip_longest(words[::2], words[1::2]):
            if name not in FORMATS:
                raise ValueError(f"--export {name} is not known; choose from {', '.join(FORMATS)}")
            if file is None:
                raise ValueError(f"--export {name}: name a file to write to after it")
            check_writable(f"--export {name}", Path(file))
            pairs.append((name, Path(file)))
        return pairs

    @cached_property
    def records(self) -> RecordsByKind:
        """The records of the file of `--acceptance`, read once; empty if it is none of records.
        Raises ValueError if it cannot be read."""
        source, *others = self.acceptance or ("",)
        has_records = is_file(source) and not is_golden(source) and not others
        return load_by_kind(Path(source)) if has_records else {}

    @property
    def names(self) -> dict[str, str]:
        """Which of several models, dtypes and draft models in a file of records counts."""
        draft = self.model if self.draft == MTP else self.draft.removeprefix(MODEL_PREFIX)
        found = {"models": self.model, "draft models": draft}
        return {noun: Path(name).name for noun, name in found.items()} | {"dtypes": self.dtype}

    @property
    def copied(self) -> str | None:
        """The dtype of a copy of every token that drafts read; None without."""
        return self.draft_kv_dtype if self.kv_policy in WITHOUT_BUDGET else None

    @property
    def drafter(self) -> str:
        return self.draft if self.draft in (SELF, MTP) else "model"

    @property
    def ranks_per_node(self) -> int:
        return self.tp // self.nodes

    @property
    def machine_source(self) -> str:
        """The source of the rates, with its ranks: they share a host's memory, so that rates depend
        on their number."""
        if self.machine is None:
            return "flags"
        description = load_machine(self.machine).description
        ranks = description.get("world_size")
        processor = description.get("gpu") or description.get("cpu") or "unknown"
        other = "" if ranks in (None, self.tp) else f", not of {self.tp} ranks"
        threads = description.get("threads")
        return f"{self.machine} ({processor}, ranks {ranks} x threads {threads}{other})"


def predict(values: ParsedValues) -> int:
    args = values[PlanSection]
    refuse_idle(args, values)
    exports = args.exports
    if args.out is not None:
        check_record_file("--out", args.out)
    plan = make_plan(args)
    say_busy(args)
    record = make_record(plan)
    record = replace(record, config=record.config | {"flags": given_flags(values)})
    if args.out is not None:
        append_records("--out", args.out, [record])
    if exports:
        table = make_draft_table(args, plan)
        for name, path in exports:
            write_text(f"--export {name}", path, FORMATS[name](table))
    print_tables(tables([record]))
    return 0


def say_busy(args: PlanSection) -> None:
    """Says what `--allow_busy_machine` has let pass, if anything."""
    busy = "" if args.machine is None else load_machine(args.machine).busy
    if busy:
        print(f"--allow_busy_machine takes --machine {args.machine}: {busy}", file=sys.stderr)


def make_draft_table(args: PlanSection, plan: SpeculationPlan) -> DraftTable:
    """The predictions from one row and one token on, with the runs of `--acceptance`."""
    draft = None if args.draft == SELF else args.draft.removeprefix(MODEL_PREFIX)
    name = PRESETS[draft].repo_id if draft in PRESETS else draft
    keys = {} if name is None else {"method": "draft_model", "model": name}
    if args.draft == MTP:  # which is in the target's checkpoint
        draft = args.model
        keys = {"method": MTP}
    target = describe_model(plan.target, args.dtype)
    target = {key: target[key] for key in ("dtype", "target_dtype")} | {"model": args.model}
    like = args.drafter, args.kv_policy, args.draft_weights, args.copied
    runs = fastest_runs(args.records.get("pass", ()), target, draft, like)
    # With a single context, entries have none, as vLLM's releases take them.
    contexts = {*plan.prefix_lens, *([1] if len(plan.prefix_lens) > 1 else [])}
    batch_sizes = tuple(sorted({1, *plan.batch_sizes}))
    prefix_lens = tuple(sorted(contexts))
    cells = make_record(replace(plan, batch_sizes=batch_sizes, prefix_lens=prefix_lens)).cells
    return DraftTable(cells, plan.target.config.max_length, keys, runs)


def refuse_idle(args: PlanSection, values: ParsedValues) -> None:
    """Raises ValueError for a given flag that would do nothing."""
    if args.acceptance is None or any(map(is_file, args.acceptance)):
        values.refuse_given(["plan.acceptance_gamma"], "it is for an --acceptance that is a rate")
    if len(args.acceptance or ()) != 1 or not any(map(is_golden, args.acceptance or ())):
        values.refuse_given(
            ["plan.acceptance_curve"], "it is for an --acceptance that is a golden file (.yaml)"
        )
    policy = f"--kv_policy {args.kv_policy}"
    if args.copied is None:
        values.refuse_given(["plan.draft_kv_dtype"], f"{policy} does not use it")
    else:
        values.refuse_given(["plan.budget"], f"{policy} reads the whole cache")
    if args.ranks_per_node == 1:
        values.refuse_given(["plan.link", "plan.link_latency_us"], "a node has one rank")
    if args.nodes == 1:
        values.refuse_given(["plan.node_link", "plan.node_link_latency_us"], "--nodes is 1")


def find_target(args: PlanSection, config: ModelConfig, nodes: int) -> Deployment:
    """The model on the `--tp` ranks of `nodes` hosts."""
    hardware = find_hardware(args, config.num_layers)
    weights = choose_weights("--target_dtype", args.target_dtype, args.dtype)
    if is_in_groups(config) and args.target_dtype == "auto":
        weights = STORED
    low_bit = weights if weights in NARROW else None
    kv_dtype = None if args.kv_dtype == "auto" else args.kv_dtype
    if kv_dtype is not None:
        traits = ModelTraits(config.cached_head_dim, has_alibi=config.positions == "alibi")
        check_codes(kv_dtype, args.dtype, traits)
        if any(mixer.entry_bytes(Shard(), 1) for mixer in mixers_of(config)):
            raise ValueError(
                f"--kv_dtype {kv_dtype}: layers of --model {config.name} keep something else than "
                "K and V; choose auto"
            )
    rank = hardware, DTYPE_BYTES[args.dtype], args.tp, nodes
    return Deployment(config, *rank, low_bit, kv_dtype)


def is_in_groups(config: ModelConfig) -> bool:
    """Whether some of the matrices are stored as numbers in groups: of a checkpoint as a run holds
    them, of a preset as they were published."""
    expert_bytes = None if config.experts is None else config.experts.stored_bytes
    return config.stored_bytes is not None or expert_bytes is not None


def find_hardware(args: PlanSection, num_layers: int) -> Hardware:
    """The rates of the file or of flags. A flag's link or overhead replaces the file's."""
    if args.machine is not None and args.bandwidth is None and args.flops is None:
        machine = load_quiet_machine(args.machine, args.allow_busy_machine)
        hardware = machine.hardware(args.dtype)
    elif args.machine is None and args.bandwidth is not None and args.flops is not None:
        hardware = Hardware(1e9 * args.bandwidth, 1e12 * args.flops)
    else:
        raise ValueError("give either --machine FILE, or both --bandwidth and --flops")
    if args.overhead_us is not None:
        hardware = replace(hardware, layer_overhead_s=1e-6 * args.overhead_us / num_layers)
    link = find_link(args, "link", hardware.link, args.ranks_per_node > 1)
    node_link = find_link(args, "node_link", hardware.node_link, args.nodes > 1)
    return replace(hardware, link=link, node_link=node_link)


def find_link(args: PlanSection, flag: str, measured: Link | None, is_needed: bool) -> Link | None:
    """The link of flags, or the `measured` one. Raises ValueError if ranks need one and there is
    none."""
    bandwidth = getattr(args, flag)
    latency = getattr(args, f"{flag}_latency_us")
    if (bandwidth is None) != (latency is None):
        raise ValueError(f"--{flag} and --{flag}_latency_us go together; give both or neither")
    if bandwidth is not None:
        return Link(1e-6 * latency, 1e9 * bandwidth)
    if measured is None and is_needed:
        how = (
            f"`magicdec probe --nproc {args.tp}` wrote" if flag == "link" else "several hosts wrote"
        )
        raise ValueError(
            f"several ranks need the cost of a link; give --{flag} and --{flag}_latency_us, or a "
            f"--machine that {how}"
        )
    return measured


def find_stored(flag: str, name: str) -> ModelConfig:
    """The config of a name. The weights decide whether a head is tied and how many bits matrices
    have; reading them imports torch, which presets need not."""
    if not Path(name).expanduser().exists():
        return find_config(flag, name)
    from magicdec.model.checkpoint.source import find_stored_config

    return find_stored_config(flag, name)


def find_model(args: PlanSection) -> ModelConfig:
    """The model's config. Raises ValueError unless `--tp` divides its heads."""
    config = find_stored("--model", args.model)
    heads = config.num_heads
    if heads % args.tp:
        fitting = " ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"--tp {args.tp} does not divide the {heads} attention heads of --model "
            f"{config.name}; choose from {fitting}"
        )
    return config


def make_plan(args: PlanSection, records: RecordsByKind | None = None) -> SpeculationPlan:
    """The plan of the flags. `records` are those of the file of `--acceptance` that count (None:
    all). Raises ValueError, one line naming the flag."""
    if args.acceptance is None and args.conditional_acceptance is None:
        raise ValueError("give --acceptance or --conditional_acceptance")
    config = find_model(args)
    if args.tp % args.nodes:
        raise ValueError(f"--nodes {args.nodes} does not divide --tp {args.tp}")
    target = find_target(args, config, args.nodes)
    budgets = args.budget if args.copied is None else (EVERY_TOKEN,)
    if args.conditional_acceptance is not None:
        curves, source = find_conditional(args.conditional_acceptance, budgets)
    else:
        curves, source = find_curves(
            args.acceptance or (),
            budgets,
            args.drafter,
            args.kv_policy,
            args.acceptance_gamma,
            args.draft_weights,
            args.records if records is None else records,
            args.acceptance_curve,
            args.names,
            args.copied,
        )
    reach = longest(curves)
    if args.max_gamma is not None and reach is not None and args.max_gamma > reach:
        raise ValueError(f"--max_gamma {args.max_gamma}: --acceptance has {reach} positions")
    max_gamma = args.max_gamma or min(MAX_GAMMA, reach or MAX_GAMMA)
    least = min(known_gammas(next(iter(curves.values())), reach or 1))
    if max_gamma < least:
        raise ValueError(f"--max_gamma {max_gamma}: --acceptance begins at {least} draft tokens")
    return SpeculationPlan(
        target=target,
        draft=find_draft(args, target),
        dtype=args.dtype,
        curves=curves,
        acceptance_source=source,
        machine_source=args.machine_source,
        batch_sizes=args.B,
        prefix_lens=args.prefix_len,
        max_gamma=max_gamma,
        gen_len=args.gen_len or DEFAULT_GEN_LEN,
        kv_policy=args.kv_policy,
        choices={budget: find_choice(args.kv_policy, budget) for budget in curves},
    )


def find_choice(kv_policy: str, budget: int) -> SelectionCost:
    """The policy's work before the first draft. The default policy does none, so that only others
    import torch."""
    if kv_policy == DEFAULT_KV_POLICY:
        return SelectionCost()
    from magicdec.speculation.policies.policy import load_policy

    kv = KVSection(kv_policy, budget).resolve()
    policy = load_policy(kv_policy)
    policy.check(kv, MAX_GAMMA, "--budget")
    made = policy.build(kv)
    return SelectionCost(made.observed_tokens, made.is_copied, made.rerun_tokens(LONG_CONTEXT))


def find_draft(args: PlanSection, target: Deployment) -> Deployment:
    """The target itself, its head on all of its ranks, or a standalone draft on one of them."""
    low_bit = None if args.draft_weights == SAME else args.draft_weights
    if args.draft == MTP:
        return find_mtp_head(args, target)
    if args.draft == SELF:
        check_copy(low_bit, target.low_bit or args.dtype)
        if args.copied is not None:
            check_fewer_bits(args.kv_policy, args.copied, target.kv_dtype)
        kv_dtype = args.copied or target.kv_dtype
        return replace(target, low_bit=low_bit or target.low_bit, kv_dtype=kv_dtype)
    if args.copied is not None:
        check_standalone(args.kv_policy)
    name = args.draft.removeprefix(MODEL_PREFIX)
    if name in ("", args.draft):
        choices = f"{SELF}, {MTP}, {MODEL_PREFIX}NAME"
        raise ValueError(f"--draft {args.draft} is not known; choose from {choices}")
    config = replace(find_stored("--draft", name))  # an object of its own, also of the same model
    if config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"--draft {args.draft} has a vocabulary of {config.vocab_size}, "
            f"--model {args.model} one of {target.config.vocab_size}; they must be equal"
        )
    if low_bit is None and is_in_groups(config):
        low_bit = STORED
    return replace(target, config=config, tp=1, nodes=1, low_bit=low_bit, kv_dtype=None)


def find_mtp_head(args: PlanSection, target: Deployment) -> Deployment:
    """The head for multi-token prediction, which multiplies with the target's matrix of logits.
    Its own weights have the dtype of activations."""
    model = target.config
    if model.num_mtp_layers != 1:
        raise ValueError(
            f"--draft {MTP}: --model {args.model} has {model.num_mtp_layers} layers for "
            f"multi-token prediction, and heads of one are served; choose {SELF} or "
            f"{MODEL_PREFIX}NAME"
        )
    if args.draft_weights not in (None, SAME):
        raise ValueError(f"--draft_weights {args.draft_weights}: {NO_MTP_WEIGHTS}")
    config = replace(model.mtp_config(), name=f"{MTP} of {model.name}")
    if target.low_bit is None:
        return replace(target, config=config, kv_dtype=None)
    head_bytes = model.head_bytes
    if target.low_bit != STORED:
        head_bytes = float(WEIGHT_FORMATS[target.low_bit].bytes_of(model.hidden_size))
    config = replace(config, head_bytes=head_bytes)
    return replace(target, config=config, low_bit=STORED, kv_dtype=None)


main = LoneCommand(
    predict,
    "Predict when speculation is faster than autoregressive decoding, from the model's shape and "
    "the machine's speed.",
    {"file": ConfigFile(), "plan": PlanSection()},
)
