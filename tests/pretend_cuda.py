"""A GPU that is not there: tensors that say they are on `cuda:0` and hold real values, which the
CPU computes. So the host takes the way of a real run, and what a GPU refuses or waits for is seen:
an operator over tensors of both devices is refused, and all that makes the host wait for the device
is noted, with the function of the package that asked for it.

It is stricter than CUDA, which takes a CPU tensor as an index and one without dimensions as a
number: the former waits for a copy, and neither should be in a step. A real GPU computes other
bits, has less memory, and runs beside the host; nothing of that is seen here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nested import map_tensors, tensors_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import magicdec

DEVICE = torch.device("cuda", 0)
BELOW = torch.device("meta")  # what torch's C++ sees: a build for CPUs has nothing for CUDA
PACKAGE = Path(next(iter(magicdec.__path__)))
aten = torch.ops.aten
# The host waits for their value or for the size of their result.
READS = {
    aten.item,
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.allclose,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
}
SIZED_BY_VALUES = {aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
PINS = {aten.pin_memory, aten._pin_memory}
COPIES = {*PINS, aten._to_copy, aten.to, aten.copy_}


class MixedDevices(RuntimeError):
    """An operator over tensors of both devices."""


class OnDevice(Tensor):
    """`values` has its values."""

    values: Tensor  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        with torch.inference_mode(False):  # views of a tensor from outside are no inference tensors
            return Tensor._make_wrapper_subclass(
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=BELOW,
            )

    def __init__(self, values: Tensor) -> None:
        self.values = values  # type: ignore[method-assign]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:  # torch refuses it for subclasses
        note("tolist")
        return self.values.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.values})"


class Factories(TorchDispatchMode):
    """Makes those tensors of the device that are made from none. Each thread needs its own."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard against that takes as long as an operator."""
        return False

    def __enter__(self) -> Any:
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` copies what it made on the CPU
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self.before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator over the values of its tensors, on the device if they are there."""
    tensors = tensors_in(args)
    if kwargs:
        tensors += tensors_in(kwargs)
    ours = [t for t in tensors if isinstance(t, OnDevice)]
    packet = func.overloadpacket
    device = kwargs.get("device")
    if not ours and not kwargs and packet not in COPIES:
        return func(*args)
    if packet in PINS:
        return pinned(args[0].clone())
    if packet in (aten._to_copy, aten.to):
        return copied(func, args, kwargs)
    if packet is aten.copy_:
        return copied_into(*args, **kwargs)
    if is_ours(device):
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif not ours:
        is_pinned = bool(kwargs.get("pin_memory"))
        out = func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
        return pinned(out) if is_pinned else out
    if len(ours) < len(tensors) and ours and packet is not aten.fill_:
        shapes = [tuple(t.shape) for t in tensors if not isinstance(t, OnDevice)]
        raise MixedDevices(f"{func} over the device and CPU tensors of shapes {shapes}")
    is_mask = packet in INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1])
    if packet in READS or func in SIZED_BY_VALUES or is_mask:
        note(packet.__name__)
    given = map_tensors(values_of, args)
    named = map_tensors(values_of, kwargs) if kwargs else kwargs
    return wrapped(func(*given, **named), ours)


def wrapped(out: Any, given: list[OnDevice]) -> Any:
    """The results on the device; those that an operator wrote into are the tensors given to it."""
    owners = {id(t.values): t for t in given}
    for tensor in given:
        assert tensor.shape == tensor.values.shape, "no operator changes a shape in place"

    def wrap(value: Tensor) -> Tensor:
        return owners[id(value)] if id(value) in owners else OnDevice(value)

    return map_tensors(wrap, out)


def values_of(value: Any) -> Any:
    return value.values if isinstance(value, OnDevice) else value


def is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type in (DEVICE.type, BELOW.type)


def copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """`to` another dtype or device."""
    source, *others = args
    names = [arg.name for arg in func._schema.arguments]
    given = dict(zip(names[1:], others, strict=False)) | kwargs
    other = given.pop("other", None)
    device = given.get("device")
    dtype = given.get("dtype")
    if other is not None:
        device = other.device
        dtype = other.dtype
    to_ours = isinstance(source, OnDevice) if device is None else is_ours(device)
    values = values_of(source)
    target = values.to(dtype or values.dtype, copy=bool(given.get("copy")))
    if to_ours != isinstance(source, OnDevice):
        is_async = to_ours and is_pinned(source) and bool(given.get("non_blocking"))
        if not is_async:
            note("upload" if to_ours else "download")
        target = target.clone()
    elif target is values:
        return source  # type: ignore[no-any-return]
    return OnDevice(target) if to_ours else target


def copied_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, OnDevice) != isinstance(source, OnDevice):
        host = source if isinstance(target, OnDevice) else target
        if not (is_pinned(host) and non_blocking):
            note("upload" if host is source else "download")
    values_of(target).copy_(values_of(source))
    return target


def pinned(tensor: Tensor) -> Tensor:
    tensor.is_pretend_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return hasattr(tensor, "is_pretend_pinned")


def note(what: str) -> None:
    """Note that the innermost function of the package waits for the device."""
    frame = sys._getframe(1)
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        place = Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("")
        WAITS[f"{place}.{frame.f_code.co_name}: {what}"] += 1


WAITS: Counter[str] = Counter()


class Event:
    """Of a stream whose work is done when it is started."""

    def __init__(self, enable_timing: bool = False) -> None:
        """The time is always 0."""

    def record(self, stream: Any = None) -> None:
        """Nothing is running."""

    def synchronize(self) -> None:
        note("synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 0.0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Lets `cuda:0` be there. What has waited for it since, by function of the package."""
    WAITS.clear()
    stream = SimpleNamespace(synchronize=lambda: note("synchronize"))
    make = torch.tensor
    run = threading.Thread.run

    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> Tensor:
        made = make(data, **options)
        return pinned(made) if pin_memory else made

    def run_inside(thread: threading.Thread) -> None:
        with Factories():
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_inside)
    monkeypatch.setattr(torch, "tensor", tensor)
    for name, stand_in in {
        "_lazy_init": lambda: None,
        "set_device": lambda device: None,
        "Event": Event,
        "synchronize": lambda device=None: note("synchronize"),
        "current_stream": lambda device=None: stream,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with Factories():
        yield WAITS
