"""Train an EAGLE-3 draft head for a target (arXiv 2503.01840), reproducibly (fixed seed).

    python scripts/dev/train_eagle.py --target demo --capture 1 3 5 --vocab 1024 \\
        --train ../shared/data/pg19/train.jsonl --validation ../shared/data/pg19/validation.jsonl \\
        --out checkpoints/demo-eagle3

A head learns on windows of text to predict the target's next token, and then, from its own outputs,
the tokens after that one (`train/eagle_head.py`). The target's hidden states are computed for each
window and not kept. Losses and acceptance go to `train_log.jsonl` in --out, beside the head in the
format of `speculators`, which every evaluation writes anew. A training that is stopped (Ctrl-C,
SIGTERM) goes on with --resume, with the results of one that was not stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from train.eagle_head import HeadConfig, KeyValue, SoftCrossEntropy, TrainedHead
from train.eagle_target import CHUNK, Target

from magicdec.distributed.groups import read_launch
from magicdec.hardware.environment import probe_machine
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.model.config import ModelConfig
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.output.writing import append_line

SEED = 1
STEP_DECAY = 0.8  # weight of a chain's step in the loss, relative to the step before
BETAS = (0.9, 0.95)
MOST_GRADIENT = 0.5
LOWEST_RATE = 0.02  # the learning rate's end, relative to its peak
HELD_OUT = 0.05  # of each book, without --validation
LOG_STEPS = 20
STARTS = ("layer", "random")
LOG = "train_log.jsonl"
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class TrainingPlan:
    """`num_steps` optimizer steps of `rows` windows of `length` slots, each with a chain of
    `num_chain_steps` steps."""

    num_steps: int
    rows: int
    length: int
    num_chain_steps: int
    lr: float
    warmup: float

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    def learning_rate(self, step: int) -> float:
        """Of step 1 and later: a linear rise, then half a cosine."""
        num_warmup = max(1, round(self.warmup * self.num_steps))
        if step <= num_warmup:
            return self.lr * step / num_warmup
        done = (step - num_warmup) / max(1, self.num_steps - num_warmup)
        return self.lr * (LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * done)) / 2)


class BookWindows:
    """Windows of consecutive tokens of books, which are arrays of token ids. As in prompts, BOS,
    if there is one, replaces a window's first token."""

    def __init__(self, books: list[np.ndarray], bos: int | None) -> None:
        self.books = books
        self.bos = bos

    def draw(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """The generator determines the window: every place of every book is equally likely."""
        places = np.array([max(0, len(book) - length + 1) for book in self.books])
        book = self.books[rng.choice(len(self.books), p=places / places.sum())]
        first = int(rng.integers(len(book) - length + 1))
        window = book[first : first + length].copy()
        if self.bos is not None:
            window[0] = self.bos
        return window

    def check(self, flag: str, length: int) -> None:
        longest = max((len(book) for book in self.books), default=0)
        if longest < length:
            raise ValueError(
                f"{flag}: its longest text has {longest} tokens, a window {length}; "
                "shorten --length, or give longer texts"
            )


class Trainer:
    """A head, its target and its optimizer. The windows of a step depend on its number alone."""

    def __init__(
        self,
        head: TrainedHead,
        target: Target,
        draft_ids: Tensor,
        windows: BookWindows,
        plan: TrainingPlan,
    ) -> None:
        self.head = head
        self.target = target
        self.draft_ids = draft_ids
        self.windows = windows
        self.plan = plan
        self.is_drafted = torch.zeros(
            target.config.vocab_size, dtype=torch.bool, device=draft_ids.device
        )
        self.is_drafted[draft_ids] = True
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=plan.lr, betas=BETAS, weight_decay=0.0
        )
        self.step_weights = STEP_DECAY ** torch.arange(plan.num_chain_steps, device=target.device)
        self.num_steps = 0
        self.seconds = 0.0

    def step(self) -> list[float]:
        """One optimizer step. Returns the mean loss of each step of the chains."""
        plan = self.plan
        started = time.monotonic()
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = plan.learning_rate(self.num_steps)
        rng = np.random.default_rng([SEED, self.num_steps])
        window_length = plan.length + plan.num_chain_steps
        drawn = [self.windows.draw(rng, window_length) for _ in range(plan.rows)]
        ids = torch.from_numpy(np.stack(drawn)).to(self.target.device)
        # On a CPU one window at a time, so that activations stay in its cache. Gradients add up.
        parts = ids.split(1) if ids.device.type == "cpu" else (ids,)
        found = torch.zeros(plan.num_chain_steps)
        for part in parts:
            losses = self.losses(part)
            share = len(part) / plan.rows
            by_step = share * torch.stack(losses)
            (by_step * self.step_weights).sum().backward()
            found += by_step.detach().cpu()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MOST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.monotonic() - started
        return [round(loss, 4) for loss in found.tolist()]

    def losses(self, ids: Tensor) -> list[Tensor]:
        """The loss of each step of the chains, over slots whose most probable token can be
        drafted: token ids [B, slots + steps] -> scalars."""
        num_slots = ids.shape[1] - self.plan.num_chain_steps
        captured, last = self.target.read(ids)
        targets, best = self.target.judge(last, self.draft_ids)
        is_scored = self.is_drafted[best]
        embeddings = self.target.embed(ids)
        features = self.head.fuse(captured[:, :num_slots])
        past: list[KeyValue] = []
        losses = []
        for t in range(self.plan.num_chain_steps):
            slots = slice(1 + t, 1 + t + num_slots)
            features, states = self.head.step(features, embeddings[:, slots], past)
            weights = is_scored[:, slots].flatten().float()
            losses.append(
                SoftCrossEntropy.apply(
                    states.flatten(0, 1),
                    self.head.lm_head.weight,
                    targets[:, slots].flatten(0, 1),
                    weights / weights.sum().clamp(min=1),
                    CHUNK,
                )
            )
        return losses

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """The state of the training, written whole or not at all."""
        state = {
            "settings": settings,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            raise ValueError(f"--resume: there is no {path}; leave it out to begin a training")
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        for name, value in settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"--resume: {path} was trained with {name} {state['settings'].get(name)}, "
                    f"not {value}; give the same flags, or another --out"
                )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self.seconds = state["seconds"]


