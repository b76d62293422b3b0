"""Point: what a report keeps of one record, which is all but its samples: the settings by the names
of their flags, as tables sort, group and export them, the command that started the run, and the
metrics. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.environment import Environment, threads_of_ranks
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import SamplesRecord
from magicdec.records.table import method

Setting = str | int | float | bool | None


def _config(section: str, key: str) -> Callable[[RunRecord], Setting]:
    def read(record: RunRecord) -> Setting:
        found: Setting = (record.config.get(section) or {}).get(key)
        return found

    return read


def _drafted(section: str, key: str) -> Callable[[RunRecord], Setting]:
    """A setting of drafting, which the baseline does not read."""
    read = _config(section, key)
    return lambda record: None if is_baseline(record) else read(record)


_tree, _num_draft_tokens = (_drafted("decoding", key) for key in ("tree", "num_draft_tokens"))


def _read_policy(record: RunRecord) -> Setting:
    """The KV policy, if a model drafts."""
    if is_baseline(record) or not reads_kv(record):
        return None
    policy: Setting = record.config["kv"]["policy"]
    return policy


def _budget(record: RunRecord) -> Setting:
    policy, budget = _read_policy(record), record.config["kv"]["budget"]
    return None if policy in (None, FULL_KV_POLICY) else int(budget)


def _draft_ranks(record: RunRecord) -> Setting:
    ranks = (record.config.get("draft") or {}).get("rank_group")
    return None if ranks is None else len(ranks)


SETTINGS: dict[str, Callable[[RunRecord], Setting]] = {
    "model": _config("model", "model"),
    "dtype": _config("model", "dtype"),
    "target_dtype": _config("model", "target_dtype"),
    "draft_model": lambda r: (r.config.get("draft") or {}).get("model"),
    "draft_ranks": _draft_ranks,
    "draft_dtype": lambda r: (r.config.get("draft") or {}).get("draft_dtype"),
    "drafter": _drafted("decoding", "drafter"),
    "kv_policy": _read_policy,
    "budget": _budget,
    "gamma": lambda r: _tree(r) or _num_draft_tokens(r),
    "B": _config("workload", "batch_size"),
    "prefix_len": _config("workload", "prefix_len"),
    "gen_len": _config("workload", "gen_len"),
    "dataset": lambda r: None if r.workload is None else r.workload.dataset,
    "ranks": lambda r: r.environment.world_size,
    "threads": lambda r: threads_of_ranks(r.config, r.environment),
    "device": lambda r: r.environment.gpu or r.environment.cpu or r.config["parallel"]["device"],
    "attention": _config("attention", "backend"),
    "temperature": _config("sampling", "temperature"),
    "seed": _config("workload", "seed"),
    "status": lambda r: r.status,
}


def settings(record: RunRecord) -> dict[str, Setting]:
    """The settings of a run by the names of their flags; None where they mean nothing."""
    return {name: read(record) for name, read in SETTINGS.items()}


def is_baseline(record: RunRecord) -> bool:
    return bool(record.config["decoding"]["strategy"] == BASELINE)


def reads_kv(record: RunRecord) -> bool:
    """Whether a model drafted. Prompt lookup reads no cache, whatever policy the run names."""
    return record.config["decoding"]["drafter"] != "ngram"


def metric(metrics: Metrics | None, name: str) -> float | None:
    """A metric that is a number; None where the record has none."""
    value = None if metrics is None else getattr(metrics, name)
    assert value is None or isinstance(value, int | float), name
    return value


LAUNCHER = "torchrun --standalone --nproc_per_node={}"


def command_of(environment: Environment) -> str:
    """The command that starts the run again from the root of the repository. A record has the name
    of the program without its folder. Several ranks of a run that did not start them itself
    (`--nproc`) are given to torchrun on one host."""
    program, *flags = environment.argv or ("?",)
    is_script = program.endswith(".py")
    words = shlex.split(program) if not is_script else [f"tests/{program}"]
    starts_ranks = any(flag.partition("=")[0] == "--nproc" for flag in flags)
    if environment.world_size > 1 and not starts_ranks:
        launcher = LAUNCHER.format(environment.world_size)
        command = f"{launcher} {'' if is_script else '--no-python '}{shlex.join(words)}"
    else:
        command = f"{'python ' if is_script else ''}{shlex.join(words)}"
    return f"{command} {shlex.join(flags)}".rstrip()


@dataclass(frozen=True)
class Point:
    """One run. `number` counts the runs of a report from 1."""

    number: int
    source: str  # the file that holds the record
    status: str
    error: str | None
    settings: dict[str, Setting]
    method: str  # how it decoded, in a few words
    command: str
    environment: Environment
    metrics: Metrics | None
    baseline: Metrics | None  # of the autoregressive pass of the same run
    ttft_ms: tuple[float, ...]  # of each sequence, over all batches
    tpot_ms: dict[str, tuple[float, ...]]  # of each sequence that decoded a token, by pass

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE

    @property
    def autoregressive(self) -> Metrics | None:
        """The metrics of autoregressive decoding, whether it is the run or in the run."""
        return self.metrics if self.is_baseline else self.baseline


def make_point(number: int, source: str, record: RunRecord) -> Point:
    prefill, samples = record.prefill_samples, record.samples or {}
    is_kept = record.passed  # the times of a run that diverged are no result
    return Point(
        number=number,
        source=source,
        status=record.status,
        error=record.error,
        settings=settings(record),
        method=method(record),
        command=command_of(record.environment),
        environment=record.environment,
        metrics=record.metrics,
        baseline=record.baseline_metrics,
        ttft_ms=tuple(chain.from_iterable(prefill.ttft_ms)) if prefill and is_kept else (),
        tpot_ms={name: _tpots(s) for name, s in samples.items()} if is_kept else {},
    )


def _tpots(samples: SamplesRecord) -> tuple[float, ...]:
    """TPOT of each sequence that decoded a token after its first, in ms."""
    times = chain.from_iterable(samples.sequence_ms or ())
    tokens = chain.from_iterable(samples.sequence_tokens or ())
    return tuple(ms / count for ms, count in zip(times, tokens, strict=True) if count)
