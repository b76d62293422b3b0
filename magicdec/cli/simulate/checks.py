"""What the flags of `magicdec simulate` must fulfil before anything is simulated."""

from __future__ import annotations

import argparse

from magicdec.pipelined_speculation.options import NUM_CANDIDATES
from magicdec.records.writing import check_files
from magicdec.report.figures.style import check_picture
from magicdec.simulator.modes import MODES


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
