"""The flags of `magicdec simulate`, and what they must fulfil before anything is simulated. Imports
no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from magicdec.cli.parsing.parser import Parser
from magicdec.pipelined_speculation.options import NUM_CANDIDATES, RECOVERIES, Options
from magicdec.records.writing import check_files
from magicdec.report.figures.style import check_picture
from magicdec.simulator.modes import MODES

EVERYDAY = (
    *("--stages", "--nodes", "--stage_ms", "--model_ms", "--link_ms", "--draft_ms", "--gamma"),
    *("--np", "--acceptance", "--conditional_acceptance", "--gen_len", "--modes", "--plot"),
    "--out",
)
# Flags with one number: (flag, type, default, help text), by group.
Numbers = tuple[tuple[str, type, float | None, str], ...]
MACHINE: Numbers = (
    ("layers", int, 32, "layers of the model; a stage looks for cancellations between its layers"),
    ("prefill_ms", float, None, "ms that a stage computes for the prompt; with --model_ms, ms of "
     "one node for all of it; default: as for one token"),
    ("row_cost", float, 0.0, "share of the time of one token that each further token of a run "
     "adds"),
    ("link_ms", float, 1.0, "delay of a message between stages, and from the last stage to the "
     "head, in ms"),
    ("link_gbit", float, None, "bandwidth of a link in Gbit/s; default: without limit"),
    ("row_bytes", int, 8192, "bytes of the hidden states of one token"),
    ("cancel_ms", float, None, "ms until a stage knows that a run is cancelled; default: "
     "--link_ms"),
    ("draft_ms", float, 4.0, "ms of one step of the drafter"),
)  # fmt: skip
CLUSTER: Numbers = (
    ("model_ms", float, None, "ms of one node for one token through the whole model; needed with "
     "--nodes"),
    ("all_reduce_ms", float, 0.05, "ms of an all-reduce between the nodes of a stage, two of which "
     "each layer needs"),
)  # fmt: skip
SPECULATION: Numbers = (
    ("gamma", int, Options.gamma, "most draft tokens in the depth of a microbatch"),
    ("np", int, Options.np, "most branches of a microbatch"),
    ("pa", float, Options.pa, "a branch stops when its best candidate is less probable than this"),
    (
        "ps",
        float,
        Options.ps,
        "a further candidate opens a branch when it is more probable than this",
    ),
    (
        "pr",
        float,
        Options.pr,
        "--pa and --ps rise by this with each microbatch since the last commit",
    ),
    ("pd", float, Options.pd, "--pa and --ps fall by this with each attempt that drafted nothing"),
    (
        "max_in_flight",
        int,
        Options.max_in_flight,
        "most runs of a request at the same time; default: no limit",
    ),
)
WORKLOAD: Numbers = (
    ("acceptance_gamma", int, 4, "draft tokens in a step with which the rate of --acceptance was "
     "measured"),
    ("gen_len", int, 128, "output tokens of each request"),
    ("num_requests", int, 1, "requests at the same time, except in the ring"),
    ("ring_requests", int, None, "requests at the same time in the ring; default: one for each "
     "stage"),
    ("seed", int, 0, "seed of the acceptance"),
)  # fmt: skip


def build_parser() -> Parser:
    parser = Parser(
        description="Simulate decoding on a pipeline of stages, in virtual time: one token after "
        "the other, synchronous speculation, asynchronous pipelined speculation, and the recurrent "
        "ring. Several values of --stages or --nodes compare clusters. No model runs.",
        everyday=EVERYDAY,
    )
    _add_machine(parser.add_argument_group("machine"))
    group = parser.add_argument_group("cluster")
    group.add_argument("--nodes", type=int, nargs="+", metavar="N",
        help="numbers of nodes; the nodes of a stage share its work by tensor "
        "parallelism")  # fmt: skip
    _add_numbers(group, CLUSTER)
    add_speculation(parser.add_argument_group("speculation"))
    _add_workload(parser.add_argument_group("workload"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_numbers(group: Any, flags: Numbers) -> None:
    for name, kind, default, text in flags:
        shown = text if default is None else f"{text} [{default:g}]"
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=shown)


def _add_machine(group: Any) -> None:
    group.add_argument("--stages", type=int, nargs="+", metavar="N",
        help="number of stages; several values compare clusters. Default: 4; with --nodes, every "
        "number that divides them")  # fmt: skip
    group.add_argument("--stage_ms", type=float, nargs="+", metavar="X",
        help="ms that a stage computes for one token: one value for all stages, or one for each "
        "[20]")  # fmt: skip
    _add_numbers(group, MACHINE)


def add_speculation(group: Any) -> None:
    """The flags of the scheduler, which `make_options` reads."""
    _add_numbers(group, SPECULATION)
    group.add_argument("--recovery", default=Options.recovery, choices=RECOVERIES,
        help="when the count of --pr starts anew: at a commit (acceptance), or also after an "
        "attempt that drafted nothing (attempt) [acceptance]")  # fmt: skip
    group.add_argument("--relaunch", action="store_true",
        help="as the original: launch the newest token and draft anew after every commit, even if "
        "it is in flight already")  # fmt: skip


def _add_workload(group: Any) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument("--acceptance", default="0.8", metavar="A",
        help="accepted / drafted tokens, as in a record, or a file of records whose accepted "
        "counts are replayed [0.8]")  # fmt: skip
    either.add_argument("--conditional_acceptance", type=float, nargs="+", metavar="A",
        help="in place of --acceptance: the probability that the target's token is the draft's "
        "first candidate; further values are for the second, third, ...")  # fmt: skip
    group.add_argument("--draft_probs", type=float, nargs="+", default=[0.7, 0.2, 0.05],
        metavar="P", help="probabilities that the draft gives its candidates, at every place "
        "[0.7 0.2 0.05]")  # fmt: skip
    _add_numbers(group, WORKLOAD)


def _add_output(group: Any) -> None:
    group.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, metavar="NAME",
        help=f"ways to decode, of {', '.join(MODES)} [all]")  # fmt: skip
    group.add_argument("--plot", type=Path, metavar="FILE",
        help="draw what every stage computes when, in one cluster; .png, .svg or .pdf",
    )  # fmt: skip
    group.add_argument("--plot_ms", type=float, metavar="X",
        help="how much time the chart shows, in ms; default: 40 times the slowest "
        "stage")  # fmt: skip
    group.add_argument("--out", type=Path, metavar="FILE",
        help="append the settings and metrics of each simulation to this file, a line of JSON "
        "each")  # fmt: skip


def make_options(args: argparse.Namespace) -> Options:
    """Raises ValueError, naming the flag, for values that cannot be."""
    return Options(
        pa=args.pa,
        ps=args.ps,
        pr=args.pr,
        pd=args.pd,
        gamma=args.gamma,
        np=args.np,
        recovery=args.recovery,
        relaunch=args.relaunch,
        max_in_flight=args.max_in_flight,
    )


def check(args: argparse.Namespace, given: set[str]) -> None:
    """Raises ValueError, naming the flag, for values that cannot be and flags that do nothing."""
    for name in (
        "layers",
        "row_bytes",
        "gen_len",
        "num_requests",
        "ring_requests",
        "acceptance_gamma",
    ):
        _check_least(args, name, 1)
    for name in ("link_ms", "cancel_ms", "draft_ms", "row_cost", "all_reduce_ms", "prefill_ms"):
        _check_least(args, name, 0)
    for name in ("model_ms", "link_gbit", "plot_ms"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ValueError(f"--{name} {value:g} is too small; it must be more than 0")
    if args.gen_len < 2:
        raise ValueError("--gen_len 1 has no time between tokens; it must be at least 2")
    for name in ("stages", "nodes"):
        for value in getattr(args, name) or ():
            if value < 1:
                raise ValueError(f"--{name} {value} is too small; it must be at least 1")
    _check_probabilities(args)
    if (args.nodes is None) != (args.model_ms is None):
        raise ValueError("--nodes and --model_ms go together; give both or neither")
    if args.nodes is not None and args.stage_ms is not None:
        raise ValueError("--stage_ms does nothing with --model_ms; leave it out")
    if args.nodes is None and "all_reduce_ms" in given:
        raise ValueError("--all_reduce_ms does nothing without --nodes; leave it out")
    if "plot_ms" in given and args.plot is None:
        raise ValueError("--plot_ms does nothing without --plot; leave it out")
    if args.plot is not None:
        check_picture("--plot", args.plot)
    check_files({"--plot": args.plot, "--out": args.out})
    args.modes = [mode for mode in MODES if mode in args.modes]


def _check_least(args: argparse.Namespace, name: str, least: int) -> None:
    value = getattr(args, name)
    if value is not None and not least <= value < float("inf"):
        raise ValueError(f"--{name} {value:g} cannot be; it must be at least {least}")


def _check_probabilities(args: argparse.Namespace) -> None:
    for name in ("draft_probs", "conditional_acceptance"):
        values = getattr(args, name) or ()
        if not all(0 <= value <= 1 for value in values) or sum(values) > 1 + 1e-9:
            shown = " ".join(f"{value:g}" for value in values)
            raise ValueError(f"--{name} {shown} are no probabilities of which the sum is at most 1")
    if sorted(args.draft_probs, reverse=True) != args.draft_probs:
        raise ValueError("--draft_probs must fall from the first candidate to the last")
    if len(args.draft_probs) > NUM_CANDIDATES:
        raise ValueError(
            f"--draft_probs has {len(args.draft_probs)} values; at most {NUM_CANDIDATES}"
        )
    ranks = len(args.conditional_acceptance or ())
    if ranks > len(args.draft_probs):
        raise ValueError(f"--conditional_acceptance has {ranks} values, more than --draft_probs")
