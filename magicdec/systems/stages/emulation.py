"""Emulation: stages that sleep in place of computing, and links that deliver late, so that one host
stands for several. All else is real: messages, caches, admission and schedulers. `StagedSystem`
plugs it in, and nothing else knows of it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from magicdec.config.run_config import RunConfig
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import (
    Message,
    MessageForm,
    Receiver,
    Sender,
    Traffic,
    to_host,
)
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import Attend
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.gated_delta import Remember
from magicdec.model.linear.packed import Reduce
from magicdec.model.transformer import BeforeLayer, KeepState, Transformer
from magicdec.output.console import Progress
from magicdec.setup.loading import LoadedModels
from magicdec.setup.model_plan import Kinds, StagePart

DIGITS = 3  # of a position in a hidden state
BASE = 256  # integers up to it are exact in bfloat16


class EmulatedTime(threading.local):
    """When, in seconds of `time.perf_counter`, this thread was due to have done its emulated work;
    0 before any. The next work counts from then, so that late wake-ups do not add up, nor what the
    host does beside it. Stages and drafters of a rank are threads of their own.
    """

    due_s = 0.0

    @property
    def now_s(self) -> float:
        return self.due_s or time.perf_counter()

    def reach(self, due_s: float) -> None:
        """Take a message that was due then."""
        self.due_s = max(self.due_s, due_s)

    def begin(self, seconds: float) -> None:
        """Begin work of `seconds`: now, if what it follows is longer ago than that."""
        now_s = time.perf_counter()
        if now_s - self.due_s > seconds:
            self.due_s = now_s

    def sleep(self, seconds: float) -> None:
        self.due_s += seconds
        sleep_until(self.due_s)


def sleep_until(due_s: float) -> None:
    time.sleep(max(0.0, due_s - time.perf_counter()))


class SleepingModel(Transformer):
    """A stand-in for a model, or a part of one, on a machine that is not there. A forward of any
    size takes `seconds`, in equal shares by layer. Token p + 1 follows position p: the last layer
    puts out a token's position."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layers: range | None,
        has_ends: bool | None,
        seconds: float,
        like: Tensor,
        emulated: EmulatedTime,
    ) -> None:
        """`like` has the dtype and device of the missing weights."""
        nn.Module.__init__(self)
        self.set_part(config, shard, layers, has_ends)
        self.elementwise = Elementwise()
        self.seconds = seconds
        self.emulated = emulated
        self.weight = nn.Parameter(like.new_zeros(1), requires_grad=False)
        self.blocks = nn.ModuleList()  # it has neither sinks nor experts

    def set_positions(self, max_positions: int, device: torch.device) -> None:
        """There is no position encoding."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        reduce: Reduce,
        num_outputs: int | None = None,
        before_layer: BeforeLayer = lambda layer: None,
        keep: KeepState | None = None,
        remember: Remember | None = None,
    ) -> Tensor:
        self.emulated.begin(self.seconds)
        for layer in self.layers:
            before_layer(layer)
            self.emulated.sleep(self.seconds / len(self.layers))
        if not self.is_last:
            return self.weight.new_zeros(*positions.shape, self.config.hidden_size)
        if num_outputs is not None:
            positions = positions[:, positions.shape[1] - num_outputs :]
        digits = torch.stack([positions // BASE**i % BASE for i in range(DIGITS)], dim=-1)
        hidden = self.weight.new_zeros(*positions.shape, self.config.hidden_size)
        hidden[..., :DIGITS] = digits.to(hidden.dtype)
        return self.logits(hidden) if self.has_head else hidden

    def logits(self, x: Tensor) -> Tensor:
        """This rank's logits [B, T, V]: 1 for the following token, else 0."""
        places = torch.tensor([BASE**i for i in range(DIGITS)], device=x.device)
        positions = (x[..., :DIGITS].long() * places).sum(dim=-1)
        first, last = self.head_rows
        ids = torch.arange(first, last, device=x.device)
        following = (positions + 1) % self.config.vocab_size
        return (ids == following.unsqueeze(-1)).to(x.dtype)


def following_tokens(prompt_len: int, count: int, vocab_size: int) -> list[int]:
    """The output of stages that sleep."""
    return [(prompt_len + i) % vocab_size for i in range(count)]


