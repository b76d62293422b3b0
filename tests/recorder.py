"""A stand-in for CUDA graphs on a CPU. It records the operators that a piece of work runs with
their arguments, and runs them again on the same tensors, without the Python code around them.

As in a graph, values that the work took from the host are frozen. What a graph refuses is refused
here: reading a value back, and copying from the host. As with a graph, the tensors that the work
reads are not kept alive, and a result is overwritten by the next replay.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from nested import map_tensors, tensors_in
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
REFUSED = {
    # The host waits for their result or for its size. `tolist` calls `resolve_neg`.
    aten.item,
    aten._local_scalar_dense,
    aten.resolve_neg,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.equal,
    aten.is_nonzero,
    # `torch.tensor` calls it, and so does indexing by a list.
    aten.lift_fresh,
}
REFUSED_FORMS = {aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
SPOILT = -(1 << 62)  # no possible token, length or count
INDEXING = {aten.index, aten.index_put, aten.index_put_}


class HostTouched(RuntimeError):
    """The work reads from the device or copies to it."""


@dataclass(frozen=True)
class Made:
    """Stands in recorded arguments for a tensor that an earlier operator made."""

    number: int


class RecordedCall:
    """A recorded operator. Where its arguments have tensors is found once, because searching nested
    arguments takes longer than most operators."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: list[Any]) -> None:
        """The arguments and the tensors of the result, with `Made` or weak references in the places
        of tensors."""
        self.func = func
        self.places: list[tuple[Any, Any, Any]] = []  # (list or dict, index or key, reference)
        self.args = self._open(args)
        self.kwargs = self._open(kwargs)
        self.results = [
            (index, result.number) for index, result in enumerate(out) if isinstance(result, Made)
        ]

    def _open(self, value: Any) -> Any:
        """A copy of nested arguments, into which the tensors of a replay can be written."""
        if not isinstance(value, (list, tuple, dict)):
            return value
        keys = list(value) if isinstance(value, dict) else range(len(value))
        opened: Any = {key: self._open(value[key]) for key in keys}
        if not isinstance(value, dict):
            opened = list(opened.values())
        self.places += [
            (opened, key, opened[key])
            for key in keys
            if isinstance(opened[key], (Made, weakref.ref))
        ]
        return opened

    def run(self, made: list[Any]) -> None:
        """Run the operator on the present tensors. Adds its results to `made`."""
        for holder, key, reference in self.places:
            holder[key] = current(reference, made)
        out = self.func(*self.args, **self.kwargs)
        for holder, key, _ in self.places:
            holder[key] = None  # keeps no tensor alive
        tensors = tensors_in(out)
        if self.func.namespace == "c10d":
            Work.unbox(out[-1] if isinstance(out, tuple) else out).wait()
        for index, number in self.results:
            made[number] = tensors[index]


def current(value: Any, made: list[Any]) -> Any:
    """The tensor that a reference stands for now; other values as they are."""
    if isinstance(value, Made):
        return made[value.number]
    if isinstance(value, weakref.ref):
        value = value()
        assert value is not None, "a tensor that the work reads is gone"
    return value


class _Keep(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.made: dict[int, Made] = {}  # by the id of a tensor in `alive`
        self.alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        if packet in REFUSED or func in REFUSED_FORMS:
            raise HostTouched(str(func))
        if packet in INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise HostTouched(f"{func} by a mask")
        out = func(*args, **(kwargs or {}))
        given = map_tensors(self.refer, (args, kwargs or {}))
        results = tensors_in(out)
        read = tensors_in((args, kwargs))
        for tensor in results:
            is_new = id(tensor) not in self.made
            if is_new and all(tensor is not other for other in read):
                self.made[id(tensor)] = Made(len(self.alive))
                self.alive.append(tensor)
        self.calls.append(RecordedCall(func, *given, [self.refer(tensor) for tensor in results]))
        return out

    def refer(self, tensor: Tensor) -> Made | weakref.ref[Tensor]:
        return self.made.get(id(tensor)) or weakref.ref(tensor)


class StandInRecorder:
    """`recorded` is the number of recorded pieces of work, `replayed` the number of replays."""

    captures = True

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._result: Tensor | None = None  # of the last replay

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with _Keep() as kept:
            result = kept.refer(work())
        calls = kept.calls
        num_made = len(kept.alive)
        self.recorded = self.recorded + 1
        del kept

        @torch.inference_mode()
        def replay() -> Tensor:
            self.replayed += 1
            if self._result is not None:
                self._result.fill_(SPOILT)
            made: list[Any] = [None] * num_made
            for call in calls:
                call.run(made)
            found = current(result, made)
            assert isinstance(found, Tensor)
            self._result = found.clone() if isinstance(result, Made) else None
            return found if self._result is None else self._result

        return replay
