"""Pipelined speculation as the simulator predicts it against runs: four stages that sleep 20 ms for
each run, links of 1 ms, draft steps of 4 ms, at several acceptance rates.

    python scripts/predicted_pipeline.py            # about 6 minutes, in which the ranks sleep
    python scripts/predicted_pipeline.py --seeds 0 1 2 --acceptance 0 0.3
    python scripts/predicted_pipeline.py --show     # the tables of what was measured before

The prediction is that of each record: the scheduler in virtual time, with the times of stages,
links and drafts that the pass measured, and with the candidates that its drafter gave. Passes that
the file of records has already are not measured again, so the script can be stopped and restarted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.cli.parsing.record_files import read_commands
from magicdec.distributed.ranks import run_command
from magicdec.pipelined_run.measured.metrics import SpeculationRecord
from magicdec.pipelined_speculation.options import MODES

STAGES, STAGE_MS, LINK_MS, DRAFT_MS, DRAFT = 4, 20, 1, 4, 4
LAYERS = "random:tinyllama-1.1b"  # 22 layers, between which a stage looks for cancellations
# The probability that a draft is right after right ones. With 4 drafts in a synchronous step, 0.917
# means that 0.8 of the drafted tokens are accepted.
ACCEPTANCE = (0.0, 0.8, 0.917)
PLAIN = MODES[0]  # depends on no acceptance, so one pass for each seed is enough
Passes = dict[tuple[float, int, str], SpeculationRecord]
"""By acceptance, seed and mode."""


def main() -> None:
    args = make_parser().parse_args()
    if not args.show:
        for seed in args.seeds:
            for rate in args.acceptance:
                measure(args.out, rate, seed, args.gen_len)
    found = read(args.out, args.gen_len)
    print_errors(found)
    print()
    print_speedups(found)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare predictions of pipelined speculation with runs of sleeping stages."
    )
    add = parser.add_argument
    add("--acceptance", type=float, nargs="+", default=list(ACCEPTANCE), metavar="A")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N")
    add("--gen_len", type=int, default=600, metavar="N")
    add("--out", type=Path, default=Path("results/predicted_pipeline.jsonl"), metavar="FILE")
    add("--show", action="store_true", help="measure nothing, print what the file has")
    return parser


def measure(out: Path, rate: float, seed: int, gen_len: int) -> None:
    """Measure the modes that the file does not have yet."""
    found = read(out, gen_len)
    has_plain = any((s, mode) == (seed, PLAIN) for _, s, mode in found)
    modes = [mode for mode in MODES[1:] if (rate, seed, mode) not in found]
    modes = [*[PLAIN] * (not has_plain), *modes]
    if not modes:
        return
    words = ["pipeline", "--model", LAYERS, "--nproc", STAGES, "--threads", 1]
    words += ["--emulate_stage_ms", STAGE_MS, "--emulate_link_ms", LINK_MS]
    words += ["--emulate_draft_ms", DRAFT_MS, "--emulate_acceptance", rate, "--gamma", DRAFT]
    words += ["--num_requests", 1, "--prefix_len", 64, "--gen_len", gen_len]
    words += ["--seed", seed, "--out", out, "--modes", *modes]
    print(f"acceptance {rate:g}, seed {seed}: {', '.join(modes)}", file=sys.stderr, flush=True)
    ended = run_command(words)
    if ended.code:
        sys.exit(f"predicted_pipeline.py: magicdec pipeline ended with {ended.code}: {ended.error}")


def read(out: Path, gen_len: int) -> Passes:
    """The newest record of each pass with that output length."""
    if not out.exists():
        return {}
    found: Passes = {}
    for records in read_commands("speculation", [out], is_strict=False):
        for record in records:
            workload = record.config["workload"]
            if workload["gen_len"] == str(gen_len):
                found[workload["emulate_acceptance"], workload["seed"], record.name] = record
    return found


def print_errors(found: Passes) -> None:
    """A line for each pass, as Markdown."""
    print_row("acceptance", "seed", "mode", "predicted, tokens/s", "measured", "error, %")
    print_row("---", "---", "---", "---:", "---:", "---:")
    for (rate, seed, mode), record in sorted(found.items(), key=place):
        assert record.metrics is not None, "sleeping stages have no tokens that could be wrong"
        measured = record.metrics.request_tokens_per_s
        predicted = record.metrics.predicted_request_tokens_per_s
        assert predicted is not None, "one request has one output length"
        named = "any" if mode == PLAIN else f"{rate:g}"
        error = f"{100 * (predicted / measured - 1):+.1f}"
        print_row(named, seed, mode, f"{predicted:.2f}", f"{measured:.2f}", error)


def print_speedups(found: Passes) -> None:
    """The measured speed of asynchronous speculation over that of the other modes."""
    speed = {key: r.metrics.request_tokens_per_s for key, r in found.items() if r.metrics}
    plain = {seed: each for (_, seed, mode), each in speed.items() if mode == PLAIN}
    print_row("acceptance", "seed", "async / sync", "async / iterative")
    print_row("---", "---", "---:", "---:")
    for rate, seed in sorted({key[:2] for key in speed}):
        sync, ours = (speed.get((rate, seed, mode)) for mode in MODES[1:])
        if ours is not None and sync is not None and seed in plain:
            print_row(f"{rate:g}", seed, f"{ours / sync:.2f}", f"{ours / plain[seed]:.2f}")


def place(item: tuple[tuple[float, int, str], SpeculationRecord]) -> tuple[float, ...]:
    rate, seed, mode = item[0]
    return seed, mode != PLAIN, rate, MODES.index(mode)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