@torch.no_grad()
def measure_survival(
    head: TrainedHead, target: Target, draft_ids: Tensor, windows: Sequence[Tensor], num_drafts: int
) -> list[float]:
    """The share of chains of which the first 1, 2, .. `num_drafts` drafts are all accepted.

    A chain goes on from every slot of the windows [1, slots + 1], from the target's states and the
    text before, with the head's own outputs and drafts. It is judged by the target's greedy
    continuation of that text. A draft after a wrong one is never accepted, so that the chains'
    own drafts can be fed back in either case."""
    survival = torch.zeros(num_drafts, dtype=torch.float64)
    for ids in windows:
        captured, best = target.continue_greedily(ids, num_drafts)
        features = head.fuse(captured[:, :-1])
        tokens = ids[:, 1:]
        survives = torch.ones_like(tokens, dtype=torch.bool)
        past: list[KeyValue] = []
        for t in range(num_drafts):
            features, states = head.step(features, target.embed(tokens), past)
            tokens = draft_ids[head.lm_head(states).argmax(dim=-1)]
            survives &= tokens == best[:, 1:, t]
            survival[t] += survives.double().mean().cpu() / len(windows)
    return survival.tolist()


def acceptance_entry(survival: list[float]) -> dict[str, Any]:
    """`acceptance`: of each position, given that the drafts before it were accepted."""
    before = [1.0, *survival]
    given = [a / b if b else 0.0 for a, b in zip(survival, before, strict=False)]
    return {
        "acceptance": [round(x, 4) for x in given],
        "acceptance_length": round(1 + sum(survival), 4),
        "judged_by": "the target's greedy continuation of held-out text at every slot",
    }


