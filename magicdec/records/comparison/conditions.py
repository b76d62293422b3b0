"""What must agree before two records are compared: what they measure, and under which conditions.

Names the first cause in words of the command line, not as a hash. Must not know how records are
judged. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from magicdec.config.capabilities import policy_called
from magicdec.config.run_config import join_draft
from magicdec.config.sections import NONE, KVSection, SamplingSection, model_drafter_of
from magicdec.config.setting import declared
from magicdec.names import BASELINE, FULL_KV_POLICY, KV_POLICIES, MTP, WITHOUT_BUDGET
from magicdec.output.console import printable
from magicdec.records.drafted import EVERY_POSITION, JudgedRecord
from magicdec.records.pass_record import is_greedy
from magicdec.records.record import Record
from magicdec.records.workload import prompt_format

Key = tuple[tuple[str, Any], ...]
# Fields of a record's KV section, by the names that the gate prints.
SHORT_NAMES = {
    "budget": "budget",
    "num_sink_tokens": "sinks",
    "window_size": "window",
    "pooling": "pooling",
    "reselect_every": "reselect_every",
    "recent_window": "recent_window",
    "draft_kv_dtype": "draft_kv_dtype",
}
# What the text of the prompts follows from: conditions only where their tokens are others.
TEXT_CONDITIONS = ("dataset", "prefix_len", "num_prompts", "seed", "skip_tokens", "tokenizer")
FORMAT = "prompt_format"  # also such a condition, of the config
# The flags of `magicdec serve` on which drafts depend, with what records without them did. Where
# passes share a prefill, no request waits for another.
LOAD = {
    "num_requests": None,
    "arrival": None,
    "concurrency": None,
    "turns": 1,
    "think_ms": 0.0,
    "scale": "1",
    "waits": "think",
    "longest_wait_s": None,
    "session_starts": None,
    "batch_size": None,
    "n_samples": None,
    "lanes": None,
    "max_in_flight": None,
    "pa": None,
    "pr": None,
    "pd": None,
    "prefill_tokens": None,
    "block_tokens": None,
    "cache_tokens": None,
    "prefix_cache": False,
    "kv_offload": "none",
    "offload_tokens": None,
    "window_ms": None,
    "emulate_acceptance": None,
}


def policy_of(config: Mapping[str, Any]) -> str | None:
    """The KV policy of what drafts, from the config of a record. Prompt lookup reads no cache,
    whatever policy the run names: then None."""
    if config.get("kv") is None:  # of a mode whose drafts read no cache
        return None
    policy: str = config["kv"]["policy"]
    drafter = config["decoding"]["drafter"]
    return None if drafter is not None and model_drafter_of(drafter) is None else policy


def measured_thing(record: JudgedRecord) -> Key:
    """What a record measures: two records of the same thing are meant to be compared. A setting
    that its policy does not read is None."""
    config = record.config
    decoding = config["decoding"]
    kv = config.get("kv") or {}
    draft = None if record.workload is None else record.workload.draft
    policy = policy_of(config)
    # A policy that this version does not know reads all, so that it is never taken for another.
    settings = policy_called(policy).settings if policy in KV_POLICIES else tuple(SHORT_NAMES)
    if policy is None:
        settings = ()
    return (
        ("mode", record.mode),
        *load_of(record).items(),
        ("strategy", decoding["strategy"]),
        ("drafter", decoding["drafter"]),
        ("draft", None if draft is None else draft.model),
        ("policy", policy),
        *((SHORT_NAMES[s], kv.get(s) if s in settings else None) for s in SHORT_NAMES),
        ("gamma", decoding["gamma"]),
        ("pa", decoding.get("pa")),
    )


def copied_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype of the copy of every token that drafts read; None without one."""
    policy = policy_of(config)
    if policy == FULL_KV_POLICY or policy not in WITHOUT_BUDGET:
        return None
    dtype: str = config["kv"]["draft_kv_dtype"]
    return dtype


def policy_text(policy: str, kv: Mapping[str, Any]) -> str:
    """A policy and its budget, or the dtype of a copy of every token."""
    if policy == FULL_KV_POLICY:
        return policy
    return f"{policy} {kv['draft_kv_dtype' if policy in WITHOUT_BUDGET else 'budget']}"


def load_of(record: JudgedRecord) -> dict[str, Any]:
    """The flags of the load on which the drafts of a pass depend; none of one that shares its
    prefill."""
    if record.shares_prefill:
        return {}
    flags = record.config["workload"]
    return {name: flags.get(name, default) for name, default in LOAD.items()}


