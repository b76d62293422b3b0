"""Train the packaged demo models from one command, reproducibly (fixed seed).

    python scripts/dev/train_demo.py --train ../shared/data/pg19/train.jsonl --out magicdec/demo

Stages, in this order, each skipped if its output exists: `tokenizer` (SentencePiece BPE, vocabulary
2048), `target` and `draft` (see SIZES and PHASES). Models are written as Hugging Face directories
in bfloat16. `scripts/dev/demo_card.py` measures the result and samples the demo text. On a GPU
(`--device cuda`) longer training is feasible: `--longer 10` makes every phase ten times as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from train.demo_init import circuit_parameters, initialise
from train.demo_windows import IGNORE, WindowSource

from magicdec.distributed.groups import read_launch
from magicdec.hardware.environment import probe_machine
from magicdec.model.checkpoint.weight_map import weight_map
from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.transformer import Transformer

VOCAB_SIZE = 2048
MAX_POSITIONS = 20480
SEED = 1
BOS = 1
EOS = 2
FIRST_WORD = 259
CIRCUIT_RATE = 0.1  # learning rate of the induction circuit's matrices, relative to the others
RECALL_GAPS = (0, 1000, 4000, 16000)  # distances at which recall is logged during training
# With a high base the low-frequency pairs hardly rotate over 16384 tokens, so that content can be
# matched at any distance.
ROPE = RopeConfig(theta=1e7)


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps of `rows` windows of `length` tokens. The relative learning rate goes
    linearly from `lr[0]` to `lr[1]`."""

    steps: int
    rows: int
    length: int
    lr: tuple[float, float]


def llama(name: str, layers: int, hidden: int, ffn: int, heads: int) -> ModelConfig:
    return ModelConfig(
        name,
        VOCAB_SIZE,
        layers,
        hidden,
        ffn,
        heads,
        heads,
        hidden // heads,
        MAX_POSITIONS,
        rope=ROPE,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )


SIZES = {"target": llama("demo", 6, 256, 704, 4), "draft": llama("demo-draft", 2, 128, 352, 2)}
# The last phase trains contexts of 16384 tokens. Without it, the loss rises beyond the longest
# window seen in training.
PHASES = {
    "target": [
        Phase(700, 6, 1024, (1.0, 1.0)),
        Phase(700, 6, 1024, (1.0, 0.3)),
        Phase(200, 2, 4096, (0.3, 0.12)),
        Phase(40, 1, 16384, (0.12, 0.0)),
    ],
    "draft": [
        Phase(500, 6, 1024, (1.0, 1.0)),
        Phase(500, 6, 1024, (1.0, 0.3)),
        Phase(100, 2, 4096, (0.3, 0.12)),
        Phase(16, 1, 16384, (0.12, 0.0)),
    ],
}


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan 2024), for the matrices of the
    blocks. The iterations use `dtype`; `torch.optim.Muon` always uses bfloat16, which is slow on
    CPUs without hardware support."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        dtype: torch.dtype,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]).to(self.dtype))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalize(x: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrix, by five quintic Newton-Schulz
    iterations."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def train_tokenizer(books: list[str], directory: Path) -> None:
    """Lossless BPE: no normalisation, a piece for newlines, bytes for rare characters."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line + "\n" for book in books for line in book.split("\n")),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        character_coverage=0.9995,
        input_sentence_size=200_000,
        shuffle_input_sentence=True,
        num_threads=2,
        minloglevel=1,
    )
    (directory / "tokenizer.vocab").unlink()


def train_model(
    config: ModelConfig, phases: list[Phase], source: WindowSource, log: Path, device: str
) -> Transformer:
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    autocast = device == "cuda" or probe_machine(read_launch()).has_bfloat16_products
    model = initialise(Transformer(config)).to(device)
    model.set_positions(MAX_POSITIONS, torch.device(device))
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    slow = {id(p) for p in circuit_parameters(model)}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in matrices if id(p) not in slow]},
        {"params": [p for p in matrices if id(p) in slow], "lr": 0.02 * CIRCUIT_RATE},
    ]
    optimizers = [
        Muon(groups, 0.02, torch.bfloat16 if autocast else torch.float32),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [[group["lr"] for group in o.param_groups] for o in optimizers]
    started = time.monotonic()
    step = 0
    tokens = 0
    for phase, lr in schedule(phases):
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * lr
        loss = torch.zeros((), device=device)
        # On a CPU one window at a time, so that activations stay in its cache. Gradients add up.
        together = 1 if device == "cpu" else phase.rows
        for _ in range(phase.rows // together):
            windows = [source.draw(rng, phase.length) for _ in range(together)]
            ids, positions, targets = (
                torch.from_numpy(np.stack(a)).to(device) for a in zip(*windows, strict=True)
            )
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                logits = model(ids, positions, causal, lambda t: t)
            row_loss = window_losses(logits, targets).sum() / phase.rows
            row_loss.backward()
            loss += row_loss.detach()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step = step + 1
        tokens = tokens + phase.rows * phase.length
        entry: dict[str, Any] = {
            "step": step,
            "tokens": tokens,
            "length": phase.length,
            "loss": round(loss.item(), 4),
        }
        entry |= {"lr": round(lr, 4), "seconds": round(time.monotonic() - started, 1)}
        if step % 50 == 0:
            entry["recall"] = {gap: round(recall(model, gap, device), 2) for gap in RECALL_GAPS}
            torch.save(model.state_dict(), log.with_suffix(".pt"))
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    return model


def window_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of each window, over targets that are not ignored: logits [B, T, V] -> [B]."""
    pairs = zip(logits.float(), targets, strict=True)
    return torch.stack([F.cross_entropy(x, y, ignore_index=IGNORE) for x, y in pairs])


