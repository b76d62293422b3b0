"""The flags of `magicdec plan` that both of its predictions read: the model's sizes, and the
hardware. Imports no torch. Owns their checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from magicdec.cli.plan_flags import RATES
from magicdec.config.choices.layers import choose_weights
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import is_rate
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine
from magicdec.model.config import ModelConfig


def check_given(args: argparse.Namespace, given: set[str]) -> None:
    """Raises ValueError for a flag that was given and would do nothing."""
    rates = [value for value in args.acceptance or () if is_rate(value)]
    if "acceptance_gamma" in given and not rates:
        raise ValueError(
            "--acceptance_gamma does nothing here: it is for an --acceptance that is one rate; "
            "leave it out"
        )
    ranks = args.tp * (args.stages or 1)
    for flag, ends in (("link", ranks // args.nodes), ("node_link", args.nodes)):
        for name in (flag, f"{flag}_latency_us"):
            if name in given and ends == 1:
                what = "--nodes is 1" if flag == "node_link" else "a node has one rank"
                raise ValueError(f"--{name} does nothing here: {what}; leave it out")


def find_target(args: argparse.Namespace, config: ModelConfig, tp: int, nodes: int) -> Deployment:
    """The model on `tp` ranks on `nodes` hosts."""
    hardware = find_hardware(args, config.num_layers)
    is_int8 = choose_weights("--target_dtype", args.target_dtype, args.dtype) == "int8"
    return Deployment(config, hardware, DTYPE_BYTES[args.dtype], tp, nodes, is_int8)


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
    overhead, ranks = rates["overhead_us"], args.tp * (args.stages or 1)
    return Hardware(
        base.read_bytes_per_s,
        base.flops_per_s,
        base.layer_overhead_s if overhead is None else overhead / num_layers,
        base.kv_bytes_per_s,
        _find_link(rates, "link", base.link, ranks // args.nodes > 1, args.stages),
        _find_link(rates, "node_link", base.node_link, args.nodes > 1, args.stages),
        base.attention_flops_per_s,
        base.token_overhead_s,
    )


def _find_link(
    rates: dict[str, float | None],
    flag: str,
    measured: Link | None,
    is_needed: bool,
    stages: int | None,
) -> Link | None:
    bandwidth, latency = rates[flag], rates[f"{flag}_latency_us"]
    if (bandwidth is None) != (latency is None):
        raise ValueError(f"--{flag} and --{flag}_latency_us go together; give both or neither")
    if bandwidth is not None and latency is not None:
        return Link(latency, bandwidth)
    if measured is None and is_needed:
        needed = "--tp above 1 needs the cost of an all-reduce"
        if flag == "node_link":
            needed = "--nodes above 1 needs the cost of an all-reduce"
        elif stages is not None:
            needed = f"--stages {stages} needs the cost of a link"
        raise ValueError(
            f"{needed}; give --{flag} and --{flag}_latency_us, or a --machine probed with several "
            "ranks"
        )
    return measured


def _rate(args: argparse.Namespace, flag: str, unit: float, zero_too: bool) -> float | None:
    value = getattr(args, flag)
    if value is None:
        return None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_too):
        raise ValueError(f"--{flag} {value:g} is not a positive number")
    return float(value * unit)


def check_sizes(args: argparse.Namespace) -> None:
    sizes = ("B", "prefix_len", "budget", "acceptance_gamma", "gen_len", "max_gamma")
    for name in (*sizes, "tp", "draft_tp", "nodes", "stages"):
        value = getattr(args, name)
        values: Sequence[int] = value if isinstance(value, list) else [value]
        for number in values:
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number} is too small; it must be at least 1")


def check_tp(flag: str, tp: int, model_flag: str, config: ModelConfig) -> None:
    heads = config.num_heads
    if heads % tp:
        fitting = " ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{flag} {tp} does not divide the {heads} attention heads of {model_flag} "
            f"{config.name}; choose from {fitting}"
        )
