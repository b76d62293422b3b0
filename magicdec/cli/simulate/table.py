"""What `magicdec simulate` prints: the modes of one machine, or many clusters. 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from magicdec.simulator.machine import Machine
from magicdec.simulator.measured import Measured

Found = tuple[int | None, Machine, dict[str, Measured]]
MOST_LINES = 40


def print_modes(machine: Machine, measured: dict[str, Measured]) -> None:
    """One line for each mode."""
    stages = machine.num_stages
    shown = sorted({round(1e3 * time, 3) for time in machine.stage_s})
    times = f"{shown[0]:g}" if len(shown) == 1 else f"{shown[0]:g} to {shown[-1]:g}"
    print(
        f"{stages} stages of {times} ms, links {1e3 * machine.link_s:g} ms, draft "
        f"{1e3 * machine.draft_s:g} ms a step\n"
    )
    print(
        f"{'mode':<10}{'tok/s':>8}{'ratio':>7}{'TTFT':>8}{'ITL':>7}{'p99':>7}{'busy':>7}{'useful':>8}"
        f"{'accept':>8}{'runs':>6}"
    )
    base = measured.get("iterative")
    for mode, m in measured.items():
        ratio = "-" if base is None else f"{m.tokens_per_s / base.tokens_per_s:.2f}"
        accept = "-" if m.acceptance_rate is None else f"{m.acceptance_rate:.2f}"
        itl, p99 = ("-" if ms is None else f"{ms:.1f}" for ms in (m.mean_itl_ms, m.p99_itl_ms))
        print(
            f"{mode:<10}{m.tokens_per_s:>8.2f}{ratio:>7}{m.ttft_ms:>8.1f}{itl:>7}"
            f"{p99:>7}{m.busy:>7.1%}{m.useful:>8.1%}{accept:>8}{m.runs:>6}"
        )
    print(
        "\nratio: tok/s over those of iterative. TTFT, ITL and p99 (of the ITL) are in ms.\n"
        "busy: share of time in which a stage computes; useful: without cancelled runs.\n"
        "accept: accepted / launched draft tokens."
    )
    if "async" in measured:
        m = measured["async"]
        print(
            f"async: {m.invalid_runs} runs invalid, {m.superfluous_runs} superfluous, "
            f"{m.mean_in_flight:.1f} in flight;\n{m.layers_skipped} of "
            f"{m.layers_skipped + m.layers_computed} layers skipped."
        )
    if "ring" in measured:
        print("ring: tok/s of all its requests together.")


def print_clusters(found: Sequence[Found]) -> None:
    """One line for each cluster; if these are many, the best of each number of nodes by the first
    mode that speculates asynchronously, or else by the first mode."""
    modes = list(found[0][2])
    ranked = "async" if "async" in modes else modes[0]
    lines = list(found)
    if len(found) > MOST_LINES:
        groups = groupby(found, key=lambda each: each[0] or 0)
        lines = [max(group, key=lambda f: f[2][ranked].tokens_per_s) for _, group in groups]
        print(f"Of {len(found)} clusters, the fastest {ranked} one of each size; --out has all.\n")
    print(f"{'nodes':>6}{'stages':>8}{'stage ms':>10}" + "".join(f"{m:>11}" for m in modes))
    for nodes, machine, measured in lines:
        slowest = 1e3 * max(machine.stage_s)
        rates = "".join(f"{measured[mode].tokens_per_s:>11.2f}" for mode in modes)
        print(f"{nodes or machine.num_stages:>6}{machine.num_stages:>8}{slowest:>10.2f}{rates}")
    print("\nTokens a second; of the ring, those of all its requests together.")
