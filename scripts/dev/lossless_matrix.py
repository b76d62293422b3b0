#!/usr/bin/env python3
"""Serves a model with every draft in every way on several ranks, in float32, and prints a table of
how many tokens of each are those of plain decoding, or why a way refuses a draft.

    python scripts/dev/lossless_matrix.py --model DIR --write results/hybrids/README.md

Plain decoding itself is beside transformers' in tests. A cell in which a token differs, or that
ends otherwise, is in the table as well, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BEGIN = "<!-- matrix: scripts/dev/lossless_matrix.py -->"
END = "<!-- end of matrix -->"
DRAFTS = {
    "self, `streaming_llm`": "--draft self --budget 33",
    "self, `snapkv`": "--draft self --kv_policy snapkv --budget 49",
    "self, `retrieval`": "--draft self --kv_policy retrieval --budget 49",
    "self, `verified`": "--draft self --kv_policy verified --budget 65",
    "self in int8": "--draft self --draft_weights int8 --budget 33",
    "`mtp`": "--draft mtp --kv_policy full",
    "`ngram`": "--draft ngram",
    "`ngram+self`": "--draft ngram+self --budget 33",
    "`ngram+mtp`": "--draft ngram+mtp --kv_policy full",
    "the model itself": "--draft model:{model} --kv_policy full",
}
COMMON = "--dtype float32 --threads 1 --ignore_eos --gamma 3"
RUN = "run --dataset demo --prefix_len 70 --gen_len 24 --B 3 --num_batches 2"
SERVE = "serve --dataset mt_bench:{talks} --num_requests 5 --gen_len 12 --block_tokens 16"
TALKS = f"{SERVE} --turns 3 --prefix_len 400 --concurrency 3"
STAGES = "serve --dataset demo --num_requests 5 --gen_len 12 --prefix_len 70 --concurrency 3"


@dataclass(frozen=True)
class Way:
    """A column: `words` of a command, whose last record is judged."""

    name: str
    words: str


WAYS = (
    Way("batches", RUN),
    Way("batches, 2 ranks", f"{RUN} --nproc 2"),
    Way("in flight", f"{TALKS} --modes inflight inflight+draft"),
    Way("in flight, prefix cache", f"{TALKS} --modes inflight inflight+draft --prefix_cache"),
    Way(
        "the same, 2 ranks",
        f"{TALKS} --modes tensor_parallel tensor_parallel+draft --nproc 2 --prefix_cache",
    ),
    Way("ring, 2 ranks", f"{STAGES} --modes ring ring+draft --nproc 2"),
    Way("pipeline, 3 ranks", f"{STAGES} --modes pipeline pipeline+draft --nproc 3"),
    Way("PipeInfer, 3 ranks", f"{STAGES} --modes pipeline pipeinfer --nproc 3"),
)


@dataclass(frozen=True)
class Cell:
    """What a way said of a draft: so many tokens are equal, or why not."""

    text: str
    is_bad: bool = False
    reason: str = ""


def measured(way: Way, draft: str, model: str, talks: Path, folder: Path) -> Cell:
    out = folder / "out.jsonl"
    out.unlink(missing_ok=True)
    words = f"{way.words} {draft} {COMMON} --model {{model}} --out {{out}}"
    line = [word.format(model=model, talks=talks, out=out) for word in words.split()]
    ended = subprocess.run(
        [sys.executable, "-m", "magicdec", *line], capture_output=True, text=True, check=False
    )
    if not out.exists():
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        is_refusal = ended.returncode == 2
        reason = last.partition(": ")[2].replace(model, "MODEL")
        return Cell("refused" if is_refusal else "**ended**", not is_refusal, reason)
    records = [json.loads(text) for text in out.read_text().splitlines()]
    return judged(records[-1], ended.returncode)


def judged(record: dict[str, Any], status: int) -> Cell:
    correctness = record["correctness"] or {}
    text = f"{correctness.get('num_tokens')}"
    if record["status"] == "verified" and not status:
        return Cell(text)
    return Cell(f"**{record['status']}** of {text}", True, str(correctness))


def table(cells: dict[str, list[Cell]]) -> str:
    """With a number for each reason, which a list below has."""
    found = dict.fromkeys(cell.reason for row in cells.values() for cell in row if cell.reason)
    numbers = {reason: number for number, reason in enumerate(found, 1)}

    def shown(cell: Cell) -> str:
        return f"{cell.text} ({numbers[cell.reason]})" if cell.reason else cell.text

    lines = [
        "| draft | " + " | ".join(way.name for way in WAYS) + " |",
        "|---|" + "--:|" * len(WAYS),
        *(f"| {draft} | " + " | ".join(map(shown, row)) + " |" for draft, row in cells.items()),
        "",
    ]
    return "\n".join([*lines, *(f"{number}. {reason}" for reason, number in numbers.items())])


def write_talks(path: Path) -> None:
    """Conversations of different lengths, each turn of which is found up to the answer before."""
    talks = [{"turns": [f"{'far ' * 9 * talk}{turn}" for turn in range(3)]} for talk in range(5)]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a directory of a model")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page that has the table")
    args = parser.parse_args()
    cells: dict[str, list[Cell]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        talks = folder / "talks.jsonl"
        write_talks(talks)
        for draft, words in DRAFTS.items():
            cells[draft] = []
            for way in WAYS:
                cell = measured(way, words, args.model, talks, folder)
                cells[draft].append(cell)
                print(f"{draft}; {way.name}: {cell.text} {cell.reason}", flush=True)
    found = table(cells)
    print(found)
    if args.write is not None:
        write_between_marks(args.write, found)
    return int(any(cell.is_bad for row in cells.values() for cell in row))


def write_between_marks(page: Path, text: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
