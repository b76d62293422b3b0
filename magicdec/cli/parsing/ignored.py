"""The settings that a run ignores, with reasons: such a flag is refused where the user gave it.
Asking a KV policy imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from magicdec.cli.parsing.parser import ConfigFile, ParsedValues
from magicdec.config.capabilities import policy_called, policy_name
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import is_other_start
from magicdec.names import BASELINE, WITHOUT_BUDGET

# Fields, beside those of the KV section and the draft's, that only drafting uses.
DRAFTING_SETTINGS = tuple(
    f"decoding.{name}" for name in ("gamma", "pa", "draft_weights", "baseline", "lookup_corpus")
)
# Fields of the KV section that are not a policy's settings.
COMMON_KV_FIELDS = ("policy", "budget")


def refuse_ignored(config: RunConfig, values: ParsedValues, used: Sequence[str] = ()) -> None:
    """Raises ValueError for a flag on the command line that a run of `config` ignores, and prints
    one in a file. `used` names settings that the command uses in any case."""
    launch = read_launch()
    # The first rank says so, unless it only starts the ranks that run.
    is_leader = launch.rank == 0 and not is_other_start(config.parallel.nproc, launch)
    for name in sorted(values.given - set(used)):
        if (reason := why_ignored(config, name)) is None:
            continue
        values.refuse_typed([name], reason)
        if is_leader:
            message = f"{values.flag_of(name)} does nothing here: {reason}"
            print(f"--config {values[ConfigFile].config}: {message}", file=sys.stderr)


def why_ignored(config: RunConfig, setting: str) -> str | None:
    """The reason why the run ignores a setting such as `kv.window_size`, if it does."""
    section, _, name = setting.partition(".")
    decoding = config.decoding
    is_of_drafts = section in ("kv", "draft") or setting in DRAFTING_SETTINGS
    if decoding.strategy == BASELINE and is_of_drafts:
        return "autoregressive decoding drafts nothing"
    if setting == "decoding.lookup_corpus" and not decoding.looks_up:
        return "nothing is looked up"
    if section == "draft" and not decoding.has_draft_model:
        return "no other model drafts"
    if setting == "draft.eagle_layers" and not decoding.has_eagle_head:
        return "no EAGLE-3 head drafts here"
    if setting == "decoding.draft_weights" and decoding.model_drafter is None:
        return f"drafts of {decoding.drafter} have no weights"
    if section == "kv" and decoding.model_drafter is None:
        return f"drafts of {decoding.drafter} read no KV cache"
    if setting == "sampling.seed" and config.sampling.temperature == 0:
        return "--temperature 0 is greedy"
    return _why_policy_ignores(config, name) if section == "kv" else None


def _why_policy_ignores(config: RunConfig, name: str) -> str | None:
    kv = config.kv
    if name == "budget":
        whole = kv.policy in WITHOUT_BUDGET and kv.budget != -1
        return f"--kv_policy {kv.policy} reads the whole cache" if whole else None
    policy = policy_name(kv.policy, kv.budget)
    if name in COMMON_KV_FIELDS or name in policy_called(policy).settings:
        return None
    return f"--kv_policy {policy} does not use it"