class SleepingModels(LoadedModels):
    """Models that sleep `seconds` in each forward. Nothing is loaded."""

    def __init__(
        self, device: torch.device, progress: Progress, seconds: float, emulated: EmulatedTime
    ) -> None:
        super().__init__(device, progress)
        self.seconds = seconds
        self.emulated = emulated

    def get(
        self, source: ModelSource, group: Group, kinds: Kinds, part: StagePart = StagePart()
    ) -> Transformer:
        like = torch.zeros(1, dtype=getattr(torch, kinds.dtype), device=self.device)
        shard = Shard(group.index, group.size)
        ends = part.layers, part.has_ends
        model = SleepingModel(source.config, shard, *ends, self.seconds, like, self.emulated)
        return model.eval()


def without_weights(run_config: RunConfig) -> RunConfig:
    """`run_config` for models that sleep: native steps would read weights, and tokens that are
    numbers of positions end nothing."""
    asked = run_config.model
    decoding = replace(run_config.decoding, ignore_eos=True)
    return replace(run_config, model=replace(asked, native_steps="off"), decoding=decoding)


class LateSender(Sender):
    """A sender as over a link on which a message takes `delay_s` more. Its thread owns `sender`.
    With `emulated`, the message counts from when it was due, and its first word says when it is
    due."""

    def __init__(
        self, sender: Sender, delay_s: float, emulated: EmulatedTime | None = None
    ) -> None:
        self.sender = sender
        self.delay_s = delay_s
        self.emulated = emulated
        self._error = list[RuntimeError]()
        self._queue: Queue[tuple[float, Message]] = Queue()
        Thread(target=self._run, name="emulated link", daemon=True).start()

    @property
    def traffic(self) -> Traffic:
        return self.sender.traffic

    def send(self, message: Message) -> None:
        self._raise()
        payload = None if message.payload is None else to_host(message.payload)
        words = message.words
        due_s = self.delay_s + time.perf_counter()
        if self.emulated is not None:
            due_s = self.delay_s + self.emulated.now_s
            words = (round(1e9 * due_s), *words)
        self._queue.put((due_s, replace(message, words=words, payload=payload)))

    def close(self) -> None:
        self._queue.join()
        self._raise()
        self.sender.close()

    def _run(self) -> None:
        while True:
            due_s, message = self._queue.get()
            sleep_until(due_s)
            try:
                if not self._error:
                    self.sender.send(message)
            except RuntimeError as error:
                self._error.append(error)
            self._queue.task_done()

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]


@dataclass(frozen=True)
class DueReceiver:
    """The other end of a `LateSender` with `emulated`. Ranks of other hosts have another clock, so
    that their messages count from their arrival."""

    receiver: Receiver
    emulated: EmulatedTime
    shares_clock: bool

    def receive(self) -> Message:
        message = self.receiver.receive()
        due_ns, *words = message.words
        self.emulated.reach(due_ns / 1e9 if self.shares_clock else time.perf_counter())
        return replace(message, words=tuple(words))

    def has_arrived(self, seconds: float) -> bool:
        return self.receiver.has_arrived(seconds)


class LateConnector(Connector):
    """A connector of ranks whose messages arrive `delay_s` later, as if each had a host; with
    `emulated`, of stages that sleep."""

    def __init__(self, delay_s: float, emulated: EmulatedTime | None, *place: Any) -> None:
        """`place` as in `Connector`."""
        super().__init__(*place)
        launch = place[0]
        self.delay_s = delay_s
        self.emulated = emulated
        self.shares_clock = launch.local_world_size == launch.world_size

    @property
    def shares_memory(self) -> bool:
        return super().shares_memory and not self.delay_s

    def edge(
        self, sender: int, receiver: int, form: MessageForm, apart: str | None = None
    ) -> tuple[Sender | None, Receiver | None]:
        delay_s = 0.0 if sender == receiver else self.delay_s  # within a rank there is no link
        if self.emulated is not None:
            form = replace(form, num_words=form.num_words + 1)
        sends, receives = super().edge(sender, receiver, form, apart)
        if sends is not None and (delay_s or self.emulated is not None):
            sends = LateSender(sends, delay_s, self.emulated)
        if receives is not None and self.emulated is not None:
            receives = DueReceiver(receives, self.emulated, self.shares_clock)
        return sends, receives
