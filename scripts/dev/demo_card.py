"""Measure the demo models, sample the packaged demo text, write the model card.

    python scripts/dev/demo_card.py --validation ../shared/data/pg19/validation.jsonl

Writes `text.jsonl.xz` (sampled from the target with a fixed seed; no book text) and `README.md`
beside the models. All numbers in the card are measured in the run that writes it. `--print DIR`
prints the tables of another model with their tokenizer, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from train_demo import BOS, FIRST_WORD, VOCAB_SIZE, phases_of

from magicdec.config.choices.backend import AttentionCase, choose_backend
from magicdec.config.machine import ModelTraits
from magicdec.distributed.groups import Group, read_launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.environment import probe_machine
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.names import ATTENTION_BACKENDS, load_named
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
DISTANCES = (512, 1024, 2048, 4096, 8192, 16000)
SCORED = 256  # tokens whose loss is measured after each context
PASSAGE = 64  # tokens that are repeated
CUE = 16  # of these, after which the others are scored
BOOKS = 8
CHAPTERS = 4
CHAPTER_TOKENS = 4700  # a book must have 16384 tokens when tokenised again
CHUNK = 1024


def load_runner(directory: Path, num_rows: int, max_tokens: int) -> ModelRunner:
    source = find_model("--out", str(directory))
    cpu = torch.device("cpu")
    model = load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)
    machine = probe_machine(read_launch())
    case = AttentionCase("cpu", model=ModelTraits(source.config.head_dim))
    backend = choose_backend("auto", machine, case)
    attention = load_named(ATTENTION_BACKENDS, backend)()
    return ModelRunner(model, attention, Group((0,), 0), num_rows, max_tokens)


@torch.inference_mode()
def logits_after(runner: ModelRunner, ids: np.ndarray, num_last: int) -> torch.Tensor:
    """Logits that predict the last `num_last` ids from all before them, [num_last, V]."""
    runner.release(0)
    runner.allocate(0)
    tokens = torch.from_numpy(ids[:-1])[None]
    context = tokens.shape[1] - num_last + 1
    for part in tokens[:, : context - 1].split(CHUNK, dim=1):
        runner.forward(ForwardBatch(part, [0], num_outputs=1))
    return runner.forward(ForwardBatch(tokens[:, context - 1 :], [0]))[0]


def loss_by_context(runner: ModelRunner, books: list[np.ndarray], num_windows: int) -> list[float]:
    """Mean loss in nats per token over the same tokens, for each length of context before them."""
    losses: list[list[float]] = [[] for _ in CONTEXTS]
    rng = np.random.default_rng(0)
    for _ in range(num_windows):
        book = books[rng.integers(len(books))]
        end = int(rng.integers(max(CONTEXTS) + SCORED, len(book)))
        for i, context in enumerate(CONTEXTS):
            ids = np.concatenate([[BOS], book[end - SCORED - context + 1 : end]])
            logits = logits_after(runner, ids, SCORED)
            losses[i].append(F.cross_entropy(logits, torch.from_numpy(ids[-SCORED:])).item())
    return [statistics.fmean(values) for values in losses]


def recall_by_distance(
    runner: ModelRunner, books: list[np.ndarray], num_trials: int
) -> list[tuple[float, float, float]]:
    """Greedy accuracy for each distance: on a book passage repeated after that distance, on a
    passage that was not in the context before (control), and on repeated random tokens."""
    rng = np.random.default_rng(1)
    results = []
    for distance in DISTANCES:
        hits: list[list[float]] = [[], [], []]
        for _ in range(num_trials):
            book = books[rng.integers(len(books))]
            start = int(rng.integers(0, len(book) - distance))
            filler = book[start : start + distance]
            passage = _elsewhere(rng, book, start, distance)
            noise = rng.integers(FIRST_WORD + 1, VOCAB_SIZE, PASSAGE)
            for i, (first, again) in enumerate(
                ((passage, passage), (filler[:PASSAGE], passage), (noise, noise))
            ):
                ids = np.concatenate([[BOS], first, filler[PASSAGE:], again])
                scored = PASSAGE - CUE
                choices = logits_after(runner, ids, scored).argmax(1).numpy()
                hits[i].append(float((choices == ids[-scored:]).mean()))
        results.append(tuple(statistics.fmean(h) for h in hits))
    return results  # type: ignore[return-value]


def _elsewhere(rng: np.random.Generator, book: np.ndarray, start: int, size: int) -> np.ndarray:
    """A random passage of the book outside the filler."""
    while True:
        at = int(rng.integers(0, len(book) - PASSAGE))
        if at + PASSAGE < start or at > start + size:
            return book[at : at + PASSAGE]


@torch.inference_mode()
def sample_books(runner: ModelRunner, tokenizer: Tokenizer) -> list[str]:
    """Text sampled at temperature 1, starting from BOS. Each book consists of several samples."""
    rows = list(range(BOOKS * CHAPTERS))
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        runner.cache.allocate(row, runner.max_tokens)
    ids = torch.full((len(rows), 1), BOS)
    sampled = []
    for step in range(CHAPTER_TOKENS):
        logits = runner.forward(ForwardBatch(ids, rows))[:, 0]
        logits[:, :3] = float("-inf")  # the special tokens: unknown, BOS, EOS
        ids = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)
        sampled.append(ids)
        if step % 500 == 0:
            print(f"sampling: {step}/{CHAPTER_TOKENS}", flush=True)
    chapters = [tokenizer.decode(row) for row in torch.cat(sampled, dim=1).tolist()]
    return ["\n".join(chapters[i * CHAPTERS : (i + 1) * CHAPTERS]) for i in range(BOOKS)]


def write_text(directory: Path, books: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in books)
    (directory / "text.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=9))


def card_table(head: str, columns: tuple[int, ...], rows: dict[str, list[float]]) -> str:
    lines = [f"| {head} | " + " | ".join(map(str, columns)) + " |"]
    lines.append("|---|" + "--:|" * len(columns))
    for label, values in rows.items():
        lines.append(f"| {label} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    return "\n".join(lines)


def write_card(directory: Path, template: Path, measured: dict[str, str]) -> None:
    text = template.read_text()
    for name, table in measured.items():
        text = text.replace("{" + name + "}", table)
    (directory / "README.md").write_text(text)


def trained_on(name: str, longer: float) -> str:
    """The phases of training, in words."""
    phases = phases_of(name, longer)
    parts = [f"{p.steps} steps of {p.rows} x {p.length}" for p in phases]
    total = sum(p.steps * p.rows * p.length for p in phases)
    return f"{', then '.join(parts)} tokens ({total / 1e6:.1f} M tokens)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("magicdec/demo"))
    parser.add_argument("--num_windows", type=int, default=4)
    parser.add_argument("--num_trials", type=int, default=3)
    parser.add_argument("--skip_text", action="store_true", help="keep the existing sampled text")
    parser.add_argument("--longer", type=float, default=1.0, help="as in train_demo.py [1]")
    parser.add_argument("--print", type=Path, metavar="DIR", help="measure this model alone")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.out / "target")
    if not (args.skip_text or args.print):
        runner = load_runner(args.out / "target", BOOKS * CHAPTERS, CHAPTER_TOKENS)
        write_text(args.out, sample_books(runner, tokenizer))
        del runner
    books = [json.loads(line)["text"] for line in args.validation.open(encoding="utf-8")]
    encoded = [np.array(tokenizer.encode(text), dtype=np.int64) for text in books]
    if args.print is not None:
        print("\n\n".join(tables_of([args.print], encoded, args).values()))
        return
    measured = {f"{n}_training": trained_on(n, args.longer) for n in ("target", "draft")}
    measured |= {"num_windows": str(args.num_windows), "num_trials": str(args.num_trials)}
    measured |= tables_of([args.out / name for name in ("target", "draft")], encoded, args)
    write_card(args.out, Path(__file__).with_name("train") / "demo_card.md", measured)


def tables_of(
    directories: list[Path], books: list[np.ndarray], args: argparse.Namespace
) -> dict[str, str]:
    losses = {}
    recalls = {}
    for directory in directories:
        label = directory.name
        runner = load_runner(directory, 1, max(CONTEXTS) + SCORED + 2 * PASSAGE)
        losses[label] = loss_by_context(runner, books, args.num_windows)
        recall = recall_by_distance(runner, books, args.num_trials)
        for i, what in enumerate(("passage", "control: passage not there", "random tokens")):
            recalls[f"{label}, {what}"] = [r[i] for r in recall]
        print(label, losses[label], recall, flush=True)
    return {
        "loss": card_table("tokens of context", CONTEXTS, losses),
        "recall": card_table("distance, tokens", DISTANCES, recalls),
    }


if __name__ == "__main__":
    main()