def is_judged(record: Record) -> TypeGuard[JudgedRecord]:
    """Whether comparisons give a verdict on a record. What else was measured they show."""
    return record.is_judged


def first_difference(new: JudgedRecord, old: JudgedRecord) -> str | None:
    """The first condition in which two records of the same thing differ, such as `prefix_len 1024,
    was 4096`; None if all agree. Neither record failed."""
    ours = new.workload
    theirs = old.workload
    assert ours is not None and theirs is not None, "only a failed record may lack it"
    before = conditions(old)
    for name, value in conditions(new).items():
        is_of_text = name in (*TEXT_CONDITIONS, FORMAT) and ours.sha256 == theirs.sha256
        if value != before[name] and not is_of_text:
            return f"{name} {value}, was {before[name]}"
    if ours.sha256 != theirs.sha256:
        return f"dataset {ours.dataset} has other text for the same settings"
    if ours.model_sha256 != theirs.model_sha256:
        return f"model {ours.model} has other weights"
    if ours.draft is not None and ours.draft != theirs.draft:
        return f"draft {ours.draft.model} has other weights"
    return None


def conditions(record: JudgedRecord) -> dict[str, Any]:
    """Each setting that must agree, by the name that the gate prints."""
    config = record.config
    workload = record.workload
    cost = config["decoding"].get("step_cost")
    emulated = config["decoding"].get("emulate_acceptance")
    return {
        **{name: getattr(workload, name) for name in ("model", *TEXT_CONDITIONS)},
        FORMAT: prompt_format(config),
        "gen_len": config["workload"]["gen_len"],
        "dtype": config["model"]["dtype"],
        "kv_dtype": kv_dtype_of(config),
        "weights": weight_dtypes(config),
        "sampling": sampling(config),
        "ignore_eos": config["decoding"]["ignore_eos"],
        "lookup_corpus": config["decoding"].get("lookup_corpus"),
        "step_cost": None if cost is None else list(cost),  # a tuple before it was written
        "emulate_acceptance": None if emulated is None else list(emulated),
    }


def kv_dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype in which the target's cache was stored; once it was always that of the run."""
    attention = config.get("attention") or {}
    found: str = attention.get("kv_dtype", config["model"]["dtype"])
    return found


def weight_dtypes(config: dict[str, Any]) -> str:
    """The dtypes of the target's matrices and of the draft's."""
    target = config["model"]["target_dtype"]
    draft = config.get("draft")
    own = config["decoding"].get("draft_weights")
    drafts = draft["draft_dtype"] if draft is not None else own or target
    return str(target) if drafts == target else f"{target}, draft {drafts}"


def sampling(config: Mapping[str, Any]) -> dict[str, Any] | str:
    """How tokens were chosen; the seed and the rest of the section are idle in plain greedy
    decoding."""
    return "greedy" if is_greedy(config) else config.get("sampling") or {}


def placement(record: JudgedRecord) -> str:
    """On which ranks the target and a draft model are, as the flags of `magicdec run`, in words."""
    return " ".join(_flags_of_ranks(record.config, record.environment.world_size)) or "one rank"


def describe(record: JudgedRecord) -> str:
    """What a record measures, as `flags_of` has it, in a form that can be printed."""
    draft = None if record.workload is None else record.workload.draft
    name = None if draft is None else draft.model
    num_ranks = record.environment.world_size
    config = record.config
    if not record.shares_prefill:
        return printable(flags_of_mode(record.mode, config, name, num_ranks))
    return printable(flags_at(record.mode, flags_of(config, name, num_ranks)))


def flags_at(mode: str, flags: str) -> str:
    """The flags of what shares a prefill; of the command that judges every position it is said."""
    return f"{flags}, {EVERY_POSITION}" if mode == EVERY_POSITION else flags


def flags_of_mode(
    mode: str, config: Mapping[str, Any], draft: str | None = None, num_ranks: int = 1
) -> str:
    """What is served in a mode, as the flags of `magicdec serve`, which place stages and drafts
    themselves."""
    draft_model = draft or (config.get("draft") or {}).get("model")
    flags = flags_of({**config, "parallel": None, "draft": None}, draft_model)
    ranks = [f"--nproc {num_ranks}"] * (num_ranks > 1)
    return " ".join([f"--modes {mode}", flags, *ranks])


