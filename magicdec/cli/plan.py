"""`magicdec plan`: predicts when speculation is faster, from the shape of the model, the bandwidth
and speed of the machine and an acceptance rate. It runs no model, reads no weights and imports no
torch.

Owns the checks of the flags and the choice of the predicted cells, for speculation and for stages.
`cost_model/` does the arithmetic, `plan_report.py` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.front.run import MODEL_PREFIX, SELF
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.plan_flags import (
    BATCH_SIZES,
    MAX_GAMMA,
    PREFIX_LENS,
    build_parser,
    check_given,
    check_sizes,
    check_tp,
    find_target,
)
from magicdec.config.choices.layers import choose_weights
from magicdec.config.sections import KVSection
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import find_conditional, find_curves, longest
from magicdec.cost_model.plan import Plan
from magicdec.cost_model.speculation import Choice
from magicdec.cost_model.stage_plan import StagePlan
from magicdec.distributed.groups import read_launch
from magicdec.distributed.layer_split import count_stages
from magicdec.hardware.ceiling_file import load_machine
from magicdec.model.presets.presets import find_config
from magicdec.records.writing import write_file


def predict_stages(args: argparse.Namespace, given: set[str]) -> Callable[[], None]:
    """Write the file that `--out` names. Returns what prints the plan."""
    plan = make_stage_plan(args)
    check_given(args, given)
    from magicdec.cost_model.stage_report import make_stage_report, print_stages

    if args.json is not None:
        write_file("--out", args.json, "stage_plan", make_stage_report(plan))
    return lambda: print_stages(plan)


def make_stage_plan(args: argparse.Namespace) -> StagePlan:
    """Raises ValueError, one line naming the flag, for errors that a user can correct."""
    check_sizes(args)
    config, asked = find_config("--model", args.model), f"--stages {args.stages}"
    check_tp("--tp", args.tp, "--model", config)
    if (named := count_stages(args.layer_split, args.stages)) != args.stages:
        raise ValueError(f"{asked}: --layer_split {args.layer_split} has {named} stages")
    num_ranks = args.stages * args.tp
    per_node = num_ranks // args.nodes
    if num_ranks % args.nodes or (per_node % args.tp and args.tp % per_node):
        raise ValueError(
            f"--nodes {args.nodes}: {asked} of --tp {args.tp} ranks cannot be divided evenly among "
            "so many hosts"
        )
    target = find_target(args, config, args.tp, max(1, args.tp // per_node))
    shares_host = False
    if args.machine is not None:
        shares_host = load_machine(args.machine).description.get("gpu") is None
    plan = StagePlan(
        stage=target,
        num_stages=args.stages,
        nodes=args.nodes,
        layer_split=args.layer_split,
        shares_host=shares_host,
        dtype=args.dtype,
        machine_source="flags" if args.machine is None else str(args.machine),
        lane_sizes=tuple(args.B or BATCH_SIZES[:1]),
        prefix_lens=tuple(args.prefix_len or PREFIX_LENS[:1]),
    )
    plan.layers(plan.lane_sizes[0], plan.prefix_lens[0])
    return plan


SPECULATION = (  # flags that --stages does not read
    *("acceptance", "conditional_acceptance", "acceptance_gamma", "draft", "draft_tp"),
    *("draft_dtype", "budget", "kv_policy", "gen_len", "max_gamma"),
)
LONG_CONTEXT = 1 << 20  # tokens; a policy runs again no more than of this many


def main() -> NoReturn:
    try:
        parser = build_parser()
        args, given = parser.read(sys.argv[1:])
        check_mode(args, given, parser)
        predict = predict_speculation if args.stages is None else predict_stages
        show = predict(args, given)
    except ValueError as error:
        refuse(error, read_launch())
    show()
    sys.exit(0)


def predict_speculation(args: argparse.Namespace, given: set[str]) -> Callable[[], None]:
    """Write the file that `--out` names. Returns what prints the plan."""
    plan = make_plan(args)
    check_given(args, given)
    from magicdec.cost_model.plan_report import make_report, print_plan

    if args.json is not None:
        write_file("--out", args.json, "plan", make_report(plan))
    return lambda: print_plan(plan)


def check_mode(args: argparse.Namespace, given: set[str], parser: Parser) -> None:
    """Raises ValueError for a flag of the other prediction."""
    if args.stages is None and "layer_split" in given:
        raise ValueError("--layer_split does nothing here: it is for --stages; leave it out")
    for name in SPECULATION if args.stages is not None else ():
        if name in given:
            raise ValueError(
                f"{parser.flag_of(name)} does nothing here: --stages {args.stages} predicts no "
                "speculation; leave it out"
            )


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError, one line naming the flag, for errors that a user can correct."""
    if args.acceptance is None and args.conditional_acceptance is None:
        raise ValueError(
            "one of the arguments --acceptance --conditional_acceptance is required, except with "
            "--stages"
        )
    check_sizes(args)
    config = find_config("--model", args.model)
    check_tp("--tp", args.tp, "--model", config)
    if args.tp % args.nodes:
        raise ValueError(f"--nodes {args.nodes} does not divide --tp {args.tp}")
    target = find_target(args, config, args.tp, args.nodes)
    drafter = SELF if args.draft == SELF else "model"
    if args.conditional_acceptance is not None:
        curves, source = find_conditional(args.conditional_acceptance, args.budget)
    else:
        curves, source = find_curves(
            args.acceptance, args.budget, drafter, args.kv_policy, args.acceptance_gamma
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
        machine_source="flags" if args.machine is None else str(args.machine),
        batch_sizes=tuple(args.B or BATCH_SIZES),
        prefix_lens=tuple(args.prefix_len or PREFIX_LENS),
        max_gamma=args.max_gamma or min(MAX_GAMMA, reach or MAX_GAMMA),
        gen_len=args.gen_len,
        choices={budget: find_choice(args.kv_policy, budget) for budget in curves},
    )


def find_choice(kv_policy: str | None, budget: int) -> Choice:
    """What the policy does before the first draft. The default policy does nothing, so that torch
    is imported only for another one."""
    if kv_policy is None:
        return Choice()
    from magicdec.drafting.policies.policy import load_policy

    kv, policy = KVSection(kv_policy, budget).resolve(), load_policy(kv_policy)
    policy.check(kv, MAX_GAMMA, "--budget")
    made = policy.build(kv)
    return Choice(made.observed_tokens, made.is_copied, made.rerun_tokens(LONG_CONTEXT))


def find_draft(args: argparse.Namespace, target: Deployment) -> Deployment:
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
