"""Train a small model with linear attention (Gated DeltaNet, arXiv 2412.06464) in three layers of
four, of Qwen3.5's form, on the windows and with the tokenizer of the demo models, reproducibly
(fixed seed).

    python scripts/dev/train_hybrid.py --train ../shared/data/pg19/train.jsonl \\
        --out checkpoints/demo-hybrid

Writes a Hugging Face directory in bfloat16, and beside it what `--resume` goes on from if the
training was stopped, with the results of one that was not; losses go to `train_log.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor
from train.demo_windows import WindowSource
from train.hybrid_init import circuit_parameters, initialise
from train_demo import (
    BOS,
    CIRCUIT_RATE,
    EOS,
    FIRST_WORD,
    MAX_POSITIONS,
    RECALL_GAPS,
    SEED,
    VOCAB_SIZE,
    Muon,
    Phase,
    causal,
    schedule,
    window_losses,
)

from magicdec.distributed.groups import read_launch
from magicdec.hardware.environment import probe_machine
from magicdec.model.checkpoint.weight_map import weight_map
from magicdec.model.elementwise.delta import DeltaTokens, convolve, recur_in_chunks
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.transformer import Transformer
from magicdec.output.writing import append_line

DEMO = Path(__file__).parents[2] / "magicdec" / "demo" / "target"
LOG = "train_log.jsonl"
CHECKPOINT = "checkpoint.pt"
LINEAR = "linear_attention"
FULL = "full_attention"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 576,
    "num_hidden_layers": 8,
    "layer_types": 2 * [LINEAR, LINEAR, LINEAR, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": [EOS],
    "dtype": "bfloat16",
}
# The last phase trains contexts of 16384 tokens, as those of the demo models.
PHASES = [
    Phase(120, 6, 1024, (1.0, 1.0)),
    Phase(120, 6, 1024, (1.0, 0.3)),
    Phase(36, 2, 4096, (0.3, 0.12)),
    Phase(8, 1, 16384, (0.12, 0.0)),
]
SAVE_STEPS = 20
RECALL_STEPS = 100


def remember_window(layer: int, tokens: DeltaTokens) -> Tensor:
    """Of whole windows, whose states begin with zeros."""
    _, num_values, key_dim, value_dim = tokens.sizes
    channels = tokens.channels
    before = channels.new_zeros(len(channels), tokens.weight.shape[1] - 1, channels.shape[2])
    state = channels.new_zeros(len(channels), num_values, key_dim, value_dim)
    out, _ = recur_in_chunks(state, *convolve(tokens, before), tokens)
    return out


def logits_of(model: Transformer, ids: Tensor, positions: Tensor) -> Tensor:
    return model(ids, positions, causal, lambda x: x, remember=remember_window)


@torch.no_grad()
def recall(model: Transformer, gap: int) -> float:
    """Greedy accuracy on 64 random tokens that are repeated after `gap` others."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(FIRST_WORD + 1, VOCAB_SIZE, (4, 64 + gap), generator=generator)
    ids = torch.cat([ids, ids[:, :64]], dim=1)
    positions = torch.arange(ids.shape[1]).expand(4, -1)
    guesses = logits_of(model, ids, positions)[:, 64 + gap + 15 : -1].argmax(-1)
    return (guesses == ids[:, 64 + gap + 16 :]).float().mean().item()


