"""Checks of a resolved run against its models. They raise ValueError, one line naming the flags,
before any process group starts."""

from __future__ import annotations

from magicdec.attention.backend import backend_class
from magicdec.config.capabilities import (
    capabilities_of,
    list_backends,
    list_policies,
    policy_called,
)
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import flag_of
from magicdec.config.weight_formats import LEAST_GROUP, WEIGHT_FORMATS
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import (
    DTYPE_BYTES,
    bytes_as_stored,
    linear_parameters,
    low_bit_bytes,
    matrices,
)
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.checkpoint.weight_map import untie_head, weight_map
from magicdec.model.config import ModelConfig
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.names import (
    REFERENCE_BACKEND,
    SAME,
    STORED,
)
from magicdec.setup.model_plan import max_tokens

MOST_OF_STORED = 0.85  # of the bytes of stored weights that a low-bit copy may read


def check_draft(config: ResolvedConfig, target: ModelSource, draft: ModelSource) -> None:
    assert config.draft is not None and config.run_config.draft is not None, (
        "a draft was found for it"
    )
    draft_flag = flag_of(config.run_config.draft, "model")
    label = f"{draft_flag} {draft.name}"
    if not draft.config.is_head:  # heads are used beyond the length that they were trained at
        target_label = f"{flag_of(config.run_config.model, 'model')} {target.name}"
        check_vocabularies(label, draft, target_label, target)
        check_reach(config, label, draft)
    check_rolling(config, label, draft)
    check_choice(config, draft_flag, draft)
    check_shards(config, label, draft)
    weights = config.draft.draft_dtype
    check_groups("--draft_weights", weights, label, len(config.draft.rank_group), draft.config)
    num_ranks = len(config.draft.rank_group)
    instead = "another draft"
    check_stored_groups(config.draft.draft_dtype, label, num_ranks, draft, instead)
    check_backend(config, config.draft.backend, draft_flag, draft)


def check_vocabularies(
    label: str, draft: ModelSource, target_label: str, target: ModelSource
) -> None:
    """An id must mean the same text to both models; random weights need equal numbers of ids."""
    if draft.tokenizer_path is None or target.tokenizer_path is None:
        ours = draft.config.vocab_size
        theirs = target.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"{label} has a vocabulary of {ours} ids, {target_label} of {theirs}; "
                "a draft needs its target's vocabulary"
            )
        return
    hashes = [
        load_tokenizer(directory).vocabulary_hash()
        for directory in (draft.tokenizer_path, target.tokenizer_path)
    ]
    if hashes[0] != hashes[1]:
        raise ValueError(
            f"the tokenizers of {label} and {target_label} have different vocabularies; "
            "a draft needs its target's"
        )


def check_states(where: str, source: ModelSource, why: str) -> None:
    """Raises ValueError for a model whose layers keep states. `where`: the flags that exclude it,
    and `why`."""
    if source.config.mixers:
        raise ValueError(
            f"{where}: layers of {source.name} keep states (linear attention), and {why}"
        )


def check_rolling(config: ResolvedConfig, label: str, draft: ModelSource) -> None:
    """Under StreamingLLM a draft's positions are those within its cache (`rolling_runner`)."""
    if policy_called(config.kv.policy).can_roll:
        fitting = list_policies(lambda p: not (p.can_roll or p.needs_verification))
        why = f"its cache does not forget; choose --kv_policy from {fitting}"
        check_states(f"{label} --kv_policy {config.kv.policy}", draft, why)
    positions = draft.config.positions
    if policy_called(config.kv.policy).can_roll and positions != "rope":
        fitting = list_policies(lambda p: not (p.can_roll or p.needs_verification))
        what = {"learned": "learned positions", "alibi": "ALiBi"}[positions]
        raise ValueError(
            f"--kv_policy {config.kv.policy} moves a draft's cached keys by rotation, but {label} "
            f"has {what}; choose from {fitting}"
        )


def check_reach(config: ResolvedConfig, label: str, draft: ModelSource) -> None:
    """The draft's positions must reach over the text, or with a rolling cache over the budget and
    what follows it."""
    model = draft.config
    room = config.capacity
    kv = config.kv
    reach = model.max_length
    if is_rolling(config):  # its positions are no longer those of the text: no window is moved
        reach = min(reach, model.windows[0] or reach)
    if room.max_len <= reach:
        return
    if not is_rolling(config):
        rolling = list_policies(lambda p: p.can_roll)
        rolls = f"; --kv_policy {rolling} would serve" if model.positions == "rope" else ""
        raise ValueError(
            f"{room.described} exceeds the {reach} positions of the draft {label} under "
            f"--kv_policy {kv.policy}{rolls}"
        )
    tail = max(min(config.attention.prefill_chunk, room.prompt_len), config.decoding.max_gamma)
    if kv.budget + tail > reach:
        raise ValueError(
            f"--budget {kv.budget} and the --prefill_chunk "
            f"{config.attention.prefill_chunk} or --gamma {config.decoding.gamma} after "
            f"it exceed the {reach} positions of the draft {label}; make them smaller"
        )


