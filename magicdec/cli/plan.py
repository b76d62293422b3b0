"""`magicdec plan`: predicts when speculation is faster, from the shape of the model, the bandwidth
and speed of the machine and an acceptance rate. It runs no model, reads no weights and imports no
torch.

Owns the checks of the flags and the choice of the predicted cells. `cost_model/` does the
arithmetic, `plan_report.py` prints.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from magicdec.cli.flags import refuse
from magicdec.cli.plan_flags import MAX_GAMMA, RATES, build_parser
from magicdec.config.choices.layers import choose_weights
from magicdec.config.sections import KVSection
from magicdec.cost_model.begin import Choice
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import find_conditional, find_curves, is_rate, longest
from magicdec.cost_model.plan import DTYPE_BYTES, Plan
from magicdec.distributed.groups import read_launch
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine
from magicdec.model.config import ModelConfig
from magicdec.model.presets.named import find_config
from magicdec.records.writing import write_file

LONG_CONTEXT = 1 << 20  # tokens; a policy runs again no more than of this many


def main() -> NoReturn:
    try:
        args, given = build_parser().read(sys.argv[1:])
        plan = make_plan(args)
        check_given(args, given)
        from magicdec.cost_model.plan_report import make_report, print_plan

        if args.json is not None:
            write_file("--out", args.json, "plan", make_report(plan))
    except ValueError as error:
        refuse(error, read_launch())
    print_plan(plan)
    sys.exit(0)


def check_given(args: argparse.Namespace, given: set[str]) -> None:
    """Raises ValueError for a flag that was given and would do nothing."""
    rates = [value for value in args.acceptance or () if is_rate(value)]
    if "acceptance_gamma" in given and not rates:
        raise ValueError(
            "--acceptance_gamma does nothing here: it is for an --acceptance that is one rate; "
            "leave it out"
        )
    for flag, ranks in (("link", args.tp // args.nodes), ("node_link", args.nodes)):
        for name in (flag, f"{flag}_latency_us"):
            if name in given and ranks == 1:
                what = "--nodes is 1" if flag == "node_link" else "a node has one rank"
                raise ValueError(f"--{name} does nothing here: {what}; leave it out")


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError, one line naming the flag, for errors that a user can correct."""
    _check_sizes(args)
    config = find_config("--model", args.model)
    _check_tp("--tp", args.tp, "--model", config)
    if args.tp % args.nodes:
        raise ValueError(f"--nodes {args.nodes} does not divide --tp {args.tp}")
    hardware = find_hardware(args, config.num_layers)
    is_int8 = choose_weights("--target_dtype", args.target_dtype, args.dtype) == "int8"
    size = DTYPE_BYTES[args.dtype]
    target = Deployment(config, hardware, size, args.tp, args.nodes, is_int8)
    drafter = "self" if args.draft_model is None else "model"
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
        batch_sizes=tuple(args.B),
        prefix_lens=tuple(args.prefix_len),
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
    if args.draft_model is None:
        if args.draft_tp is not None:
            raise ValueError("--draft_tp is for --draft_model; self-speculation drafts on --tp")
        if args.draft_dtype != "auto":
            raise ValueError("--draft_dtype is for --draft_model; else the model itself drafts")
        return target
    config, tp = find_config("--draft_model", args.draft_model), args.draft_tp or 1
    if config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"--draft_model {args.draft_model} has a vocabulary of {config.vocab_size}, "
            f"--model {args.model} one of {target.config.vocab_size}; they must be equal"
        )
    _check_tp("--draft_tp", tp, "--draft_model", config)
    nodes = -(-tp // (target.tp // target.nodes))
    if tp > target.tp or tp % nodes:
        raise ValueError(f"--draft_tp {tp} cannot be laid out on --tp {args.tp} ranks")
    is_int8 = choose_weights("--draft_dtype", args.draft_dtype, args.dtype) == "int8"
    return Deployment(config, target.hardware, target.dtype_bytes, tp, nodes, is_int8)


def find_hardware(args: argparse.Namespace, num_layers: int) -> Hardware:
    """The speeds of the machine, from the file or from flags. If a flag gives a link or the
    overhead, it replaces the value in the file."""
    rates = {flag: _rate(args, flag, unit, zero) for flag, unit, _, zero in RATES}
    by_hand = rates["bandwidth"] is not None, rates["flops"] is not None
    if (args.machine is None) != all(by_hand) or any(by_hand) != all(by_hand):
        raise ValueError("give either --machine FILE, or both --bandwidth and --flops")
    if args.machine is not None:
        base = load_machine(args.machine).hardware(args.dtype)
    else:
        base = Hardware(rates["bandwidth"] or 0.0, rates["flops"] or 0.0)
    overhead = rates["overhead_us"]
    return Hardware(
        base.read_bytes_per_s,
        base.flops_per_s,
        base.layer_overhead_s if overhead is None else overhead / num_layers,
        base.kv_bytes_per_s,
        _find_link(rates, "link", base.link, args.tp // args.nodes > 1),
        _find_link(rates, "node_link", base.node_link, args.nodes > 1),
        base.attention_flops_per_s,
        base.token_overhead_s,
    )


def _find_link(
    rates: dict[str, float | None], flag: str, measured: Link | None, is_needed: bool
) -> Link | None:
    bandwidth, latency = rates[flag], rates[f"{flag}_latency_us"]
    if (bandwidth is None) != (latency is None):
        raise ValueError(f"--{flag} and --{flag}_latency_us go together; give both or neither")
    if bandwidth is not None and latency is not None:
        return Link(latency, bandwidth)
    if measured is None and is_needed:
        what = "--nodes" if flag == "node_link" else "--tp"
        raise ValueError(
            f"{what} above 1 needs the cost of an all-reduce; give --{flag} and "
            f"--{flag}_latency_us, or a --machine probed with several ranks"
        )
    return measured


def _rate(args: argparse.Namespace, flag: str, unit: float, zero_too: bool) -> float | None:
    value = getattr(args, flag)
    if value is None:
        return None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_too):
        raise ValueError(f"--{flag} {value:g} is not a positive number")
    return float(value * unit)


def _check_sizes(args: argparse.Namespace) -> None:
    sizes = ("B", "prefix_len", "budget", "acceptance_gamma", "gen_len", "max_gamma")
    for name in (*sizes, "tp", "draft_tp", "nodes"):
        value = getattr(args, name)
        values: Sequence[int] = value if isinstance(value, list) else [value]
        for number in values:
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number} is too small; it must be at least 1")


def _check_tp(flag: str, tp: int, model_flag: str, config: ModelConfig) -> None:
    heads = config.num_heads
    if heads % tp:
        fitting = " ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{flag} {tp} does not divide the {heads} attention heads of {model_flag} "
            f"{config.name}; choose from {fitting}"
        )