def default_capture(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def check_capture(capture: list[int], num_layers: int) -> None:
    if capture != sorted(set(capture)) or not 0 <= capture[0] <= capture[-1] <= num_layers:
        raise ValueError(
            f"--capture {' '.join(map(str, capture))}: not rising numbers from 0 to {num_layers}, "
            f"the target's layers; name those after which it is read, such as "
            f"--capture {' '.join(map(str, sorted({1, num_layers // 2, num_layers - 1})))}"
        )


def check_window(config: ModelConfig, length: int) -> None:
    """Refuse windows in which the target would not see all tokens, or that it cannot take."""
    window = config.narrowest_window
    if length > config.max_length:
        raise ValueError(
            f"--length: windows of {length} tokens are longer than the {config.max_length} of "
            f"{config.name}; shorten it"
        )
    if window is not None and length > window:
        raise ValueError(
            f"--length: windows of {length} tokens are longer than the {window} that layers of "
            f"{config.name} look back, which is not computed here; shorten it"
        )


def head_config(config: ModelConfig, num_captured: int, args: argparse.Namespace) -> HeadConfig:
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        rope_theta=config.rope.theta,
        target_hidden_size=config.hidden_size,
        num_captured=num_captured,
        draft_vocab_size=args.vocab,
        norm_before_residual=args.norm_before_residual,
        norm_output=args.norm_output,
        fc_norm=args.fc_norm,
    )


def choose_draft_ids(
    books: list[np.ndarray], num_counted: int, size: int, vocab: int
) -> np.ndarray:
    """The `size` most frequent ids of the first `num_counted` tokens, ascending, [V]."""
    if not 0 < size <= vocab:
        raise ValueError(
            f"--vocab {size}: a draft vocabulary has 1 to {vocab} ids, those of the target"
        )
    counts = np.bincount(np.concatenate(books)[:num_counted], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def coverage(books: list[np.ndarray], draft_ids: np.ndarray) -> float:
    """The share of the books' tokens that can be drafted."""
    found = [np.isin(book, draft_ids).sum() for book in books]
    return float(sum(found) / sum(map(len, books)))


@torch.no_grad()
def initialise(head: TrainedHead, target: Target, draft_ids: Tensor, start: str) -> None:
    """Start from the target's final norm and head, and with `layer` from its last layer as well,
    behind the highest captured state. The projections of embeddings stay random."""
    model = target.model
    parameters = dict(model.named_parameters())
    weights = parameters.get("head.weight", parameters["embedding.weight"])
    head.lm_head.weight.copy_(weights[draft_ids])
    if target.config.norm == "rms":
        head.norm.weight.copy_(parameters["norm.weight"])
    if start == "random":
        return
    check_layer(target.config)
    config = head.config
    width = config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -width:].fill_diagonal_(1.0)
    last = f"blocks.{target.config.num_layers - 1}."
    layer = head.layer
    layer.hidden_norm.weight.copy_(parameters[last + "attention_norm.weight"])
    layer.post_attention_layernorm.weight.copy_(parameters[last + "mlp_norm.weight"])
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [len(projection.weight) for projection in projections]
    rows = parameters[last + "attention.qkv.weight"].split(sizes)
    for projection, part in zip(projections, rows, strict=True):
        projection.weight[:, width:].copy_(part)
    attention.o_proj.weight.copy_(parameters[last + "attention.output.weight"])
    gate, up = parameters[last + "mlp.gate_up.weight"].chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.mlp.down_proj.weight.copy_(parameters[last + "mlp.down.weight"])


def check_layer(config: ModelConfig) -> None:
    is_llama = config.norm == "rms" and config.residual == "sequential" and config.gated_mlp
    is_llama &= config.activation == "silu" and config.positions == "rope" and not config.qk_norm
    if not is_llama or config.rope.interleaved or config.rope.rotary_dim is not None:
        raise ValueError(
            f"--start layer: the last layer of {config.name} is not built as a head's; "
            "use --start random"
        )


