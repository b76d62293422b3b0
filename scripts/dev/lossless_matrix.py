#!/usr/bin/env python3
"""Serves a model with every draft in every way on several ranks, in float32, and prints a table of
how many tokens of each are those of plain decoding, or why a way refuses a draft.

    python scripts/dev/lossless_matrix.py --write results/hybrids/README.md

The model is a tiny one with linear attention in three layers of four and random weights, whose last
layer decides its tokens, and whose head for multi-token prediction is that layer again, behind the
embeddings of tokens: so some of its drafts are right. Plain decoding itself is beside transformers'
in tests. A cell in which a token differs, or that ends otherwise, is in the table as well, and the
exit status says so. The second number of a cell is what a verification emitted on the mean, so that
drafts of which none was accepted would be seen.
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

import torch
from torch import Tensor
from train.hybrid_init import randomise
from train_hybrid import CONFIG, export
from train_mtp import MTP_LAYERS, add_to_checkpoint, begin_as_last_layer

from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.mtp import MtpHead
from magicdec.model.transformer import Transformer

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
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": CONFIG["layer_types"][:4],
    "head_dim": 32,
    "tie_word_embeddings": False,  # tied ones of random weights repeat a token
}
COMMON = "--dtype float32 --threads 1 --ignore_eos --gamma 3"
RUN = "run --dataset demo --prefix_len 70 --gen_len 24 --B 3 --num_batches 2"
SERVE = "serve --dataset mt_bench:{talks} --num_requests 5 --gen_len 12 --block_tokens 16"
TALKS = f"{SERVE} --turns 3 --prefix_len 400 --concurrency 3"
STAGES = "serve --dataset demo --num_requests 5 --gen_len 12 --prefix_len 70 --concurrency 3"
AHEAD = "--pa 0 --pr 0 --pd 0"  # drafts of random models are too unsure to be launched otherwise


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
    Way("pipeline, 3 ranks", f"{STAGES} --modes pipeline pipeline+draft --nproc 3 {AHEAD}"),
    Way("PipeInfer, 3 ranks", f"{STAGES} --modes pipeline pipeinfer --nproc 3 {AHEAD}"),
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
        if ended.returncode == 2:
            return Cell("refused", reason=last.partition(": ")[2])
        return Cell("**ended**", True, last)
    records = [json.loads(text) for text in out.read_text().splitlines()]
    return judged(records[-1], ended.returncode)


def judged(record: dict[str, Any], status: int) -> Cell:
    correctness = record["correctness"] or {}
    text = f"{correctness.get('num_tokens')}"
    if record["status"] != "verified" or status:
        return Cell(f"**{record['status']}** of {text}", True, str(correctness))
    emitted = record["metrics"]["mean_acceptance_length"]
    return Cell(text if emitted is None else f"{text}, {emitted:.2f}")


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


@torch.no_grad()
def random_hybrid(folder: Path) -> str:
    torch.manual_seed(0)
    fields = CONFIG | SHAPE
    model = randomise(Transformer(parse_hf_config(fields, folder.name, {})))
    for number, block in enumerate(model.blocks, 1):
        share = 1.0 if number == len(model.blocks) else 0.1
        for name, parameter in block.named_parameters():
            if name.endswith(("output.weight", "down.weight")):
                parameter.normal_(std=share / parameter.shape[1] ** 0.5)
    export(model, folder, fields)
    head = MtpHead(parse_hf_config(fields | {MTP_LAYERS: 1}, folder.name, {}).mtp_config())
    begin_as_last_layer(head, model)
    width = model.config.hidden_size
    projection = head.projection.weight
    assert isinstance(projection, Tensor), "it is not packed"
    projection[:, :width] = torch.eye(width)
    projection[:, width:] *= 0.05
    add_to_checkpoint(head, folder)
    return str(folder)


def write_talks(path: Path) -> None:
    """Conversations of different lengths, each turn of which is found up to the answer before."""
    talks = [{"turns": [f"{'far ' * 9 * talk}{turn}" for turn in range(3)]} for talk in range(5)]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory of another model")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page that has the table")
    args = parser.parse_args()
    cells: dict[str, list[Cell]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        talks = folder / "talks.jsonl"
        write_talks(talks)
        model = args.model or random_hybrid(folder / "random-hybrid")
        for draft, words in DRAFTS.items():
            cells[draft] = []
            for way in WAYS:
                cell = measured(way, words, model, talks, folder)
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
