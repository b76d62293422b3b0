"""The flags of `magicdec plan`, and the model's sizes and the hardware that they name, which both
of its predictions read. Imports no torch. `plan.py` checks the other values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from magicdec.cli.front.run import MODEL_PREFIX, SELF
from magicdec.cli.parsing.parser import Parser
from magicdec.config.choices.layers import choose_weights
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import DEFAULT_GAMMA, DEFAULT_POLICY, is_rate
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.hardware.ceiling_file import Hardware, Link, load_machine
from magicdec.model.config import ModelConfig
from magicdec.names import DTYPES, FULL_KV_POLICY, KV_POLICIES, WEIGHT_DTYPES

MAX_GAMMA = 8
BATCH_SIZES, PREFIX_LENS = (1, 8, 32), (4096, 16384, 32768)
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


def build_parser() -> Parser:
    parser = Parser(
        description="Predict when speculation is faster than autoregressive decoding, from the "
        "model's shape and the machine's speed; or, with --stages, what a pipeline of stages gives "
        "next to tensor parallelism and to one process.",
        allow_abbrev=False,
    )
    _add_models(parser)
    _add_acceptance(parser)
    _add_work(parser)
    _add_ranks(parser)
    parser.add_argument("--out", "--json", type=Path, dest="json", metavar="FILE",
        help="also write the predictions to this file; default: none is written")  # fmt: skip
    return parser


def _add_models(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", default="demo",
        help="the model: demo, a preset, random:<preset> or a directory [demo]")  # fmt: skip
    add("--draft", default=SELF, metavar="DRAFT",
        help=f"what drafts: the model itself ({SELF}) or a smaller one ({MODEL_PREFIX}NAME) "
        f"[{SELF}]")  # fmt: skip
    add("--dtype", default="bfloat16", choices=DTYPES,
        help="dtype of the activations and the KV cache [bfloat16]")  # fmt: skip
    for flag, name in (
        ("--target_dtype", "--model"),
        ("--draft_dtype", f"--draft {MODEL_PREFIX}NAME"),
    ):
        add(flag, default="auto", choices=("auto", *WEIGHT_DTYPES),
            help=f"dtype of the matrices of {name}; auto is --dtype [auto]")  # fmt: skip
    add("--machine", type=Path, metavar="FILE", help="the file that `magicdec probe` wrote")
    for flag, _, text, _ in RATES:
        add(f"--{flag}", type=float, metavar="X", help=text)


def _add_acceptance(parser: Parser) -> None:
    # One of them is required, except with --stages.
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--acceptance", nargs="+", metavar="A",
        help="the acceptance: an acceptance rate as in a record (accepted / drafted tokens) such "
        "as 0.8, or the probabilities that at least 1, 2, 3 drafts are accepted, such as "
        "0.8,0.7,0.6, or a file of records; give one value, or one for each --budget")  # fmt: skip
    either.add_argument("--conditional_acceptance", nargs="+", type=float, metavar="A",
        help="in place of --acceptance: the probability that a draft token is accepted if all "
        "before it in the step were; give one value, or one for each --budget")  # fmt: skip
    parser.add_argument("--acceptance_gamma", type=int, default=DEFAULT_GAMMA, metavar="N",
        help="number of draft tokens in a step with which the rate of --acceptance was measured "
        f"[{DEFAULT_GAMMA}]")  # fmt: skip


def _add_work(parser: Parser) -> None:
    """What is decoded, and how."""
    add = parser.add_argument
    add("--B", nargs="+", type=int, metavar="N",
        help="batch sizes to predict, in sequences; with --stages, of a message "
        "[1 8 32; with --stages 1]")  # fmt: skip
    add("--prefix_len", nargs="+", type=int, metavar="N",
        help="cached tokens of each sequence, lengths to predict "
        "[4096 16384 32768; with --stages 4096]")  # fmt: skip
    add("--budget", nargs="+", type=int, metavar="N",
        help="KV entries that a draft step reads; default: the budgets of the records, "
        "otherwise 257")  # fmt: skip
    add("--kv_policy", choices=[name for name in KV_POLICIES if name != FULL_KV_POLICY],
        help="the KV policy of the draft: the net speedup counts what it does before the first "
        "step, and its records are used if --acceptance is a file "
        f"[{DEFAULT_POLICY}]")  # fmt: skip
    add("--gen_len", type=int, default=64, metavar="N",
        help="output tokens of each sequence, for the net speedup [64]")  # fmt: skip
    add("--max_gamma", type=int, metavar="N",
        help=f"largest number of draft tokens in a step to predict [{MAX_GAMMA}]")  # fmt: skip


def _add_ranks(parser: Parser) -> None:
    add = parser.add_argument
    add("--tp", type=int, default=1, metavar="N",
        help="ranks that share the model, or each stage of it, by tensor parallelism [1]",
    )  # fmt: skip
    add(
        "--draft_tp", type=int, metavar="N", help=f"ranks that share --draft {MODEL_PREFIX}NAME [1]"
    )
    add("--nodes", type=int, default=1, metavar="N",
        help="number of hosts over which the ranks are spread [1]")  # fmt: skip
    add("--stages", type=int, metavar="N",
        help="predict a pipeline of N stages that samples circulate through, as `magicdec "
        "recurrent` runs it, in place of speculation. Default: speculation")  # fmt: skip
    add("--layer_split", metavar="SPLIT",
        help="with --stages, the layers of each stage, as `magicdec recurrent` takes them: counts, "
        "shares, auto or mdi_llm. Default: equal shares")  # fmt: skip


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
