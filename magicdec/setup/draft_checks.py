"""What a draft must have to serve its target; checked before any process group starts.

Raises ValueError, one line with the flags of both. Must not know how anything is loaded or run.
"""

from __future__ import annotations

from magicdec.config.checks import list_policies, policy_called
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.tokenizer import load_tokenizer


def check_draft(config: ResolvedConfig, target: ModelSource, draft: ModelSource) -> None:
    """`config` is resolved and names both."""
    draft_flag = flag_of(config.asked.draft, "model")
    named = f"{draft_flag} {draft.name}"
    check_vocabularies(
        named, draft, f"{flag_of(config.asked.model, 'model')} {target.name}", target
    )
    check_rolling(config, named, draft)
    check_reach(config, named, draft)
    check_choice(config, draft_flag, draft)
    check_shards(config, named, draft)


def check_vocabularies(
    named: str, draft: ModelSource, target_named: str, target: ModelSource
) -> None:
    """One id must mean one piece of text to both. Random weights have no tokenizer: there the
    number of ids decides."""
    if draft.tokenizer_directory is None or target.tokenizer_directory is None:
        ours, theirs = draft.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"{named} has a vocabulary of {ours} ids, {target_named} of {theirs}; "
                "a draft needs its target's vocabulary"
            )
        return
    hashes = [
        load_tokenizer(directory).vocabulary_hash()
        for directory in (draft.tokenizer_directory, target.tokenizer_directory)
    ]
    if hashes[0] != hashes[1]:
        raise ValueError(
            f"the tokenizers of {named} and {target_named} have different vocabularies; "
            "a draft needs its target's"
        )


def check_rolling(config: ResolvedConfig, named: str, draft: ModelSource) -> None:
    """Under StreamingLLM a draft's positions are those within its cache (`rolling_runner`)."""
    positions = draft.config.positions
    if policy_called(config.kv.policy).can_roll and positions != "rope":
        fitting = list_policies(lambda p: not (p.can_roll or p.needs_verification))
        what = {"learned": "learned positions", "alibi": "ALiBi"}[positions]
        raise ValueError(
            f"--kv_policy {config.kv.policy} moves a draft's cached keys by rotation, but {named} "
            f"has {what}; choose from {fitting}"
        )


def check_reach(config: ResolvedConfig, named: str, draft: ModelSource) -> None:
    """The draft must have learnt the distances that it will see: those of the whole text, or under
    a rolling cache those of the budget and what stands after it."""
    model, w, kv = draft.config, config.workload, config.kv
    reach = model.max_length
    if is_rolling(config):  # its positions are no longer those of the text: no window is moved
        reach = min(reach, model.sliding_window or reach)
    length = w.prefix_len + w.num_new_tokens
    if length <= reach:
        return
    if not is_rolling(config):
        rolling = list_policies(lambda p: p.can_roll)
        rolls = f"; --kv_policy {rolling} would serve" if model.positions == "rope" else ""
        raise ValueError(
            f"--prefix_len {w.prefix_len} + {w.num_new_tokens} generated tokens = {length} exceeds "
            f"the {reach} positions of the draft {named} under --kv_policy {kv.policy}{rolls}"
        )
    tail = max(min(config.attention.prefill_chunk, w.prefix_len), config.decoding.most_draft_tokens)
    if kv.budget + tail > reach:
        raise ValueError(
            f"--budget {kv.budget} and the --prefill_chunk "
            f"{config.attention.prefill_chunk} or --gamma {config.decoding.num_draft_tokens} after "
            f"it exceed the {reach} positions of the draft {named}; make them smaller"
        )


def is_rolling(config: ResolvedConfig) -> bool:
    """Whether a standalone draft keeps a rolling cache (`rolling_runner`)."""
    return config.draft is not None and policy_called(config.kv.policy).can_roll


def check_choice(config: ResolvedConfig, flag: str, source: ModelSource) -> None:
    """What a policy chooses once must stay in the model's sliding window, if it has one."""
    window, kv = source.config.sliding_window, config.kv
    after = config.workload.num_new_tokens + config.decoding.most_draft_tokens
    is_once = policy_called(kv.policy).is_copied and not kv.reselect_every
    if is_once and window is not None and after >= window:
        again = "" if config.draft is not None else " or --reselect_every"
        raise ValueError(
            f"--kv_policy {kv.policy} chooses once after prefill, and nothing of that is left in "
            f"the sliding window of {flag} {source.name} ({window}) after {after} generated "
            f"and draft tokens; choose a smaller --gen_len{again}"
        )


def check_shards(config: ResolvedConfig, named: str, draft: ModelSource) -> None:
    """The draft's heads must be divisible over its ranks."""
    assert config.draft is not None, "a draft was found for it"
    ranks = config.draft.rank_group
    try:
        Shard(0, len(ranks)).heads(draft.config.num_heads, draft.config.num_kv_heads)
    except ValueError as error:
        shown = " ".join(map(str, ranks))
        raise ValueError(f"--draft_ranks {shown}, draft {named}: {error}") from error
