"""All modes of `magicdec serve` with stages on four stages that sleep, with links of 1 ms, beside
what the simulator predicts: what the ranks' messages, schedulers and caches take beside it.

    python scripts/emulated_modes.py                # about 5 minutes, in which the ranks sleep
    python scripts/emulated_modes.py --plot docs/modes.png
    python scripts/emulated_modes.py --show         # the table of what was measured before

The numbers are tokens a second after the first token of each request, summed over the requests
that are in flight together. The predictions are those of `magicdec simulate` for stages, links and
drafts of these times. Passes that the file of records has already are not measured again, so the
script can be stopped and restarted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from magicdec.bench.serving.record import ServingRecord
from magicdec.distributed.ranks import run_command
from magicdec.output.figures import check_picture, look, saved_figure
from magicdec.output.tables import Table, print_tables
from magicdec.predict.simulator.run import Work, run_mode
from magicdec.predict.simulator.simulation import SimulatedMachine
from magicdec.records.reading import read_records
from magicdec.systems.pipeinfer.drawn_drafts import draw_right
from magicdec.systems.pipeinfer.options import Options

STAGES, LINK_MS, DRAFT_MS, GAMMA = 4, 1.0, 4.0, 4
LAYERS = 6  # of the packaged model
STAGE_MS, ACCEPTANCE = (10.0, 20.0), (0.0, 0.5, 0.8)
SEED = 123  # what `--seed` is by default


@dataclass(frozen=True)
class Case:
    """A mode with so many requests in flight, and the acceptance if it drafts."""

    stage_ms: float
    mode: str
    num_requests: int = 1
    acceptance: float | None = None

    @property
    def name(self) -> str:
        if self.acceptance is not None:
            return f"{self.mode}, acceptance {self.acceptance:g}"
        return f"{self.mode}, R = {self.num_requests}" if self.mode == "ring" else self.mode

    def predict(self, gen_len: int) -> float:
        """Tokens a second."""
        stage_s, link_s = self.stage_ms / 1e3, LINK_MS / 1e3
        machine = SimulatedMachine(
            (stage_s,) * STAGES, layers=LAYERS // STAGES, link_s=link_s, cancel_s=link_s,
            draft_s=DRAFT_MS / 1e3,
        )  # fmt: skip
        is_right = draw_right(self.acceptance or 0.0, gen_len, SEED)
        work = Work(is_right, gen_len, ring_requests=self.num_requests)
        _, metrics = run_mode(self.mode, machine, Options(gamma=GAMMA), work)
        return metrics.tokens_per_s


def cases() -> Iterator[Case]:
    for stage_ms in STAGE_MS:
        yield Case(stage_ms, "iterative")
        for samples in (1, STAGES, 2 * STAGES):
            yield Case(stage_ms, "ring", samples)
        for rate in ACCEPTANCE:
            for mode in ("sync", "async"):
                yield Case(stage_ms, mode, acceptance=rate)


def main() -> None:
    args = make_parser().parse_args()
    if args.plot is not None:
        check_picture("--plot", args.plot)
    for case in () if args.show else cases():
        if case not in read(args.out, args.gen_len):
            measure(case, args.out, args.gen_len)
    records = read(args.out, args.gen_len)
    measured = {case: speed(records[case], case) for case in cases() if case in records}
    predicted = {case: case.predict(args.gen_len) for case in measured}
    print_tables([table_of(stage_ms, measured, predicted) for stage_ms in STAGE_MS], "md")
    if args.plot is not None:
        draw(args.plot, measured, predicted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="All modes on stages that sleep.")
    add = parser.add_argument
    add("--gen_len", type=int, default=200, metavar="N")
    add("--out", type=Path, default=Path("results/emulated_modes.jsonl"), metavar="FILE")
    add("--plot", type=Path, metavar="FILE")
    add("--show", action="store_true", help="measure nothing, print what the file has")
    return parser


def measure(case: Case, out: Path, gen_len: int) -> None:
    words = ["serve", "--nproc", STAGES, "--threads", 1, "--arrival", "burst"]
    words += ["--emulate_stage_ms", case.stage_ms, "--emulate_link_ms", LINK_MS]
    words += ["--num_requests", case.num_requests, "--prefix_len", 64, "--gen_len", gen_len]
    words += ["--modes", case.mode, "--out", out]
    if case.mode == "ring":
        words += ["--B", 1, "--n_samples", case.num_requests]
    if case.acceptance is not None:
        words += ["--emulate_acceptance", case.acceptance, "--emulate_draft_ms", DRAFT_MS]
        words += ["--gamma", GAMMA]
    print(f"{case.stage_ms:g} ms: {case.name}", file=sys.stderr, flush=True)
    ended = run_command(words)
    if ended.code:
        sys.exit(f"emulated_modes.py: magicdec serve ended with {ended.code}: {ended.error}")


def read(out: Path, gen_len: int) -> dict[Case, ServingRecord]:
    """The newest record of each case with that output length."""
    records: dict[Case, ServingRecord] = {}
    for record in read_records(out, ServingRecord) if out.exists() else ():
        workload = record.config["workload"]
        rate = workload["emulate_acceptance"]
        rate = rate[0] if isinstance(rate, list) else rate  # a number before 2026-11-27
        case = Case(workload["emulate_stage_ms"], record.name, workload["num_requests"], rate)
        if workload["gen_len"] == str(gen_len):
            records[case] = record
    return records


def speed(record: ServingRecord, case: Case) -> float:
    """Tokens a second of all requests together, which are in flight together."""
    assert record.metrics is not None and record.metrics.request_tokens_per_s is not None
    return record.metrics.request_tokens_per_s * case.num_requests


def table_of(stage_ms: float, measured: dict[Case, float], predicted: dict[Case, float]) -> Table:
    plain = measured.get(Case(stage_ms, "iterative"))
    return Table(
        [f"stages of {stage_ms:g} ms", "tokens/s", "of iterative", "predicted", "error"],
        [
            (case.name, f"{each:.2f}", f"{each / plain:.2f}x" if plain else "",
             f"{predicted[case]:.2f}", f"{100 * (predicted[case] / each - 1):+.1f} %")
            for case, each in measured.items() if case.stage_ms == stage_ms
        ],
    )  # fmt: skip


def draw(path: Path, measured: dict[Case, float], predicted: dict[Case, float]) -> None:
    """A panel for each time of a stage, with a bar for each mode and a mark where it should be."""
    with saved_figure("--plot", path, (9.0, 3.6), 1, len(STAGE_MS)) as (_, axes):
        for ax, stage_ms in zip(axes, STAGE_MS, strict=True):
            shown = [case for case in measured if case.stage_ms == stage_ms]
            places = range(len(shown))
            kinds = list(dict.fromkeys(case.mode for case in shown))
            colours = [look(kinds.index(case.mode)).colour for case in shown]
            bars = ax.barh(places, [measured[case] for case in shown], color=colours, height=0.75)
            labels = [f"{measured[case]:.1f}" for case in shown]
            ax.bar_label(bars, labels, fontsize=7, label_type="center", color="white")
            ax.plot([predicted[case] for case in shown], places, "k|", markersize=10,
                    label="simulated")  # fmt: skip
            ax.set_yticks(places, [case.name for case in shown] if ax is axes[0] else [])
            ax.invert_yaxis()
            ax.margins(x=0.12)
            ax.grid(axis="y", visible=False)
            ax.set(title=f"four stages of {stage_ms:g} ms, links of {LINK_MS:g} ms",
                   xlabel="tokens/s of all requests in flight")  # fmt: skip
        axes[-1].legend(loc="upper right")


if __name__ == "__main__":
    main()
