"""Which flags a run ignores, and why. Imports no torch itself, but asking a KV policy does.

`cli.flags` refuses such a flag where the user gave it. Must not know how flags are read.
"""

from __future__ import annotations

from magicdec.cli.parsing.parser import Parser
from magicdec.config.checks import policy_called, policy_name
from magicdec.config.run_config import RunConfig
from magicdec.names import BASELINE, FULL_KV_POLICY

# Fields, beside those of the KV section and the draft's, that only drafting uses.
OF_DRAFTING = tuple(
    f"decoding.{name}" for name in ("num_draft_tokens", "tree", "machine", "baseline")
)
# Fields of the KV section that are not a policy's settings.
OF_EVERY_POLICY = ("policy", "budget", "draft_kv_dtype")


def refuse_ignored(config: RunConfig, parser: Parser, given: set[str]) -> None:
    """Raises ValueError for a flag of a section of `config` that was given and would do nothing."""
    for dest in sorted(given):
        reason = why_ignored(config, dest)
        if "." in dest and reason is not None:
            raise ValueError(f"{parser.flag_of(dest)} does nothing here: {reason}; leave it out")


def drafts_only(config: RunConfig, field: str) -> bool:
    """Whether the command of `config` decodes autoregressively and `field` is about drafts, so that
    no other flag can make the command use it."""
    is_of_drafts = field.partition(".")[0] in ("kv", "draft") or field in OF_DRAFTING
    return config.decoding.strategy == BASELINE and is_of_drafts


def why_ignored(config: RunConfig, field: str) -> str | None:
    """Why the run does not use `field`, such as `kv.window_size`; None if it does."""
    section, _, name = field.partition(".")
    decoding = config.decoding
    if drafts_only(config, field):
        return "autoregressive decoding drafts nothing"
    if field == "decoding.num_draft_tokens" and decoding.tree is not None:
        return "--tree says what a step drafts"
    if section == "draft" and decoding.drafter != "model":
        return "no other model drafts"
    if section == "kv" and name != "draft_kv_dtype" and decoding.drafter == "ngram":
        return "prompt lookup reads no KV cache"
    if field == "sampling.seed" and config.sampling.temperature == 0:
        return "--temperature 0 is greedy"
    return _why_policy_ignores(config, name) if section == "kv" else None


def _why_policy_ignores(config: RunConfig, name: str) -> str | None:
    kv = config.kv
    if name == "budget":
        whole = kv.policy == FULL_KV_POLICY and kv.budget != -1
        return f"--kv_policy {FULL_KV_POLICY} reads the whole cache" if whole else None
    policy = policy_name(kv.policy, kv.budget)
    if name in OF_EVERY_POLICY or name in policy_called(policy).settings:
        return None
    return f"--kv_policy {policy} does not use it"