def phases_of(name: str, longer: float) -> list[Phase]:
    """The phases of a model, with `longer` times the steps."""
    return [replace(phase, steps=round(longer * phase.steps)) for phase in PHASES[name]]


@torch.no_grad()
def recall(model: Transformer, gap: int, device: str) -> float:
    """Greedy accuracy on 64 random tokens that are repeated after `gap` skipped positions."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(FIRST_WORD + 1, VOCAB_SIZE, (4, 64), generator=generator).to(device)
    positions = torch.cat([torch.arange(64), torch.arange(64) + 64 + gap]).to(device).expand(4, -1)
    guesses = model(ids.repeat(1, 2), positions, causal, lambda t: t)[:, 79:-1].argmax(-1)
    return (guesses == ids[:, 16:]).float().mean().item()


def schedule(phases: list[Phase]) -> Iterator[tuple[Phase, float]]:
    warmup = 40
    step = 0
    for phase in phases:
        for i in range(phase.steps):
            step += 1
            lr = phase.lr[0] + (phase.lr[1] - phase.lr[0]) * (i + 0.5) / phase.steps
            yield phase, lr * min(1.0, step / warmup)


def export(model: Transformer, tokenizer: Path, directory: Path) -> None:
    """Write a Hugging Face directory in bfloat16: the inverse of the loader's weight map."""
    config = model.config
    state = model.state_dict()
    tensors = {}
    for parameter, pieces in weight_map(config, model.shard, model.layers).items():
        rows = [p.rows[1] - p.rows[0] for p in pieces]
        for piece, part in zip(pieces, state[parameter].split(rows), strict=True):
            tensors[piece.name] = part.to("cpu", torch.bfloat16).contiguous().clone()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(to_hf_config(config), indent=2) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--train", type=Path, required=True, help="book text, JSON lines with a `text` field"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("magicdec/demo"),
        help="where target/ and draft/ are written",
    )
    parser.add_argument(
        "--work_dir",
        type=Path,
        default=Path("build/demo"),
        help="tokenizer, logs, unfinished weights",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longer", type=float, default=1.0, help="factor on the steps [1]")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    books = [json.loads(line)["text"] for line in args.train.open(encoding="utf-8")]
    tokenizer = args.work_dir / "tokenizer.model"
    if not tokenizer.exists():
        train_tokenizer(books, args.work_dir)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    encoded = [np.array(ids, dtype=np.int64) for ids in processor.encode(books)]
    print(f"{len(books)} books, {sum(map(len, encoded))} tokens", flush=True)
    source = WindowSource(
        encoded, BOS, processor.piece_to_id("\n"), FIRST_WORD, VOCAB_SIZE, MAX_POSITIONS
    )
    for name, config in SIZES.items():
        directory = args.out / name
        if not (directory / "model.safetensors").exists():
            log = args.work_dir / f"{name}.jsonl"
            log.unlink(missing_ok=True)
            phases = phases_of(name, args.longer)
            model = train_model(config, phases, source, log, args.device)
            export(model, tokenizer, directory)


if __name__ == "__main__":
    main()
