"""`magicdec plan --stages`: predicts what a pipeline of stages gives, next to tensor parallelism
over the same ranks and to one process. Imports no torch.

Owns the checks of its flags. `cost_model/stage_plan.py` does the arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from magicdec.cli.plan_flags import BATCH_SIZES, PREFIX_LENS
from magicdec.cli.planning.hardware import check_given, check_sizes, check_tp, find_target
from magicdec.cost_model.stage_plan import StagePlan
from magicdec.distributed.layer_split import count_stages
from magicdec.hardware.ceiling_file import load_machine
from magicdec.model.presets.named import find_config
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
