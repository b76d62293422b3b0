"""A clock that only tests advance, and a device on it that computes while the host goes on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeClock:
    """What `time.perf_counter` reads."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Device:
    """A CPU, on which work is done when the call that starts it returns, or a stream of CUDA, whose
    work the host must wait for."""

    kind: str  # cpu or cuda
    clock: FakeClock = field(default_factory=FakeClock)
    done_s: float = 0.0  # when all that was launched is done

    def launch(self, seconds: float) -> None:
        """Start work that takes so long, behind all that was launched before."""
        self.done_s = max(self.done_s, self.clock.now) + seconds
        if self.kind == "cpu":
            self.wait()

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.done_s)


@dataclass
class FakeEvent:
    """Imitates torch.cuda.Event on the stream of `device`."""

    device: Device
    at_s: float = 0.0

    def record(self) -> None:
        self.at_s = max(self.device.clock.now, self.device.done_s)

    def synchronize(self) -> None:
        self.device.clock.now = max(self.device.clock.now, self.at_s)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.device.clock.now >= end.at_s, "the host has waited for it"
        return 1e3 * (end.at_s - self.at_s)


class VirtualClock:
    """Begins at 0. Each step takes `step_s` seconds, and waiting takes no time."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, at: float) -> None:
        self._now = max(self._now, at)

    def after_step(self) -> None:
        self._now += self.step_s
