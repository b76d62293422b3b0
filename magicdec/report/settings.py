"""The settings of a run by the names of their flags, as tables sort, group and export them, and the
command that started it. Imports no torch and no pandas.
"""

from __future__ import annotations

import shlex

from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.environment import Environment
from magicdec.records.record import RunRecord

Setting = str | int | float | bool | None


SETTINGS = (
    *("model", "dtype", "target_dtype", "draft_model", "draft_ranks", "draft_dtype", "drafter"),
    "draft_weights",
    *("kv_policy", "budget", "gamma", "pa", "B", "prefix_len", "gen_len", "dataset", "ranks"),
    *("threads", "device", "attention", "temperature", "seed", "status"),
)


def settings(record: RunRecord) -> dict[str, Setting]:
    """The settings of a run, which `SETTINGS` names in order, by the names of their flags; None
    where they mean nothing."""
    config, environment = record.config, record.environment
    model, workload, decoding = (config[name] for name in ("model", "workload", "decoding"))
    draft, drafts = config.get("draft") or {}, not is_baseline(record)
    policy = policy_of(config) if drafts else None
    return {
        "model": model["model"],
        "dtype": model["dtype"],
        "target_dtype": model["target_dtype"],
        "draft_model": draft.get("model"),
        "draft_ranks": len(draft.get("rank_group") or ()) or None,
        "draft_dtype": draft.get("draft_dtype"),
        "drafter": decoding["drafter"] if drafts else None,
        "draft_weights": decoding.get("draft_weights") if drafts else None,
        "kv_policy": policy,
        "budget": None if policy in (None, FULL_KV_POLICY) else int(config["kv"]["budget"]),
        "gamma": (decoding.get("tree") or decoding["num_draft_tokens"]) if drafts else None,
        "pa": decoding.get("pa") if drafts else None,
        "B": workload["batch_size"],
        "prefix_len": workload["prefix_len"],
        "gen_len": workload["gen_len"],
        "dataset": None if record.workload is None else record.workload.dataset,
        "ranks": environment.world_size,
        "threads": environment.threads,
        "device": environment.gpu or environment.cpu or config["parallel"]["device"],
        "attention": (config.get("attention") or {}).get("backend"),
        "temperature": (config.get("sampling") or {}).get("temperature"),
        "seed": workload.get("seed"),
        "status": record.status,
    }


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
