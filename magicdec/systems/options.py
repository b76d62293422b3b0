"""ServeOptions: the load of `magicdec serve`, which every system serves, and the checks of it that
need no model. What only some systems need is in their declarations. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NoReturn

from magicdec.config.capacity import Capacity
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    NONE,
    DecodingSection,
    WorkloadSection,
)
from magicdec.config.setting import declared, same, setting
from magicdec.names import TRACES
from magicdec.systems.declaration import (
    WITH_DRAFT,
    Drafts,
    Ranks,
    SystemDeclaration,
    SystemSettings,
)
from magicdec.systems.modes import MODES, NAMES, Pass, parse_names
from magicdec.workload.request_shapes import (
    BURST,
    FORMS,
    PROCESSES,
    TRACE,
    Arrival,
    RequestShape,
    check_count,
    make_shapes,
    parse_arrival,
    parse_lengths,
    parse_process,
)
from magicdec.workload.traces.chat_texts import ChatTexts
from magicdec.workload.traces.replay import Replay
from magicdec.workload.traces.sessions import THINK, WAITS, parse_scale

GOODPUT_OF = ("ttft", "tpot", "e2el")  # what `--goodput` can bound
FLAGS = ("--prefix_len", "--gen_len")  # the lengths of a request without a trace


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Bounds in ms by metric, from words such as ttft:200. Raises ValueError."""
    bounds: dict[str, float] = {}
    for word in words:
        name, _, most = word.partition(":")
        if name not in GOODPUT_OF:
            forms = ", ".join(f"{name}:MS" for name in GOODPUT_OF)
            raise ValueError(f"{word} is not known; choose from {forms}")
        if name in bounds:
            raise ValueError(f"names {name} twice; name each bound once")
        try:
            bounds[name] = float(most)
        except ValueError:
            bounds[name] = 0.0
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"{word}: {most!r} is no time in ms larger than 0")
    return bounds