def speculators_config(
    head: HeadConfig, target: Target, name: str, length: int, num_drafts: int
) -> dict[str, Any]:
    """The `config.json` of a head in the format of `speculators`. Captured layers are counted as
    vLLM does: the number of layers computed before."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.draft_vocab_size,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "target_hidden_size": head.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(target.capture),
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": head.hidden_size,
            "intermediate_size": head.intermediate_size,
            "num_attention_heads": head.num_heads,
            "num_key_value_heads": head.num_kv_heads,
            "head_dim": head.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": head.norm_eps,
            "rope_theta": head.rope_theta,
            "vocab_size": target.config.vocab_size,
            "max_position_embeddings": length,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [target.config.architecture]},
        },
    }


def export(
    head: TrainedHead, draft_ids: Tensor, vocab_size: int, config: dict[str, Any], directory: Path
) -> None:
    """Write a head in the format of `speculators`, in bfloat16, without an embedding."""
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    ids = draft_ids.cpu()
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = is_drafted
    partial = directory / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tokenizer_of(source: ModelSource) -> Tokenizer:
    if source.tokenizer_path is None:
        raise ValueError(
            f"--target {source.name}: random weights have no tokenizer; name a checkpoint"
        )
    return load_tokenizer(source.tokenizer_path)


def read_books(path: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The token ids of each text of a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines if line.strip()]
    return [np.array(tokenizer.encode(text), dtype=np.int64) for text in texts]


def split_books(books: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Books without their ends, and the ends, which are held out."""
    ends = [len(book) - round(HELD_OUT * len(book)) for book in books]
    return (
        [book[:end] for book, end in zip(books, ends, strict=True)],
        [book[end:] for book, end in zip(books, ends, strict=True)],
    )


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """The signals that asked the process to end, which do not end it."""
    found: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, frame: found.append(n)) for number in numbers]
    try:
        yield found
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(
    trainer: Trainer, evaluation: list[Tensor], args: argparse.Namespace, stops: list[int]
) -> None:
    """Train to the end, or until there is a signal in `stops`. Log, evaluate, keep the state."""
    log = args.out / LOG
    plan = trainer.plan
    settings = kept_settings(args, plan)
    target = trainer.target
    config = speculators_config(
        trainer.head.config, target, args.target, plan.length, plan.num_chain_steps
    )

    def note(entry: dict[str, Any]) -> None:
        tokens = trainer.num_steps * plan.tokens_per_step
        entry = {"step": trainer.num_steps, "tokens": tokens} | entry
        entry["seconds"] = round(trainer.seconds, 1)
        append_line(log, json.dumps(entry))
        print(json.dumps(entry), flush=True)

    def evaluate() -> None:
        survival = measure_survival(
            trainer.head, target, trainer.draft_ids, evaluation, plan.num_chain_steps
        )
        note(acceptance_entry(survival))
        export(trainer.head, trainer.draft_ids, target.config.vocab_size, config, args.out)

    if trainer.num_steps:
        note({"event": "resumed"})
    else:
        evaluate()
    saved = time.monotonic()
    losses: list[list[float]] = []
    while trainer.num_steps < plan.num_steps and not stops:
        losses.append(trainer.step())
        tokens = trainer.num_steps * plan.tokens_per_step
        is_last = trainer.num_steps == plan.num_steps
        if is_last or trainer.num_steps % LOG_STEPS == 0:
            mean = np.mean(losses, axis=0).round(4).tolist()
            note({"loss": mean, "lr": float(f"{plan.learning_rate(trainer.num_steps):.3g}")})
            losses = []
        if is_last or tokens % args.eval_tokens < plan.tokens_per_step:
            evaluate()
        if is_last or time.monotonic() - saved > args.save_seconds:
            trainer.save(args.out / CHECKPOINT, settings)
            saved = time.monotonic()
    if stops:
        trainer.save(args.out / CHECKPOINT, settings)
        note({"event": "stopped; --resume goes on from here"})


