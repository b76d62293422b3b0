"""Train the head for multi-token prediction of a model that `train_hybrid.py` has written
(DeepSeek-V3, arXiv 2412.19437, section 2.2), reproducibly (fixed seed), and add it to that
checkpoint.

    python scripts/dev/train_mtp.py --model checkpoints/demo-hybrid \\
        --train ../shared/data/pg19/train.jsonl

The head learns what the target's probabilities are, from the target's states, and then from its own
outputs along chains, as an EAGLE-3 head does (`train_eagle.py`). Losses go to `mtp_log.jsonl`, with
how often each token of a chain is the target's most probable one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train.eagle_head import KeyValue, SoftCrossEntropy, forked_attention
from train_demo import causal
from train_eagle import (
    BETAS,
    LOG_STEPS,
    MOST_GRADIENT,
    SEED,
    STEP_DECAY,
    BookWindows,
    TrainingPlan,
    read_books,
    tokenizer_of,
)
from train_hybrid import remember_window, stored_tensors

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.model.mtp import MtpHead
from magicdec.model.transformer import Transformer
from magicdec.output.writing import append_line

LOG = "mtp_log.jsonl"
MTP_LAYERS = "mtp_num_hidden_layers"


class MtpTrainer:
    """A head of a frozen target. The windows of a step depend on its number alone."""

    def __init__(self, source: ModelSource, windows: BookWindows, plan: TrainingPlan) -> None:
        torch.manual_seed(SEED)
        config = source.config
        cpu = torch.device("cpu")
        positions = plan.length + 2 * plan.num_chain_steps
        self.windows = windows
        self.plan = plan
        self.target = load_transformer(
            config, source.weights, Shard(), None, torch.float32, cpu
        ).requires_grad_(False)
        self.head = MtpHead(config.mtp_config())
        begin_as_last_layer(self.head, self.target)
        self.parameters = [*self.head.parameters()]
        self.head.share(self.target)
        for model in (self.target, self.head):
            model.set_positions(positions, cpu)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=plan.lr, betas=BETAS, weight_decay=0.0
        )
        self.step_weights = STEP_DECAY ** torch.arange(plan.num_chain_steps)
        self.num_steps = 0

    def step(self) -> tuple[list[float], list[float]]:
        """The mean loss of each step of the chains, and how many of its tokens are the target's."""
        plan = self.plan
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = plan.learning_rate(self.num_steps)
        rng = np.random.default_rng([SEED, self.num_steps])
        found = np.zeros((2, plan.num_chain_steps))
        for _ in range(plan.rows):
            ids = self.windows.draw(rng, plan.length + plan.num_chain_steps)
            losses, right = self.chain(torch.from_numpy(ids)[None])
            total = (torch.stack(losses) * self.step_weights).sum()
            (total / plan.rows).backward()
            found += np.array([[loss.item() for loss in losses], right]) / plan.rows
        torch.nn.utils.clip_grad_norm_(self.parameters, MOST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean_losses, shares = found.round(4).tolist()
        return mean_losses, shares

    def chain(self, ids: Tensor) -> tuple[list[Tensor], list[float]]:
        """The loss of each step of chains from every slot of a window of token ids [1, slots +
        steps], and how often its token is the target's most probable one."""
        num_steps = self.plan.num_chain_steps
        num_slots = ids.shape[1] - num_steps
        last, wanted = self.read(ids)
        state = self.head.reduced(last[:, :num_slots, None])
        past = list[KeyValue]()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            past.append((k, v))
            return forked_attention(q, past)

        losses = []
        right = []
        for t in range(num_steps):
            slots = slice(1 + t, 1 + t + num_slots)
            positions = torch.arange(t, t + num_slots)[None]
            x = self.head.pair(ids[:, slots], state)
            output = self.head(x, positions, attend, lambda x: x)
            state = self.head.norm(output)
            losses.append(
                SoftCrossEntropy.apply(
                    state.flatten(0, 1),
                    self.target.tied_head,
                    wanted[:, slots].flatten(0, 1),
                    torch.full((num_slots,), 1 / num_slots),
                    num_slots,
                )
            )
            best = self.head.multiply_head(state.detach()).argmax(-1)
            is_right = best == wanted[:, slots].argmax(-1)
            right.append(is_right.float().mean().item())
        return losses, right

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's states after its last layer [1, T, H], and its probabilities [1, T, V]."""
        states = dict[int, Tensor]()
        positions = torch.arange(ids.shape[1])[None]
        logits = self.target(
            ids,
            positions,
            causal,
            lambda x: x,
            keep=states.__setitem__,
            remember=remember_window,
        )
        return states[self.target.config.num_layers], logits.softmax(-1)


@torch.no_grad()
def begin_as_last_layer(head: MtpHead, target: Transformer) -> None:
    """Let the head be the target's last layer, behind the target's states; it reads little of the
    tokens at first."""
    head.blocks[0].load_state_dict(target.blocks[-1].state_dict())
    head.norm.load_state_dict(target.norm.state_dict())
    width = target.config.hidden_size
    projection = head.projection.weight
    assert isinstance(projection, Tensor), "it is not packed"
    projection[:, :width].normal_(std=0.02 * width**-0.5)
    projection[:, width:].copy_(torch.eye(width))


def add_to_checkpoint(head: MtpHead, directory: Path) -> None:
    """Write the head's tensors beside those of its target, and its layer into the config."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | stored_tensors(head)
    save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {MTP_LAYERS: 1}
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a directory of train_hybrid.py")
    parser.add_argument(
        "--train", type=Path, required=True, help="book text, JSON lines with a `text` field"
    )
    parser.add_argument("--steps", type=int, default=500, help="of two windows [500]")
    parser.add_argument("--length", type=int, default=2048, help="slots of a window [2048]")
    parser.add_argument("--ttt", type=int, default=4, help="steps of a chain [4]")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = find_model("--model", str(args.model))
    tokenizer = tokenizer_of(source)
    bos = tokenizer.bos_of(source.config.bos_token_id)
    windows = BookWindows(read_books(args.train, tokenizer), bos)
    windows.check("--train", args.length + args.ttt)
    plan = TrainingPlan(args.steps, 2, args.length, args.ttt, 3e-3, 0.03)
    trainer = MtpTrainer(source, windows, plan)
    log = args.model / LOG
    log.unlink(missing_ok=True)
    started = time.monotonic()
    noted = []
    for number in range(1, args.steps + 1):
        noted.append(trainer.step())
        if number % LOG_STEPS == 0 or number == args.steps:
            losses, right = np.mean(noted, axis=0).round(4).tolist()
            entry = {"step": number, "loss": losses, "right": right}
            seconds = round(time.monotonic() - started, 1)
            append_line(log, json.dumps(entry | {"seconds": seconds}))
            noted = []
    add_to_checkpoint(trainer.head, args.model)


if __name__ == "__main__":
    main()