class Training:
    """A model with its optimizers, and the state of the windows' generator."""

    def __init__(self, phases: list[Phase], source: WindowSource, out: Path) -> None:
        torch.manual_seed(SEED)
        self.phases = phases
        self.source = source
        self.out = out
        self.rng = np.random.default_rng(SEED)
        self.autocast = probe_machine(read_launch()).has_bfloat16_products
        config = parse_hf_config(CONFIG, name="demo-hybrid", generation={})
        self.model = initialise(Transformer(config))
        self.model.set_positions(MAX_POSITIONS, torch.device("cpu"))
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        self.others = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        slow = {id(p) for p in circuit_parameters(self.model)}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in matrices if id(p) not in slow]},
            {"params": [p for p in matrices if id(p) in slow], "lr": 0.02 * CIRCUIT_RATE},
        ]
        dtype = torch.bfloat16 if self.autocast else torch.float32
        self.optimizers = [
            Muon(groups, 0.02, dtype),
            torch.optim.AdamW(self.others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.num_steps = 0
        self.seconds = 0.0

    def run(self) -> None:
        for number, (phase, rate) in enumerate(schedule(self.phases), 1):
            if number <= self.num_steps:
                continue
            started = time.monotonic()
            loss = self.step(phase, rate)
            self.num_steps = number
            self.seconds += time.monotonic() - started
            entry: dict[str, Any] = {
                "step": number,
                "length": phase.length,
                "loss": round(loss, 4),
                "seconds": round(self.seconds, 1),
            }
            if number % RECALL_STEPS == 0:
                gaps = [gap for gap in RECALL_GAPS if gap <= 4000]
                entry["recall"] = {gap: round(recall(self.model, gap), 2) for gap in gaps}
            append_line(self.out / LOG, json.dumps(entry))
            if number % SAVE_STEPS == 0:
                self.save()

    def step(self, phase: Phase, rate: float) -> float:
        """One step; windows one at a time, so that activations stay in the CPU's cache."""
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * rate
        total = 0.0
        for _ in range(phase.rows):
            window = self.source.draw(self.rng, phase.length)
            ids, positions, targets = (torch.from_numpy(part).unsqueeze(0) for part in window)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = logits_of(self.model, ids, positions)
            loss = window_losses(logits, targets).sum() / phase.rows
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "windows": json.dumps(self.rng.bit_generator.state),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
        }
        new = self.out / f"{CHECKPOINT}.new"
        torch.save(state, new)
        new.replace(self.out / CHECKPOINT)

    def resume(self) -> None:
        state = torch.load(self.out / CHECKPOINT, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.rng.bit_generator.state = json.loads(state["windows"])
        self.num_steps = state["num_steps"]
        self.seconds = state["seconds"]
        lines = (self.out / LOG).read_text().splitlines(keepends=True)
        (self.out / LOG).write_text("".join(lines[: self.num_steps]))


def stored_tensors(model: Transformer) -> dict[str, Tensor]:
    """Tensors in bfloat16 by their names in a checkpoint: the inverse of the loader's weight map,
    in which a tensor may have rows of several parameters and a norm an offset."""
    state = model.state_dict()
    tensors = dict[str, Tensor]()
    for parameter, pieces in weight_map(model.config, model.shard, model.layers).items():
        rows = [piece.rows[1] - piece.rows[0] for piece in pieces]
        for piece, part in zip(pieces, state[parameter].split(rows), strict=True):
            whole = tensors.setdefault(piece.name, torch.empty(piece.full_shape))
            whole[piece.stored] = part.float() - piece.offset
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def export(model: Transformer, directory: Path, config: dict[str, Any] = CONFIG) -> None:
    """Write a Hugging Face directory of a model of these fields of `config`."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = stored_tensors(model)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(DEMO / "tokenizer.model", directory / "tokenizer.model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--train", type=Path, required=True, help="book text, JSON lines with a `text` field"
    )
    parser.add_argument("--out", type=Path, default=Path("checkpoints/demo-hybrid"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shorter", type=float, default=1.0, help="divides the steps [1]")
    parser.add_argument("--resume", action="store_true", help="go on with a stopped training")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(DEMO / "tokenizer.model"))
    books = [json.loads(line)["text"] for line in args.train.open(encoding="utf-8")]
    encoded = [np.array(ids, dtype=np.int64) for ids in processor.encode(books)]
    newline = processor.piece_to_id("\n")
    source = WindowSource(encoded, BOS, newline, FIRST_WORD, VOCAB_SIZE, MAX_POSITIONS)
    phases = [Phase(max(1, round(p.steps / args.shorter)), p.rows, p.length, p.lr) for p in PHASES]
    training = Training(phases, source, args.out)
    if args.resume:
        training.resume()
    else:
        (args.out / LOG).unlink(missing_ok=True)
    training.run()
    export(training.model, args.out)


if __name__ == "__main__":
    main()