@dataclass(frozen=True)
class ServeOptions:
    """The load and its modes, and what `settle` derives: requests in the order of arrival, or
    conversations (`shapes`), the sessions of a trace (`replay`), `passes`, and the settings of each
    named system. `gen_len` is None if a trace has the lengths."""

    num_requests: int | None = setting(
        None,
        "Requests to serve; in `audit` those at each context. Default: 8, or all of a trace.",
        least=1,
    )
    prefix_len: str = same(WorkloadSection, "prefix_len", str(WorkloadSection.prefix_len))
    gen_len: str | None = same(WorkloadSection, "gen_len")
    modes: tuple[str, ...] | None = setting(
        None,
        "Ways to serve the requests that are compared: "
        f"{'; '.join(f'{name} ({mode.text})' for name, mode in MODES.items())}. With {WITH_DRAFT} "
        "behind its name, a mode that can do without a draft has one. The tokens of the first are "
        "the reference of the others. Default: all that these ranks can run.",
        metavar="MODE",
        choices=NAMES,
        parse=parse_names,
    )
    arrival: str = setting(
        "poisson:100",
        f"When requests arrive: {FORMS}. MS is the mean time between two arrivals. A line of a "
        f"{TRACE} is a JSON object with arrival_ms, prompt_len and output_len; the other files are "
        f"traces of sessions in the forms of {', '.join(TRACES)}, of which --num_requests counts "
        "sessions.",
        metavar="PROCESS",
        other_defaults="burst in recurrent and pipeline",
    )
    concurrency: tuple[int, ...] | None = setting(
        None,
        "A closed loop in place of --arrival: so many requests are in flight together, and another "
        "arrives when one of them ends. With several numbers each mode serves once with each of "
        "them. Requests wait where a mode has fewer rows or lanes. It counts conversations where "
        "there are some, and the sessions of a trace, of which --arrival then says no times.",
        metavar="N",
        least=1,
        is_set=True,
    )
    turns: int = setting(
        1,
        "Questions of a conversation that are asked at most, of prompt sets that have several: "
        "mt_bench, spec_bench, speed_bench, and sharegpt and messages, whose questions the model "
        "then answers all itself. A later one is a request that arrives when the answer before it "
        "has ended; its prompt is the conversation up to there, within --prefix_len. What counts "
        "requests then counts conversations, and --arrival says when they begin.",
        least=1,
    )
    think_ms: float = setting(
        0.0,
        "Time between an answer of a conversation of --turns and the next question.",
        metavar="MS",
        least=0,
    )
    scale: str = setting(
        "1",
        "Scale of a trace of sessions, such as 1/64: the tokens of its blocks, of what is beyond "
        "whole blocks and of its outputs, rounded, and all its times.",
        metavar="S",
    )
    waits: str = setting(
        THINK,
        "When a request of a trace follows on those that have to end before it: after the time "
        "that its user thinks or its tool takes, as the trace says; at its recorded start after "
        "the session's begin, if they have ended by then; or at once.",
        choices=WAITS,
    )
    longest_wait_s: float | None = setting(
        None,
        "The longest time that a request of a trace waits for its user or tool, before --scale. "
        "Default: as long as the trace says.",
        metavar="S",
        least=0,
    )
    session_starts: str | None = setting(
        None,
        f"When the sessions of a trace begin, in place of the times that it has: {PROCESSES}.",
        metavar="PROCESS",
    )
    repeats: int = setting(
        1,
        "Times that each run, or each forward, is measured, or that all requests are served in "
        "each mode; the modes take turns at going first.",
        least=1,
        other_defaults="20 in latency",
    )
    goodput: dict[str, float] | None = setting(
        None,
        "Count the requests a second that keep all of these bounds, such as ttft:500 tpot:50; of "
        f"{', '.join(GOODPUT_OF)}.",
        metavar="METRIC:MS",
        parse=parse_goodput,
    )
    emulate_acceptance: tuple[float, ...] | None = same(DecodingSection, "emulate_acceptance")
    shapes: tuple[RequestShape, ...] = ()
    replay: Replay | None = None
    passes: tuple[Pass, ...] = ()
    draft: str = NONE
    systems: Mapping[str, SystemSettings] = field(default_factory=dict)

    def settle(
        self,
        passes: Sequence[Pass],
        seed: int,
        settings: Mapping[str, SystemSettings] | None = None,
    ) -> ServeOptions:
        """The options for `passes`, with the requests and every default, also of the `settings` of
        systems, by name; those of others have their defaults.

        Raises ValueError for flags that exclude each other, and for a malformed trace.
        """
        is_closed = self.concurrency is not None
        arrival = parse_arrival(self.arrival)
        self._check_of_traces(arrival)
        replay = self._replay(arrival) if arrival.has_sessions else None
        if is_closed and replay is None:
            arrival = Arrival(BURST)
        if replay is None:
            shapes = make_shapes(arrival, self.num_requests, self.prefix_len, self.gen_len, seed)
        else:
            shapes = self._shapes_of(replay, seed)
        if self.most_in_flight > len(shapes):
            raise ValueError(
                f"--concurrency {self.most_in_flight} exceeds the {len(shapes)} requests, which "
                "are never so many in flight; choose a larger --num_requests"
            )
        has_lengths = arrival.trace is not None and not (replay and replay.lacks_lengths)
        settled = replace(
            self,
            arrival=BURST if is_closed and replay is None else self.arrival,
            gen_len=None if has_lengths else self.gen_len or str(DEFAULT_GEN_LEN),
            goodput=self.goodput or {},
            shapes=tuple(shapes),
            replay=replay,
            passes=tuple(passes),
        )
        given = settings or {}
        systems = {}
        for system in settled.named_systems:
            own = given.get(system.name, system.settings())
            systems[system.name] = own.settled(settled, settled.passes_of(system))
        return replace(settled, systems=systems)

    def _check_of_traces(self, arrival: Arrival) -> None:
        """Raises ValueError for a setting of conversations or of sessions where there are none."""
        kind: type = type(self)
        for name in ("scale", "waits", "longest_wait_s", "session_starts"):
            value = getattr(self, name)
            if not arrival.has_sessions and value != declared(kind)[name].default:
                raise ValueError(
                    f"--{name} {value}: --arrival {self.arrival} is no trace of sessions; give one "
                    f"such as {next(iter(TRACES))}:FILE, or leave it out"
                )
        if self.think_ms and self.turns == 1:
            raise ValueError(
                f"--think_ms {self.think_ms:g} does nothing without --turns; leave it out"
            )
        if self.turns > 1 and arrival.has_sessions:
            raise ValueError(
                f"--turns {self.turns}: the sessions of {arrival.process} have turns of their own; "
                "leave it out"
            )
        if self.longest_wait_s is not None and self.waits != THINK:
            raise ValueError(
                f"--longest_wait_s {self.longest_wait_s:g} bounds the times of --waits {THINK}; "
                "leave one out"
            )
        if self.session_starts is not None and self.concurrency is not None:
            raise ValueError(
                f"--session_starts {self.session_starts}: --concurrency says when sessions begin; "
                "leave one out"
            )

    def _replay(self, arrival: Arrival) -> Replay:
        assert arrival.trace is not None, "its sessions are in a file"
        replay = Replay.read(
            f"--arrival {arrival.process}",
            arrival.process,
            arrival.trace,
            self.num_requests,
            parse_scale(self.scale),
            self.waits,
            self.longest_wait_s,
        )
        check_count(self.num_requests, len(replay.sessions), arrival.trace)
        return replay

    def _shapes_of(self, replay: Replay, seed: int) -> list[RequestShape]:
        """The longest prompt and output of each session, at the times when sessions begin."""
        starts = self.session_starts
        if self.concurrency is not None:
            starts = BURST
        starts_ms = None
        if starts is not None:
            process = parse_process("--session_starts", starts)
            starts_ms = process.times_ms(len(replay.sessions), Random(f"arrival {seed}"))
        return replay.shapes(starts_ms)

    def with_texts(self, texts: ChatTexts, seed: int) -> ServeOptions:
        """The options with the tokens of the real texts of a trace. Raises ValueError as
        `ChatTexts.of`."""
        assert self.replay is not None, "it has the texts"
        low, high = parse_lengths("--gen_len", self.gen_len or str(DEFAULT_GEN_LEN))
        random = Random(f"output_len {seed}")
        replay = self.replay.with_texts(texts, lambda: random.randint(low, high))
        return replace(self, replay=replay, shapes=tuple(self._shapes_of(replay, seed)))

    @property
    def has_conversations(self) -> bool:
        """Whether requests follow on each other, each conversation with one of `shapes`."""
        return self.turns > 1 or self.replay is not None

    @property
    def most_turns(self) -> int:
        """The most requests of a conversation."""
        sessions = () if self.replay is None else self.replay.sessions
        return max((len(session.requests) for session in sessions), default=self.turns)

    @property
    def most_in_flight(self) -> int:
        """The largest concurrency of a closed loop; 0 of an open one."""
        return max(self.concurrency or (0,))

    @property
    def named_systems(self) -> list[SystemDeclaration]:
        """The systems that have passes."""
        return list(
            {serving_pass.system.name: serving_pass.system for serving_pass in self.passes}.values()
        )

    def passes_of(self, system: SystemDeclaration) -> list[Pass]:
        return [serving_pass for serving_pass in self.passes if serving_pass.system is system]

    def settings_of(self, serving_pass: Pass) -> SystemSettings:
        return self.systems[serving_pass.system.name]

    @property
    def is_coupled(self) -> bool:
        """Whether every mode samples tokens with noise that a drafter can share."""
        return any(serving_pass.declared.is_coupled for serving_pass in self.passes)

    @staticmethod
    def modes_on(ranks: Ranks) -> list[str]:
        """All modes in which such ranks compute."""
        return [name for name, mode in MODES.items() if mode.ranks is ranks]

    def emulates(self, serving_pass: Pass) -> bool:
        """Whether ranks sleep in a pass in place of computing."""
        return self.settings_of(serving_pass).emulates

    def accepts_by_chance(self, serving_pass: Pass) -> bool:
        """Whether chance judges the drafts of a pass, so that its tokens mean nothing."""
        return self.emulate_acceptance is not None and serving_pass.drafts_in_turns

    @property
    def longest_prompt(self) -> int:
        return max(shape.prompt_len for shape in self.shapes)

    @property
    def longest(self) -> int:
        return max(shape.prompt_len + shape.output_len for shape in self.shapes)

    @property
    def mean_context(self) -> int:
        """Cached tokens of a request halfway through its output, averaged over requests."""
        total = sum(shape.prompt_len + shape.output_len // 2 for shape in self.shapes)
        return total // len(self.shapes)

    def capacity(self, rows: int) -> Capacity:
        """What a system must hold that serves `rows` requests together."""
        new_tokens = max(shape.output_len for shape in self.shapes)
        return Capacity(rows, self.longest_prompt, self.longest, new_tokens, self.turns)

    @property
    def counted_by(self) -> str:
        if self.shapes[0].place:
            return (
                f"--arrival {self.arrival}, whose longest prompt has {self.longest_prompt} tokens"
            )
        return "--num_requests"

    def check_lengths(self, most: int, model: str) -> None:
        """Raises ValueError, naming the line of the trace or the flags, for a request longer than
        the `most` tokens of the model."""
        if self.replay is not None:
            return self.replay.check_lengths(most, model)
        for shape in self.shapes:
            total = shape.prompt_len + shape.output_len
            if total > most:
                names = ("prompt_len", "output_len") if shape.place else FLAGS
                text = f"{names[0]} {shape.prompt_len} + {names[1]} {shape.output_len} = {total}"
                place = f"{shape.place}: " if shape.place else ""
                raise ValueError(f"{place}{text} exceeds the {most} positions of {model}")

    def describe(self, serving_pass: Pass | None = None) -> dict[str, Any]:
        """The load as it is recorded, with the settings of the system of a pass."""
        kind: type = type(self)
        values = {name: getattr(self, name) for name in declared(kind)}
        values |= {"draft": self.draft, "num_requests": len(self.shapes)}
        if self.gen_len is None or self.replay is not None:  # a trace has the lengths
            values["prefix_len"] = None
        values["modes"] = list(dict.fromkeys(serving_pass.name for serving_pass in self.passes))
        if serving_pass is not None:
            values |= self.settings_of(serving_pass).describe()
        return values

    def check(self, config: RunConfig, world_size: int) -> None:
        """Raises ValueError, naming mode, flag and reason, if a mode cannot serve the settled
        options with any model."""
        self._check_drafts()
        if self.turns > 1 and self.emulate_acceptance is not None:
            self.refuse_turns("emulate_acceptance", "accepts drafts by chance")
        for system in self.named_systems:
            settings = self.systems[system.name]
            settings.check(self, self.passes_of(system), config, world_size)
        self._check_chance()

    def _check_drafts(self) -> None:
        """Raises ValueError if a pass has nothing that drafts, or a draft has no pass."""
        for serving_pass in self.passes:
            has_script = self.emulate_acceptance is not None and serving_pass.drafts_ahead
            if serving_pass.is_drafting and self.draft == NONE and not has_script:
                raise ValueError(f"--modes {serving_pass.name} drafts; say by --draft what drafts")
        if self.draft != NONE and not any(serving_pass.is_drafting for serving_pass in self.passes):
            names = " ".join(dict.fromkeys(serving_pass.name for serving_pass in self.passes))
            may_draft = [
                serving_pass
                for serving_pass in self.passes
                if serving_pass.declared.drafts is Drafts.MAYBE
            ]
            others = [name for name, mode in MODES.items() if mode.is_draft_default]
            chosen = next((serving_pass.name for serving_pass in may_draft), others[0])
            raise ValueError(
                f"--draft {self.draft} does nothing: no mode of --modes {names} drafts; add one, "
                f"such as {chosen}{WITH_DRAFT}"
            )

    def _check_chance(self) -> None:
        """Raises ValueError if tokens that follow from chance are the reference of others."""
        first = self.passes[0]
        if self.accepts_by_chance(first) and len(self.passes) > 1:
            raise ValueError(
                f"{self.acceptance_flag}: the tokens of --modes {first.name}, which mean nothing, "
                "would be the reference of the others; name a mode without drafts first"
            )

    def refuse_turns(self, name: str, reason: str) -> NoReturn:
        """Raises ValueError for a flag with which the answers of a conversation mean nothing."""
        raise ValueError(
            f"--turns {self.turns}: a conversation goes on with its answers, but --{name} {reason}"
            "; leave one out"
        )

    @property
    def acceptance_flag(self) -> str:
        """`--emulate_acceptance` with its values, for messages."""
        return f"--emulate_acceptance {' '.join(f'{r:g}' for r in self.emulate_acceptance or ())}"


def with_values(settings: SystemSettings, values: Mapping[str, Any]) -> SystemSettings:
    """The settings with those of the values that they declare."""
    kind: type = type(settings)
    own = {name: value for name, value in values.items() if name in declared(kind)}
    return replace(settings, **own)
