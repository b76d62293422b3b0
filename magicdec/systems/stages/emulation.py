"""Emulation: stages that sleep in place of computing, and links that deliver late, so that one host
stands for several. All else is real: messages, caches, admission and schedulers, and what they take
is a part of the measured times. `StagedSystem` plugs it in, and nothing else knows of it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from magicdec.config.run_config import RunConfig
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import (
    Loopback,
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
from magicdec.model.linear.packed import Reduce
from magicdec.model.transformer import BeforeLayer, KeepState, Transformer
from magicdec.output.console import Progress
from magicdec.setup.loading import LoadedModels
from magicdec.setup.model_plan import Kinds, StagePart

DIGITS = 3  # of a position in a hidden state
BASE = 256  # integers up to it are exact in bfloat16


class Sleeper:
    """Sleeps that take, in the mean, as long as was asked for: how late a process woke up shortens
    its next sleep, so that the lateness of many sleeps does not add up."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def sleep(self, seconds: float, begin_s: float | None = None) -> None:
        """Sleep until `seconds` after `begin_s`, which is now by default."""
        begin_s = time.perf_counter() if begin_s is None else begin_s
        due_s = begin_s + seconds - self.late_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        # What one sleep cannot make up for is a host without time, which the times shall show.
        self.late_s = min(seconds, max(0.0, time.perf_counter() - due_s))


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
    ) -> None:
        """`like` has the dtype and device of the missing weights."""
        nn.Module.__init__(self)
        self.set_part(config, shard, layers, has_ends)
        self.elementwise = Elementwise()
        self.seconds = seconds
        self.sleeper = Sleeper()
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
    ) -> Tensor:
        for layer in self.layers:
            before_layer(layer)
            self.sleeper.sleep(self.seconds / len(self.layers))
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

    def __init__(self, device: torch.device, progress: Progress, seconds: float) -> None:
        super().__init__(device, progress)
        self.seconds = seconds

    def get(
        self, source: ModelSource, group: Group, kinds: Kinds, part: StagePart = StagePart()
    ) -> Transformer:
        like = torch.zeros(1, dtype=getattr(torch, kinds.dtype), device=self.device)
        shard = Shard(group.index, group.size)
        ends = part.layers, part.has_ends
        return SleepingModel(source.config, shard, *ends, self.seconds, like).eval()


def without_weights(run_config: RunConfig) -> RunConfig:
    """`run_config` for models that sleep: native steps would read weights, and tokens that are
    numbers of positions end nothing."""
    asked = run_config.model
    decoding = replace(run_config.decoding, ignore_eos=True)
    return replace(run_config, model=replace(asked, native_steps="off"), decoding=decoding)


class LateSender(Sender):
    """A sender as over a link on which a message takes `delay_s` more. Its thread owns
    `sender`."""

    def __init__(self, sender: Sender, delay_s: float) -> None:
        self.sender = sender
        self.delay_s = delay_s
        self._sleeper = Sleeper()
        self._error = list[RuntimeError]()
        self._queue: Queue[tuple[float, Message]] = Queue()
        Thread(target=self._run, name="emulated link", daemon=True).start()

    @property
    def traffic(self) -> Traffic:
        return self.sender.traffic

    def send(self, message: Message) -> None:
        self._raise()
        payload = message.payload
        on_host = replace(message, payload=None if payload is None else to_host(payload))
        self._queue.put((time.perf_counter(), on_host))

    def close(self) -> None:
        self._queue.join()
        self._raise()
        self.sender.close()

    def _run(self) -> None:
        while True:
            sent_s, message = self._queue.get()
            self._sleeper.sleep(self.delay_s, sent_s)
            try:
                if not self._error:
                    self.sender.send(message)
            except RuntimeError as error:
                self._error.append(error)
            self._queue.task_done()

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]


class LateConnector(Connector):
    """A connector of ranks whose messages arrive `delay_s` later, as if each had a host."""

    def __init__(self, delay_s: float, *place: Any) -> None:
        """`place` as in `Connector`."""
        super().__init__(*place)
        self.delay_s = delay_s

    @property
    def shares_memory(self) -> bool:
        return False

    def edge(
        self, sender: int, receiver: int, form: MessageForm, apart: str | None = None
    ) -> tuple[Sender | None, Receiver | None]:
        sends, receives = super().edge(sender, receiver, form, apart)
        if sends is None or isinstance(sends, Loopback):  # within a rank there is no link
            return sends, receives
        return LateSender(sends, self.delay_s), receives
