"""The settings of a run by the names of their flags, as tables sort, group and export them, and the
command that started it. Imports no torch and no pandas.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.environment import Environment, threads_of_ranks
from magicdec.records.record import RunRecord

Setting = str | int | float | bool | None


def _config(section: str, key: str) -> Callable[[RunRecord], Setting]:
    """Reads a value of the config; None where a record has no such section or key."""
    return lambda record: (record.config.get(section) or {}).get(key)


def _drafted(section: str, key: str) -> Callable[[RunRecord], Setting]:
    """Reads a setting of drafting, which the baseline does not have."""
    read = _config(section, key)
    return lambda record: None if is_baseline(record) else read(record)


def _policy(record: RunRecord) -> Setting:
    return None if is_baseline(record) else policy_of(record.config)


def _budget(record: RunRecord) -> Setting:
    policy, budget = _policy(record), record.config["kv"]["budget"]
    return None if policy in (None, FULL_KV_POLICY) else int(budget)


SETTINGS: dict[str, Callable[[RunRecord], Setting]] = {
    "model": _config("model", "model"),
    "dtype": _config("model", "dtype"),
    "target_dtype": _config("model", "target_dtype"),
    "draft_model": _config("draft", "model"),
    "draft_ranks": lambda r: len(_config("draft", "rank_group")(r) or ()) or None,  # type: ignore[arg-type]
    "draft_dtype": _config("draft", "draft_dtype"),
    "drafter": _drafted("decoding", "drafter"),
    "kv_policy": _policy,
    "budget": _budget,
    "gamma": lambda r: (
        _drafted("decoding", "tree")(r) or _drafted("decoding", "num_draft_tokens")(r)
    ),
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


def rank(value: Setting) -> tuple[bool, float, str]:
    """Orders numbers before text, and numbers by size."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


def is_baseline(record: RunRecord) -> bool:
    return bool(record.config["decoding"]["strategy"] == BASELINE)


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
