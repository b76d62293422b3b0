"""The start and end of commands: on this rank or on those of `--nproc`, with errors in one line and
an exit code.

Exit codes: 0 when the run is done and correct; 1 when outputs diverged, a rate regressed or the run
failed; 2 when the user can correct the error; 130 when interrupted, and 143 at SIGTERM
(`commands.py`). Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from magicdec.cli.parsing.parser import ParsedValues, Parser
from magicdec.config.choices.choice import How
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import OutputSection
from magicdec.distributed.groups import Launch, read_launch
from magicdec.distributed.ranks import (
    INTERRUPTED,
    LAUNCHER,
    is_other_start,
    package_command,
    start_ranks,
)
from magicdec.distributed.watching.processes import report_error
from magicdec.distributed.watching.watch import naming_lost, stop_watching, watch_ranks
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.names import WITHOUT_BUDGET
from magicdec.output.console import printable, spinner
from magicdec.output.writing import check_record_file, check_writable
from magicdec.runner.request import NotFinite

if TYPE_CHECKING:
    from magicdec.setup.prepare import Prepared

LEADER_FIRST_S = 20.0
# exit codes
FAILED = 1
WRONG = 2
# What `--help` shows; `--help_all` shows the rest.
EVERYDAY = (
    "--model",
    "--target",
    "--draft",
    "--budget",
    "--kv_policy",
    "--gamma",
    "--dataset",
    "--B",
    "--prefix_len",
    "--gen_len",
    "--temperature",
    "--nproc",
    "--out",
    "--config",
)


def sections_of(config: RunConfig) -> dict[str, Any]:
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: section for name, section in sections.items() if section is not None}


def config_of(values: ParsedValues, base: RunConfig) -> RunConfig:
    names = [field.name for field in dataclasses.fields(base) if field.name in values.sections]
    return dataclasses.replace(base, **{name: values.sections[name] for name in names})


class RankCommand(Protocol):
    """A command line that was read, for ranks that measure together."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def kept(self) -> str:
        """What Ctrl-C leaves."""

    def check_ranks(self, config: RunConfig, nproc: int) -> None:
        """Raises ValueError for a number of ranks that the models cannot have."""

    def preparation(self) -> Callable[[RunConfig, Launch], Any]:
        """What prepares the command. Imports it, which takes long."""

    def announce(self, prepared: Any) -> None:
        """Says, before anything is measured, what was chosen and what to know."""

    def conclude(self, prepared: Any) -> int:
        """Measures and reports. Returns the exit code."""


def measure_on_ranks(command: RankCommand, words: Sequence[str], launch: Launch) -> int:
    """Runs a command on this rank, or on the ranks of `--nproc` that it starts. Returns its exit
    code. Raises ValueError, one line naming the flag, for errors of the user."""
    config = with_local_models(command.config)
    nproc = config.parallel.nproc
    run_on_ranks(nproc, words, launch, partial(command.check_ranks, config), command.kept)
    watch_ranks(launch)
    with spinner(preparing(config), launch.rank == 0):
        with ended_at_once(launch):
            prepare = command.preparation()
        prepared = prepare(config, launch)
    if launch.rank == 0:
        command.announce(prepared)
    return command.conclude(prepared)


def start(read: Callable[[Sequence[str], Launch], RankCommand]) -> NoReturn:
    """Runs the command that `read` makes of the command line."""

    def measure(words: Sequence[str], launch: Launch) -> int:
        with ended_at_once(launch):
            command = read(words, launch)
        return measure_on_ranks(command, words, launch)

    run_ranks(measure)


def preparing(config: RunConfig) -> str:
    return f"preparing {config.model.model} and prompts of {Path(config.workload.dataset).name}"


def run_ranks(run: Callable[[Sequence[str], Launch], int]) -> NoReturn:
    """Runs a command on this rank: `run` gets the words of the command line and returns the exit
    code. If a rank ends while others need it, these name it."""
    launch = read_launch()
    try:
        with naming_lost(launch):
            code = run(sys.argv[1:], launch)
    except ValueError as error:
        refuse(error, launch)
    except NotFinite as error:
        refuse(error, launch, FAILED)
    except KeyboardInterrupt:
        code = say_interrupted(launch, NO_RECORD)
    sys.exit(code)


NO_RECORD = "no record was written"


def say_interrupted(launch: Launch, kept: str) -> int:
    """Says on the leading rank what is kept after Ctrl-C, unless the launcher of `--nproc` does.
    Returns the exit code."""
    stop_watching()  # a thread that still runs at the end of Python may abort it
    if launch.rank == 0 and os.environ.get(LAUNCHER, str(os.getpid())) == str(os.getpid()):
        print(f"interrupted; {kept}", file=sys.stderr, flush=True)
    return INTERRUPTED


@contextmanager
def ended_at_once(launch: Launch) -> Iterator[None]:
    """Lets Ctrl-C end the process in its handler during imports: some libraries swallow the
    exception, and go on without a part of themselves."""

    def end(*_: object) -> NoReturn:
        os._exit(say_interrupted(launch, NO_RECORD))

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_on_ranks(
    nproc: int | None,
    words: Sequence[str],
    launch: Launch,
    check: Callable[[int], None] | None = None,
    kept: str = NO_RECORD,
) -> None:
    """Starts this command as the ranks of `--nproc`, unless they run, and exits with their exit
    code. `kept` says what Ctrl-C leaves. `check` refuses a number of ranks by raising
    ValueError."""
    if not is_other_start(nproc, launch):
        return
    name = sys.argv[0]
    is_console = name.startswith("magicdec ")
    program = [*package_command(), *name.split()[1:]] if is_console else [sys.executable, name]
    assert nproc is not None, "it was asked for"
    if check is not None:
        check(nproc)
    code = start_ranks(nproc, [*program, *words])
    sys.exit(say_interrupted(launch, kept) if code == INTERRUPTED else code)


