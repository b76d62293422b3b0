"""`magicdec plan`: predicts when speculation is faster, from the shape of the model, the bandwidth
and speed of the machine and an acceptance rate. It runs no model, reads no weights and imports no
torch. `cost_model/` does the arithmetic and makes the record and its tables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser, Values
from magicdec.config.choices.layers import choose_weights
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    MODEL_PREFIX,
    SELF,
    ClusterSection,
    DecodingSection,
    DraftChoice,
    DraftSection,
    KVSection,
    ModelSection,
    OutputSection,
    StagesSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.cost_model import plan as plans
from magicdec.cost_model import stage_plan as stage_plans
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import (
    AcceptanceSection,
    find_conditional,
    find_curves,
    is_rate,
    longest,
)
from magicdec.cost_model.plan import DTYPE_BYTES, Plan
from magicdec.cost_model.speculation import Choice
from magicdec.cost_model.stage_plan import StagePlan
from magicdec.distributed.groups import read_launch
from magicdec.distributed.layer_split import count_stages
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine
from magicdec.model.config import ModelConfig
from magicdec.model.presets.presets import find_config
from magicdec.names import DEFAULT_KV_POLICY, DTYPES, FULL_KV_POLICY, KV_POLICIES
from magicdec.records.record import Record, append_records
from magicdec.tables import Table, print_tables

MAX_GAMMA = 8
LONG_CONTEXT = 1 << 20  # tokens; a policy runs again no more than of this many
LINKS = ("link", "node_link")
SPECULATION = (  # settings that --stages does not read
    *("acceptance", "conditional_acceptance", "acceptance_gamma", "draft", "draft_tp"),
    *("draft_dtype", "budget", "kv_policy", "gen_len", "max_gamma"),
)


@dataclass(frozen=True)
class PlanSection(AcceptanceSection):
    """The settings of a plan."""

    model: str = same(ModelSection, "model")
    draft: str = same(DraftChoice, "draft")
    dtype: str = same(ModelSection, "dtype", "bfloat16", choices=DTYPES)
    target_dtype: str = same(ModelSection, "target_dtype")
    draft_dtype: str = same(DraftSection, "draft_dtype")
    machine: Path | None = same(DecodingSection, "machine")
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
    gen_len: int | None = same(WorkloadSection, "gen_len")
    max_gamma: int | None = setting(
        None,
        f"Largest number of draft tokens in a step to predict. Default: {MAX_GAMMA}, or as many as "
        "--acceptance has.",
        least=1,
    )
    tp: int = setting(
        1,
        "Ranks that share the model, or each stage of it, by tensor parallelism.",
        least=1,
    )
    draft_tp: int | None = setting(
        None, f"Ranks that share --draft {MODEL_PREFIX}NAME. Default: 1.", least=1
    )
    nodes: int = same(ClusterSection, "nodes", 1)
    stages: int | None = same(ClusterSection, "stages")
    layer_split: str | None = same(StagesSection, "layer_split")
    out: Path | None = same(OutputSection, "results", None, is_default=True)

    @property
    def ranks_per_node(self) -> int:
        return self.tp * (self.stages or 1) // self.nodes

    @property
    def machine_source(self) -> str:
        """Where the rates come from."""
        return "flags" if self.machine is None else str(self.machine)


def build_parser() -> Parser:
    return Parser(
        "Predict when speculation is faster than autoregressive decoding, from the model's shape "
        "and the machine's speed; or, with --stages, what a pipeline of stages gives next to "
        "tensor parallelism and to one process.",
        {"plan": PlanSection()},
    )


def main() -> NoReturn:
    try:
        values = build_parser().read(sys.argv[1:])
        args = values[PlanSection]
        check_mode(args, values)
        predict = predict_speculation if args.stages is None else predict_stages
        record, tables = predict(args)
        check_given(args, values)
        if args.out is not None:
            append_records("--out", args.out, [record])
    except ValueError as error:
        refuse(error, read_launch())
    print_tables(tables)
    sys.exit(0)


def check_mode(args: PlanSection, values: Values) -> None:
    """Raises ValueError for a flag of the other prediction."""
    if args.stages is None:
        values.refuse_given(["plan.layer_split"], "it is for --stages")
    else:
        names = [f"plan.{name}" for name in SPECULATION]
        values.refuse_given(names, f"--stages {args.stages} predicts no speculation")


def check_given(args: PlanSection, values: Values) -> None:
    """Raises ValueError for a flag that was given and would do nothing."""
    if not any(is_rate(value) for value in args.acceptance or ()):
        values.refuse_given(["plan.acceptance_gamma"], "it is for an --acceptance that is one rate")
    if args.ranks_per_node == 1:
        values.refuse_given(["plan.link", "plan.link_latency_us"], "a node has one rank")
    if args.nodes == 1:
        values.refuse_given(["plan.node_link", "plan.node_link_latency_us"], "--nodes is 1")


def predict_speculation(args: PlanSection) -> tuple[Record, list[Table]]:
    """The record and its tables."""
    record = plans.make_record(make_plan(args))
    return record, plans.tables([record])


def predict_stages(args: PlanSection) -> tuple[Record, list[Table]]:
    """The record and its tables."""
    record = stage_plans.make_record(make_stage_plan(args))
    return record, stage_plans.tables([record])


def find_target(args: PlanSection, config: ModelConfig, nodes: int) -> Deployment:
    """The model on `--tp` ranks on `nodes` hosts."""
    hardware = find_hardware(args, config.num_layers)
    is_int8 = choose_weights("--target_dtype", args.target_dtype, args.dtype) == "int8"
    return Deployment(config, hardware, DTYPE_BYTES[args.dtype], args.tp, nodes, is_int8)


def find_hardware(args: PlanSection, num_layers: int) -> Hardware:
    """The speeds of the machine, from the file or from flags. If a flag gives a link or the
    overhead, it replaces the value in the file."""
    if args.machine is not None and args.bandwidth is None and args.flops is None:
        hardware = load_machine(args.machine).hardware(args.dtype)
    elif args.machine is None and args.bandwidth is not None and args.flops is not None:
        hardware = Hardware(1e9 * args.bandwidth, 1e12 * args.flops)
    else:
        raise ValueError("give either --machine FILE, or both --bandwidth and --flops")
    if args.overhead_us is not None:
        hardware = replace(hardware, layer_overhead_s=1e-6 * args.overhead_us / num_layers)
    link, node_link = (find_link(args, flag, getattr(hardware, flag)) for flag in LINKS)
    return replace(hardware, link=link, node_link=node_link)


def find_link(args: PlanSection, flag: str, measured: Link | None) -> Link | None:
    """The link of that flag, which is `measured` unless flags give it. Raises ValueError if the
    ranks need one and there is none."""
    bandwidth, latency = getattr(args, flag), getattr(args, f"{flag}_latency_us")
    if (bandwidth is None) != (latency is None):
        raise ValueError(f"--{flag} and --{flag}_latency_us go together; give both or neither")
    if bandwidth is not None:
        return Link(1e-6 * latency, 1e9 * bandwidth)
    is_needed = args.ranks_per_node > 1
    reason = "--tp above 1 needs the cost of an all-reduce"
    if flag == "node_link":
        is_needed = args.nodes > 1
        reason = "--nodes above 1 needs the cost of an all-reduce"
    elif args.stages is not None:
        reason = f"--stages {args.stages} needs the cost of a link"
    if measured is None and is_needed:
        raise ValueError(
            f"{reason}; give --{flag} and --{flag}_latency_us, or a --machine probed with several "
            "ranks"
        )
    return measured


def check_tp(flag: str, tp: int, model_flag: str, config: ModelConfig) -> None:
    """Raises ValueError unless the heads can be divided among so many ranks."""
    heads = config.num_heads
    if heads % tp:
        fitting = " ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{flag} {tp} does not divide the {heads} attention heads of {model_flag} "
            f"{config.name}; choose from {fitting}"
        )


def make_stage_plan(args: PlanSection) -> StagePlan:
    """Raises ValueError, one line naming the flag, for errors that a user can correct."""
    config = find_config("--model", args.model)
    stages, tp, machine = f"--stages {args.stages}", args.tp, args.machine
    assert args.stages is not None, "it chose this prediction"
    check_tp("--tp", tp, "--model", config)
    if (num_stages := count_stages(args.layer_split, args.stages)) != args.stages:
        raise ValueError(f"{stages}: --layer_split {args.layer_split} has {num_stages} stages")
    per_node = args.ranks_per_node
    if args.stages * tp % args.nodes or (per_node % tp and tp % per_node):
        raise ValueError(
            f"--nodes {args.nodes}: {stages} of --tp {tp} ranks cannot be divided evenly "
            "among so many hosts"
        )
    plan = StagePlan(
        stage=find_target(args, config, max(1, tp // per_node)),
        num_stages=args.stages,
        nodes=args.nodes,
        layer_split=args.layer_split,
        shares_host=machine is not None and load_machine(machine).description.get("gpu") is None,
        dtype=args.dtype,
        machine_source=args.machine_source,
        lane_sizes=args.B,
        prefix_lens=args.prefix_len,
    )
    plan.layers(plan.lane_sizes[0], plan.prefix_lens[0])
    return plan


def make_plan(args: PlanSection) -> Plan:
    """Raises ValueError, one line naming the flag, for errors that a user can correct."""
    if args.acceptance is None and args.conditional_acceptance is None:
        raise ValueError(
            "give --acceptance or --conditional_acceptance, which only --stages does without"
        )
    config = find_config("--model", args.model)
    check_tp("--tp", args.tp, "--model", config)
    if args.tp % args.nodes:
        raise ValueError(f"--nodes {args.nodes} does not divide --tp {args.tp}")
    target = find_target(args, config, args.nodes)
    if args.conditional_acceptance is not None:
        curves, source = find_conditional(args.conditional_acceptance, args.budget)
    else:
        drafter = SELF if args.draft == SELF else "model"
        curves, source = find_curves(
            args.acceptance or (), args.budget, drafter, args.kv_policy, args.acceptance_gamma
        )
    reach = longest(curves)
    if args.max_gamma is not None and reach is not None and args.max_gamma > reach:
        raise ValueError(f"--max_gamma {args.max_gamma}: --acceptance has {reach} positions")
    return Plan(
        target=target,
        draft=find_draft(args, target),
        dtype=args.dtype,
        curves=curves,
        acceptance_source=source,
        machine_source=args.machine_source,
        batch_sizes=args.B,
        prefix_lens=args.prefix_len,
        max_gamma=args.max_gamma or min(MAX_GAMMA, reach or MAX_GAMMA),
        gen_len=args.gen_len or DEFAULT_GEN_LEN,
        choices={budget: find_choice(args.kv_policy, budget) for budget in curves},
    )


def find_choice(kv_policy: str, budget: int) -> Choice:
    """What the policy does before the first draft. The default policy does nothing, so that torch
    is imported only for another one."""
    if kv_policy == DEFAULT_KV_POLICY:
        return Choice()
    from magicdec.drafting.policies.policy import load_policy

    kv, policy = KVSection(kv_policy, budget).resolve(), load_policy(kv_policy)
    policy.check(kv, MAX_GAMMA, "--budget")
    made = policy.build(kv)
    return Choice(made.observed_tokens, made.is_copied, made.rerun_tokens(LONG_CONTEXT))


def find_draft(args: PlanSection, target: Deployment) -> Deployment:
    """The target itself, or a standalone draft on the first `--draft_tp` of its ranks."""
    name = args.draft.removeprefix(MODEL_PREFIX)
    if args.draft != SELF and (name == args.draft or not name):
        choices = f"{SELF}, {MODEL_PREFIX}NAME"
        raise ValueError(f"--draft {args.draft} is not known; choose from {choices}")
    if args.draft == SELF:
        if args.draft_tp is not None:
            raise ValueError(f"--draft_tp is for --draft {MODEL_PREFIX}NAME; self drafts on --tp")
        if args.draft_dtype != "auto":
            raise ValueError(f"--draft_dtype is for --draft {MODEL_PREFIX}NAME; self is the model")
        return target
    config, tp = find_config("--draft", name), args.draft_tp or 1
    if config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"--draft {args.draft} has a vocabulary of {config.vocab_size}, "
            f"--model {args.model} one of {target.config.vocab_size}; they must be equal"
        )
    check_tp("--draft_tp", tp, "--draft", config)
    nodes = -(-tp // (target.tp // target.nodes))
    if tp > target.tp or tp % nodes:
        raise ValueError(f"--draft_tp {tp} cannot be laid out on --tp {args.tp} ranks")
    is_int8 = choose_weights("--draft_dtype", args.draft_dtype, args.dtype) == "int8"
    return Deployment(config, target.hardware, target.dtype_bytes, tp, nodes, is_int8)
