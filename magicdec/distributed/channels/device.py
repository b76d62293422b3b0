"""Channels for payloads on a GPU: copied through pinned memory of the host, or sent apart from
their header, from GPU to GPU.

Both are made of a channel between hosts. Must not know what a message is for. On a CPU there is
nothing to copy, and the same code sends the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.distributed.channels.message import Message, MessageForm, Receiver, Sender
from magicdec.distributed.channels.tensors import TensorReceiver, TensorSender

SHAPE_WORDS = 2  # of a header whose payload goes apart: its rows and tokens


@dataclass(frozen=True)
class DevicePayloads:
    """Payloads that go from device to device, apart from their headers, by process groups of that
    backend. `device` is this rank's."""

    device: torch.device
    backend: str

    def header_form(self, form: MessageForm) -> MessageForm:
        """The form of a channel for messages with the words of `form`."""
        return replace(form, max_words=form.max_words + SHAPE_WORDS)


@dataclass(frozen=True)
class HostCopySender:
    sender: Sender

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes

    def send(self, message: Message) -> None:
        if message.payload is not None:
            message = replace(message, payload=to_host(message.payload))
        self.sender.send(message)

    def close(self) -> None:
        self.sender.close()


@dataclass(frozen=True)
class HostCopyReceiver:
    receiver: Receiver
    device: torch.device

    def receive(self) -> Message:
        message = self.receiver.receive()
        if message.payload is None:
            return message
        return replace(message, payload=to_device(message.payload, self.device))


@dataclass(frozen=True)
class SplitSender:
    """`sender` sends headers, whose first words are the shape of the payload, and `tensors` the
    payloads. A message without one sends its header alone."""

    sender: Sender
    tensors: TensorSender

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes + self.tensors.num_bytes

    def send(self, message: Message) -> None:
        payload = message.payload
        rows, tokens = (0, 0) if payload is None else payload.shape[:2]
        self.sender.send(replace(message, words=(rows, tokens, *message.words), payload=None))
        if payload is not None:
            self.tensors.send(payload)

    def close(self) -> None:
        self.sender.close()
        self.tensors.close()


@dataclass(frozen=True)
class SplitReceiver:
    receiver: Receiver
    tensors: TensorReceiver
    width: int

    def receive(self) -> Message:
        header = self.receiver.receive()
        rows, tokens, *words = header.words
        payload = self.tensors.receive((rows, tokens, self.width)) if rows * tokens else None
        return replace(header, words=tuple(words), payload=payload)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host. Waits for the work on the tensor's stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, which is complete for all later work on its stream; a tensor that is on
    such a device is returned as it is."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