def check_outputs(output: OutputSection) -> None:
    check_record_file("--out", Path(output.results))
    if output.save_tokens is not None:
        check_writable("--save_tokens", Path(output.save_tokens))


def announce_run(
    prepared: Prepared, drafting: Prepared | None, prompt_len: int, output_len: int
) -> None:
    """Says what to know of a run: slower choices, limits that are none where something is
    `drafting`, for prompts and outputs of these lengths at most, checkpoints that were never
    compared, and words of a template."""
    announce_backend(prepared.config)
    if drafting is not None:
        announce_limits(drafting.config, prompt_len, output_len)
    announce_unchecked(drafting or prepared)
    announce_plain_words(prepared)


def announce_backend(config: ResolvedConfig) -> None:
    """Says where `auto` had to take a slower choice, and where kernels run in Triton's
    interpreter."""
    chosen = [
        ("--attention", config.attention.backend),
        ("--elementwise", config.model.elementwise),
        ("--native_steps", config.model.native_steps),
    ]
    if (collectives := config.parallel.collectives) is not None:
        chosen.append((f"--collectives {collectives}:", collectives))
    if config.draft is not None:
        chosen.append(("draft: --native_steps", config.draft.native_steps))
    for flag, choice in chosen:
        if choice.how is How.SECOND_BEST:
            print(f"{flag} {choice.why}", file=sys.stderr, flush=True)
        if choice.how is How.INTERPRETED:
            print(f"{flag} {choice}: {choice.why}", file=sys.stderr, flush=True)


def announce_limits(config: ResolvedConfig, prompt_len: int, output_len: int) -> None:
    """Says where a limit of drafts is none for prompts and outputs of these lengths at most."""
    decoding = config.decoding
    if decoding.model_drafter is None:
        return
    lines = []
    if config.kv.policy not in WITHOUT_BUDGET and config.kv.budget >= prompt_len:
        lines.append(
            f"--budget {config.kv.budget} is not smaller than the prompts of {prompt_len} tokens, "
            "so that drafts read all of them"
        )
    if isinstance(decoding.gamma, int) and decoding.gamma > output_len and not decoding.looks_up:
        lines.append(
            f"--gamma {decoding.gamma} is larger than the output of {output_len} tokens, so that "
            "the last drafts of every step are for nothing"
        )
    num_chosen = config.kv.budget - config.kv.window_size
    if config.kv.chooses_once and output_len > num_chosen:
        lines.append(
            f"--kv_policy {config.kv.policy} chooses once, and after {num_chosen} of the "
            f"{output_len} output tokens newer ones have replaced all that it chose; "
            "--reselect_every chooses again"
        )
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def announce_unchecked(prepared: Prepared) -> None:
    """Says once that a checkpoint was never compared with another implementation, and always that
    one differs."""
    from magicdec.model.checkpoint.checked import DIFFERS, TOLD, is_exempt, outcome_of, remember

    sources = {prepared.config.model.model: prepared.source}
    draft = prepared.config.draft
    if draft is not None and prepared.draft_source is not None:
        sources.setdefault(draft.model, prepared.draft_source)  # a head may be in the same one
    for name, source in sources.items():
        outcome = None if is_exempt(source) else outcome_of(source)
        if outcome == DIFFERS:
            line = f"{name} differs from transformers: magicdec model check {name}"
        elif outcome is None and not is_exempt(source):
            line = f"{name} was never compared with transformers: magicdec model check {name}"
            remember(source, TOLD)
        else:
            continue
        print(line, file=sys.stderr, flush=True)


def announce_plain_words(prepared: Prepared) -> None:
    """Says which words of a chat template look like special tokens and are none."""
    if prepared.plain_words:
        line = (
            f"--prompt_format chat: {', '.join(prepared.plain_words)} of the template are no "
            f"tokens of {prepared.tokenizer.path.name}, and stand in prompts as plain text"
        )
        print(line, file=sys.stderr, flush=True)


class LoneCommand:
    """A command that runs on this rank alone. `run` returns the exit code; its ValueError is a
    refusal in one line. `kept` says what Ctrl-C leaves, unless the KeyboardInterrupt does. `Parser`
    explains the other arguments."""

    def __init__(
        self,
        run: Callable[[ParsedValues], int],
        description: str,
        sections: Mapping[str, Any],
        kept: str = "nothing was written",
        **options: Any,
    ) -> None:
        self.run = run
        self.kept = kept
        self.build_parser = partial(Parser, description, sections, **options)

    def __call__(self) -> NoReturn:
        try:
            code = self.run(self.build_parser().read(sys.argv[1:]))
        except ValueError as error:
            refuse(error, Launch())
        except NotFinite as error:
            refuse(error, Launch(), FAILED)
        except KeyboardInterrupt as error:
            code = say_interrupted(Launch(), str(error) or self.kept)
        sys.exit(code)


def refuse(error: ValueError | NotFinite, launch: Launch, code: int = WRONG) -> NoReturn:
    """Prints the reason once, on rank 0, and exits. Under torchrun the line is left to torchrun,
    which prints it at the end. Other ranks wait to be ended; one that is not ended was the only one
    to refuse (its host lacks a file, say), and reports its line itself."""
    stop_watching()
    if launch.rank != 0:
        time.sleep(LEADER_FIRST_S)
    line = f"{Path(sys.argv[0]).name}: {printable(' '.join(str(error).split()))}"
    if not report_error(line):
        print(line, file=sys.stderr, flush=True)
    sys.exit(code)