def flags_of(
    config: Mapping[str, Any], draft: str | None = None, num_ranks: int | None = None
) -> str:
    """What is measured, as the flags of `magicdec run` that a user would write: those of the
    sections of a config, without settings of the policy that have their default. `draft` is the
    name of the draft model and `num_ranks` the number of ranks, by default those of the config."""
    decoding = config["decoding"]
    kv = config.get("kv") or {}
    if decoding["strategy"] == BASELINE:
        return f"--draft {NONE}"
    draft_config = config.get("draft")
    name = draft or (draft_config and draft_config["model"])
    words = [f"--draft {join_draft(decoding['drafter'], name)}"]
    words += _flags_of_policy(policy_of(config), kv)
    pa = decoding.get("pa")
    words.append(f"--gamma {decoding['gamma']}")
    words += [] if pa is None else [f"--pa {pa:g}"]
    weights = decoding.get("draft_weights")
    words += [] if weights is None else [f"--draft_weights {weights}"]
    emulated = decoding.get("emulate_acceptance")
    if emulated is not None:
        words.append(f"--emulate_acceptance {' '.join(f'{rate:g}' for rate in emulated)}")
    words += flags_of_sampling(config.get("sampling"))
    return " ".join(words + _flags_of_ranks(config, num_ranks))


def _flags_of_ranks(config: Mapping[str, Any], num_ranks: int | None) -> list[str]:
    """Of one rank none."""
    parallel = config.get("parallel") or {}
    draft = config.get("draft") or {}
    number = num_ranks or parallel.get("nproc") or 1
    if number == 1:
        return []
    usual = list(range(number))
    ranks = list(parallel.get("rank_group") or usual)
    default_ranks = ranks if model_drafter_of(config["decoding"]["drafter"]) == MTP else ranks[:1]
    draft_ranks = list(draft.get("rank_group") or default_ranks)
    words = [f"--nproc {number}"]
    for flag, given, default in (
        ("--rank_group", ranks, usual),
        ("--draft_ranks", draft_ranks, default_ranks),
    ):
        words += [] if given == default else [f"{flag} {' '.join(map(str, given))}"]
    return words


def flags_of_sampling(section: Any) -> list[str]:
    """The flags of the settings that are not the defaults."""
    if not isinstance(section, Mapping):  # of a record from elsewhere
        return []
    known = declared(SamplingSection)
    values = {name: section.get(name, declaration.default) for name, declaration in known.items()}
    return [f"{known[n].flag} {v:g}" for n, v in values.items() if v != known[n].default]


def _flags_of_policy(policy: str | None, kv: Mapping[str, Any]) -> list[str]:
    if policy is None:
        return []
    settings = declared(KVSection)
    section = KVSection(policy, kv["budget"])
    section = replace(section, num_sink_tokens=kv.get("num_sink_tokens", section.num_sink_tokens))
    usual = {name: declaration.default for name, declaration in settings.items()}
    usual |= {"budget": None, "recent_window": section.num_recent_tokens}
    known = policy_called(policy).settings if policy in KV_POLICIES else tuple(SHORT_NAMES)
    values = {name: kv.get(name) for name in SHORT_NAMES if name in known}
    given = {name: v for name, v in values.items() if v is not None and v != usual[name]}
    return [f"{settings[name].flag} {v}" for name, v in {"policy": policy, **given}.items()]


def method_of(record: JudgedRecord) -> str:
    """The drafter and the policy of a record, without their parameters."""
    thing = dict(measured_thing(record))
    return " ".join(str(thing[key]) for key in ("drafter", "draft", "policy") if thing[key])


def kind_of(record: JudgedRecord) -> str:
    """The method of a record where it drafts chains of one length with its own weights for greedy
    requests on one rank; else in which other way it drafts, without parameters, whatever the
    method. Sampling is one way, since its prompts are prefilled by themselves. So are several
    ranks, a draft model on some of them, and drafts at every position."""
    if not record.shares_prefill:
        return f"mode {record.mode}"
    if record.mode == EVERY_POSITION:
        return EVERY_POSITION
    decoding = record.config["decoding"]
    kv = record.config["kv"]
    several = record.environment.world_size > 1
    ways = {
        "pa": decoding.get("pa"),
        "low-bit": decoding.get("draft_weights"),
        "auto": decoding["gamma"] == "auto",
        "reselect": policy_of(record.config) and kv.get("reselect_every"),
        "ranks": several and record.config["draft"] is None,
        "draft-ranks": several and record.config["draft"] is not None,
    }
    if sampling(record.config) != "greedy":
        return "sampled"
    return " ".join(way for way, value in ways.items() if value) or method_of(record)