def kept_settings(args: argparse.Namespace, plan: TrainingPlan) -> dict[str, Any]:
    """What a training that goes on must have in common with the one before."""
    names = (
        "target",
        "vocab",
        "capture",
        "count_tokens",
        "start",
        "dtype",
        "norm_before_residual",
        "norm_output",
        "fc_norm",
    )
    return {name: getattr(args, name) for name in names} | asdict(plan)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="demo, a checkpoint's directory, or a .gguf file")
    add("--train", type=Path, required=True, help="JSON lines with a `text` field")
    add("--validation", type=Path, help="held-out texts; without, each training text's end")
    add("--out", type=Path, required=True, help="where head, log and state are written")
    add("--resume", action="store_true", help="go on from the state in --out")
    add("--length", type=int, default=2048, help="slots of a window [2048]")
    add("--rows", type=int, default=2, help="windows of an optimizer step [2]")
    add("--ttt", type=int, default=4, help="steps of a chain: the drafts it learns [4]")
    add("--steps", type=int, help="optimizer steps; instead of --tokens")
    add("--tokens", type=float, default=2e7, help="trained tokens, repeated ones too [2e7]")
    add("--vocab", type=int, default=1024, help="size of the draft vocabulary [1024]")
    add("--count_tokens", type=int, default=2_000_000, help="tokens that choose it [2000000]")
    add("--capture", type=int, nargs="+", help="layers after which the target is read [2 n/2 n-3]")
    add("--norm_before_residual", action="store_true", help="the normed features are the residual")
    add("--norm_output", action="store_true", help="a step's features are normed (EAGLE-3.1)")
    add("--fc_norm", action="store_true", help="a norm for each captured state (EAGLE-3.1)")
    add("--start", choices=STARTS, default="layer", help="from the target's last layer [layer]")
    add("--lr", type=float, default=3e-3, help="the learning rate's peak [3e-3]")
    add("--warmup", type=float, default=0.03, help="share of the steps in which it rises [0.03]")
    add("--eval_windows", type=int, default=8, help="held-out windows of an evaluation [8]")
    add("--eval_tokens", type=int, default=1_000_000, help="tokens between evaluations [1000000]")
    add("--save_seconds", type=float, default=180.0, help="between states that are kept [180]")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", choices=("bfloat16", "float32"), help="bfloat16 where it is multiplied fast")
    add("--threads", type=int, default=2)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        train(args)
    except ValueError as error:
        parser.error(str(error))


def train(args: argparse.Namespace) -> None:
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    if not args.resume and (args.out / CHECKPOINT).exists():
        raise ValueError(
            f"--out {args.out}: holds a training; add --resume to go on, or name another directory"
        )
    source = find_model("--target", args.target)
    config = source.config
    args.capture = args.capture or default_capture(config.num_layers)
    check_capture(args.capture, config.num_layers)
    window_length = args.length + args.ttt
    check_window(config, window_length)
    is_fast = args.device == "cuda" or probe_machine(read_launch()).has_bfloat16_products
    args.dtype = args.dtype or ("bfloat16" if is_fast else "float32")
    device = torch.device(args.device)
    tokenizer = tokenizer_of(source)
    bos = tokenizer.bos_of(config.bos_token_id)
    books = read_books(args.train, tokenizer)
    if args.validation is None:
        books, held_out = split_books(books)
    else:
        held_out = read_books(args.validation, tokenizer)
    chosen = choose_draft_ids(books, args.count_tokens, args.vocab, config.vocab_size)
    draft_ids = torch.from_numpy(chosen).to(device)
    windows = BookWindows(books, bos)
    windows.check("--train", window_length)
    others = BookWindows(held_out, bos)
    others.check("--train" if args.validation is None else "--validation", args.length + 1)
    rng = np.random.default_rng(SEED)
    evaluation = [
        torch.from_numpy(others.draw(rng, args.length + 1))[None].to(device)
        for _ in range(args.eval_windows)
    ]
    positions = window_length + args.ttt
    target = Target(source, args.capture, positions, getattr(torch, args.dtype), device)
    head = TrainedHead(head_config(config, len(args.capture), args), positions).to(device)
    initialise(head, target, draft_ids, args.start)
    num_steps = args.steps or max(1, round(args.tokens / (args.rows * args.length)))
    plan = TrainingPlan(num_steps, args.rows, args.length, args.ttt, args.lr, args.warmup)
    trainer = Trainer(head, target, draft_ids, windows, plan)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        trainer.load(args.out / CHECKPOINT, kept_settings(args, plan))
    else:
        (args.out / LOG).unlink(missing_ok=True)
        facts = {
            "parameters": sum(p.numel() for p in head.parameters()),
            "tokens_of_text": sum(map(len, books)),
            "coverage": round(coverage(books, chosen), 4),
            "coverage_held_out": round(coverage(held_out, chosen), 4),
        }
        append_line(args.out / LOG, json.dumps(kept_settings(args, plan) | facts))
        print(json.dumps(facts), flush=True)
    with collected_signals() as stops:
        run(trainer, evaluation, args, stops)


if __name__ == "__main__":
    main()
