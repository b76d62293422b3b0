"""The settings of a run by the names of their flags, as tables sort, group and export them. Reads
records of any age: a setting that a record lacks is None. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.environment import threads_of_ranks
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord

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