def is_rolling(config: ResolvedConfig) -> bool:
    return config.draft is not None and policy_called(config.kv.policy).can_roll


def check_choice(config: ResolvedConfig, flag: str, source: ModelSource) -> None:
    """A policy's single choice must stay in the widest window of the model's layers."""
    window = source.config.windows[0]
    kv = config.kv
    after = config.capacity.after_longest_prompt + config.decoding.max_gamma
    if kv.chooses_once and window is not None and after >= window:
        again = "" if config.draft is not None else " or --reselect_every"
        raise ValueError(
            f"--kv_policy {kv.policy} chooses once after prefill, and nothing of that is left in "
            f"the sliding window of {flag} {source.name} ({window}) after {after} generated "
            f"and draft tokens; choose a smaller --gen_len{again}"
        )


def check_shards(config: ResolvedConfig, label: str, draft: ModelSource) -> None:
    assert config.draft is not None, "a draft was found for it"
    ranks = config.draft.rank_group
    what = f"--draft_ranks {' '.join(map(str, ranks))}, draft {label}"
    check_shared(what, len(ranks), draft.config)


def check_shared(what: str, num_ranks: int, model: ModelConfig) -> None:
    """Raises ValueError, which begins with `what`, if `num_ranks` ranks cannot share the heads."""
    try:
        Shard(0, num_ranks).heads(model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def check_groups(
    flag: str, weights: str | None, label: str, num_ranks: int, model: ModelConfig
) -> None:
    """Raises ValueError if groups of low-bit weights do not divide the inputs of every matrix."""
    if weights not in WEIGHT_FORMATS:
        return
    group = WEIGHT_FORMATS[weights].least_group
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    heads = [s.heads(model.num_heads, model.num_kv_heads)[0] for s in shards]
    units = [s.mlp_units(width) for s in shards for width in model.mlp_widths]
    widths = {model.hidden_size}
    widths |= {(last - first) * model.head_dim for first, last in heads}
    widths |= {last - first for first, last in units}
    odd = [width for width in sorted(widths) if width % group]
    if odd:
        on = f" on {num_ranks} ranks" if num_ranks > 1 else ""
        other = "choose int8, or " if weights != "int8" else ""
        raise ValueError(
            f"{flag} {weights}: groups of {group} inputs do not divide the "
            f"{odd[0]} of a matrix of {label}{on}; {other}leave it out"
        )


def check_stored_groups(
    weights: str | None, label: str, num_ranks: int, source: ModelSource, instead: str
) -> None:
    """Raises ValueError if a rank's inputs of a matrix begin or end within the smallest group that
    layers have. `instead` is a flag that chooses other weights."""
    if weights != STORED:
        return
    config = untie_head(source.config)
    for rank in range(num_ranks):
        table = weight_map(config, Shard(rank, num_ranks), range(config.num_layers))
        for piece in (piece for pieces in table.values() for piece in pieces):
            stored = source.weights.tensors.get(piece.name)
            kind = None if stored is None else stored.numbers
            if kind is None or piece.columns is None:
                continue
            if source.weights.input_order(piece.name) is not None:
                continue  # it is widened
            if any(column % LEAST_GROUP for column in piece.columns):
                raise ValueError(
                    f"{label}: {num_ranks} ranks cannot share the {piece.width} inputs of "
                    f"{piece.name} in groups of {LEAST_GROUP} or more: rank {rank} has inputs "
                    f"{piece.columns[0]} to {piece.columns[1]}; choose {instead}, or fewer ranks"
                )


def check_saves(low_bit: str | None, label: str, model: ModelConfig, dtype: str) -> None:
    """Raises ValueError for a low-bit copy of matrices that are stored in as few bits, the head
    among them. Those that are not in groups are in `dtype`."""
    if low_bit is None or model.stored_bytes is None:
        return
    held = bytes_as_stored(model, matrices(model, Shard()), DTYPE_BYTES[dtype], num_ranks=1)
    if low_bit_bytes(model, Shard(), low_bit) > MOST_OF_STORED * held:
        bits = 8 * held / linear_parameters(model, Shard())
        raise ValueError(
            f"--draft_weights {low_bit}: the weights of {label} have {bits:.1f} bits, so that a "
            f"copy would hardly read less; choose {SAME}, or leave it out"
        )


def check_interpreter(config: ResolvedConfig) -> None:
    """Load the attention backends first: Triton decides at its first import whether to interpret
    its kernels."""
    drafts = [] if config.draft is None else [config.draft.backend]
    for name in [config.attention.backend, *drafts]:
        backend_class(name).load(config.parallel.device)


def check_bos(label: str, source: ModelSource, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the model's BOS token is no id of its tokenizer, whose files do not say
    what a prompt begins with."""
    bos = source.config.bos_token_id if tokenizer.around is None else None
    size = source.config.vocab_size
    if source.tokenizer_path is not None:
        size = min(size, tokenizer.vocab_size)
    if bos is not None and not 0 <= bos < size:
        raise ValueError(
            f"{label}: its bos_token_id {bos} is not one of its tokenizer's {size} ids; "
            "correct it in config.json or generation_config.json, or set it to null for no BOS"
        )


def check_fits(config: ResolvedConfig, source: ModelSource, world_size: int) -> None:
    """Raises ValueError if the run exceeds the model's maximum length, the attention backend does
    not support it, or the ranks cannot share its heads."""
    room = config.capacity
    flag = flag_of(config.run_config.model, "model")
    check_length(room.described, room.max_len, flag, source)
    check_backend(config, config.attention.backend, flag, source)
    if config.decoding.drafts_itself:
        check_choice(config, flag, source)
    Shard(0, world_size).heads(source.config.num_heads, source.config.num_kv_heads)
    label = f"{flag} {source.name}"
    check_groups("--draft_weights", config.low_bit, label, world_size, source.config)
    weights = config.model.target_dtype
    check_groups("--target_dtype", weights, label, world_size, source.config)
    instead = f"--target_dtype {config.model.dtype}"
    check_stored_groups(config.model.target_dtype, label, world_size, source, instead)
    if config.model.target_dtype == STORED:
        check_saves(config.low_bit, label, source.config, config.model.dtype)


def check_backend(config: ResolvedConfig, backend: str, flag: str, source: ModelSource) -> None:
    """Raises ValueError if the backend computes the model's attention wrongly."""
    check_experts(config.parallel.device, flag, source)
    check_scores(backend, config.model.dtype, flag, source)
    check_window(backend, max_tokens(config), flag, source)
    check_sinks(backend, flag, source)


def check_experts(device: str, flag: str, source: ModelSource) -> None:
    """Which experts a step goes to is read by the host, which no captured step could do."""
    if source.config.experts is not None and device == "cuda":
        raise ValueError(
            f"--device cuda: the experts of {flag} {source.name} are computed on CPUs only, so "
            "far; choose --device cpu"
        )


def check_scores(backend: str, dtype: str, flag: str, source: ModelSource) -> None:
    """Raises ValueError for ALiBi with a backend that rounds scores to bfloat16, which would equate
    neighbouring positions."""
    if (source.config.positions, dtype) != ("alibi", "bfloat16"):
        return
    if capabilities_of(backend).rounds_scores:
        raise ValueError(
            f"--attention {backend} rounds scores to bfloat16, too coarse for the ALiBi of {flag} "
            f"{source.name}; choose from auto, {REFERENCE_BACKEND}, or --dtype float32"
        )


def check_window(backend: str, length: int, flag: str, source: ModelSource) -> None:
    """Raises ValueError if `length` tokens exceed the sliding window and the backend supports
    none."""
    window = source.config.narrowest_window
    if window is None or window >= length:
        return
    if not capabilities_of(backend).keeps_window:
        fitting = ", ".join(list_backends(lambda c: c.keeps_window))
        raise ValueError(
            f"--attention {backend} does not support the sliding window of {window} tokens of "
            f"{flag} {source.name}; choose from auto, {fitting}"
        )


def check_sinks(backend: str, flag: str, source: ModelSource) -> None:
    """Raises ValueError if the model has sink logits and the backend does not compute them."""
    if source.config.sink_logits and not capabilities_of(backend).keeps_sinks:
        fitting = ", ".join(list_backends(lambda c: c.keeps_sinks))
        raise ValueError(
            f"--attention {backend} does not compute the sink logits of {flag} {source.name}; "
            f"choose from auto, {fitting}"
        )


def check_length(flags_text: str, length: int, flag: str, source: ModelSource) -> None:
    """Raises ValueError if `length`, which follows from `flags_text`, exceeds the model's
    maximum."""
    model = source.config
    if length > model.max_length:
        dynamic = model.positions == "rope" and model.rope.rope_type == "dynamic"
        why = "; dynamic RoPE scaling beyond them would change cached keys" if dynamic else ""
        raise ValueError(
            f"{flags_text} exceeds the {model.max_length} positions of {flag} {source.name}{why}; "
            f"{length - model.max_length} tokens fewer fit"
        )
