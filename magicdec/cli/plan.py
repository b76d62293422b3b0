"""`magicdec plan`: predicts when speculation is faster, from the shape of the model, the bandwidth
and speed of the machine and an acceptance rate. It runs no model, reads no weights and imports no
torch.

Owns the flags and their checks, and the choice of the predicted cells. `costs.py` does the
arithmetic, `plan_report.py` prints.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import Parser, refuse
from magicdec.config.layer_choice import choose_weights
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import DEFAULT_POLICY, find_curves, longest
from magicdec.cost_model.plan import DTYPE_BYTES, Plan
from magicdec.distributed.groups import read_launch
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine
from magicdec.model.config import ModelConfig
from magicdec.model.presets.named import find_config
from magicdec.names import DTYPES, FULL_KV_POLICY, KV_POLICIES, WEIGHT_DTYPES
from magicdec.records.writing import write_file

MAX_GAMMA = 8
# (flag, its unit in SI units, help text, whether it may be 0)
RATES: tuple[tuple[str, float, str, bool], ...] = (
    ("bandwidth", 1e9, "GB/s that one rank reads; with --flops it replaces --machine", False),
    (
        "flops",
        1e12,
        "TFLOP/s of one rank in --dtype; with --bandwidth it replaces --machine",
        False,
    ),
    ("link", 1e9, "GB/s between the ranks of a node; default: from --machine", False),
    ("link_latency_us", 1e-6, "us of a small all-reduce in a node; default: from --machine", True),
    ("node_link", 1e9, "GB/s between nodes; default: from --machine", False),
    (
        "node_link_latency_us",
        1e-6,
        "us of a small all-reduce between nodes; default: from --machine",
        True,
    ),
    (
        "overhead_us",
        1e-6,
        "us of fixed cost for each forward of --model (kernel launches, Python); default: from "
        "--machine, otherwise 0",
        True,
    ),
)


def main() -> NoReturn:
    try:
        args = build_parser().parse_args(sys.argv[1:])
        plan = make_plan(args)
        from magicdec.cost_model.plan_report import make_report, print_plan

        if args.json is not None:
            write_file("--json", args.json, "plan", make_report(plan))
    except ValueError as error:
        refuse(error, read_launch())
    print_plan(plan)
    sys.exit(0)


def build_parser() -> Parser:
    parser = Parser(
        description="Predict when speculation is faster than autoregressive decoding, from the "
        "model's shape and the machine's speed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        default="demo",
        help="the model: demo, a preset, random:<preset> or a directory [demo]",
    )
    add("--draft_model", help="a standalone draft model; default: the model drafts for itself")
    add("--machine", type=Path, metavar="FILE", help="the file that `magicdec probe` wrote")
    for flag, _, text, _ in RATES:
        add(f"--{flag}", type=float, metavar="X", help=text)
    add("--acceptance", nargs="+", required=True, metavar="A",
        help="the acceptance: a rate such as 0.8, or the probabilities that at least 1, 2, 3 "
        "drafts are accepted, such as 0.8,0.7,0.6, or a file of records; give one value, or one "
        "for each --budget")  # fmt: skip
    add("--dtype", default="bfloat16", choices=DTYPES,
        help="dtype of the activations and the KV cache [bfloat16]")  # fmt: skip
    for flag, name in (("--target_dtype", "--model"), ("--draft_dtype", "--draft_model")):
        add(flag, default="auto", choices=("auto", *WEIGHT_DTYPES),
            help=f"dtype of the matrices of {name}; auto is --dtype [auto]")  # fmt: skip
    add("--B", nargs="+", type=int, default=[1, 8, 32], metavar="N",
        help="batch sizes to predict, in sequences [1 8 32]")  # fmt: skip
    add("--prefix_len", nargs="+", type=int, default=[4096, 16384, 32768], metavar="N",
        help="cached tokens of each sequence, lengths to predict [4096 16384 32768]")  # fmt: skip
    add("--budget", nargs="+", type=int, metavar="N",
        help="KV entries that a draft step reads; default: the budgets of the records, "
        "otherwise 257")  # fmt: skip
    add("--kv_policy", choices=[name for name in KV_POLICIES if name != FULL_KV_POLICY],
        help="use the records of this KV policy, if --acceptance is a file "
        f"[{DEFAULT_POLICY}]")  # fmt: skip
    add("--max_gamma", type=int, metavar="N",
        help=f"largest number of draft tokens in a step to predict [{MAX_GAMMA}]")  # fmt: skip
    add("--tp", type=int, default=1, metavar="N", help="ranks that share the model [1]")
    add("--draft_tp", type=int, metavar="N", help="ranks that share --draft_model [1]")
    add("--nodes", type=int, default=1, metavar="N",
        help="number of hosts over which the ranks are spread [1]")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="also write the predictions to this file; default: none is written")  # fmt: skip
    return parser


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
    curves, source = find_curves(args.acceptance, args.budget, drafter, args.kv_policy)
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
    )


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
    names = ("B", "prefix_len", "budget", "max_gamma", "tp", "draft_tp", "nodes")
    for name in names:
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
