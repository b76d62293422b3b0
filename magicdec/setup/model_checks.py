"""Checks of a resolved run against its model: lengths, the tokenizer's ids, and what the attention
backend supports. Every check raises ValueError, one line naming the flag.

Must not know in which order a run is prepared.
"""

from __future__ import annotations

from magicdec.attention.backend import backend_class
from magicdec.config.capabilities import capabilities_of, list_backends
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import flag_of
from magicdec.distributed.tensor_parallel import Shard
from magicdec.memory.working_memory import max_tokens
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.tokenizer import Tokenizer
from magicdec.names import AUTO_BACKENDS, REFERENCE_BACKEND
from magicdec.setup.draft_checks import check_choice


def check_interpreter(config: ResolvedConfig) -> None:
    """Let each attention backend load what must be loaded first: Triton decides whether to
    interpret its kernels when it is first imported."""
    drafts = [] if config.draft is None else [config.draft.backend]
    for name in [config.attention.backend, *drafts]:
        backend_class(name).load(config.parallel.device)


def check_bos(named: str, source: ModelSource, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the BOS token of the model is not a valid id of its tokenizer."""
    bos = source.config.bos_token_id
    size = source.config.vocab_size
    if source.tokenizer_directory is not None:
        size = min(size, tokenizer.vocab_size)
    if bos is not None and not 0 <= bos < size:
        raise ValueError(
            f"{named}: its bos_token_id {bos} is not one of its tokenizer's {size} ids; "
            "correct it in config.json or generation_config.json, or set it to null for no BOS"
        )


def check_fits(config: ResolvedConfig, source: ModelSource, world_size: int) -> None:
    """Raise ValueError if the run is longer than the model's maximum length, if the attention
    backend does not support the model, or if its heads cannot be divided among the ranks."""
    w, flag = config.workload, flag_of(config.asked.model, "model")
    length = w.prefix_len + w.num_new_tokens
    asked = f"--prefix_len {w.prefix_len} + {w.num_new_tokens} generated tokens = {length}"
    check_length(asked, length, flag, source)
    backend = config.attention.backend_choice.settled
    check_scores(backend, config.model.dtype, flag, source)
    check_window(backend, max_tokens(config), flag, source)
    if config.decoding.drafter == "self":
        check_choice(config, flag, source)
    Shard(0, world_size).heads(source.config.num_heads, source.config.num_kv_heads)


def check_scores(backend: str | None, dtype: str, flag: str, source: ModelSource) -> None:
    """Raise ValueError if the model uses ALiBi and the backend rounds scores to bfloat16. ALiBi
    scores grow with the position, so rounding would remove the difference between neighbours."""
    if backend is None or (source.config.positions, dtype) != ("alibi", "bfloat16"):
        return
    if capabilities_of(backend).rounds_scores:
        known = (*AUTO_BACKENDS, REFERENCE_BACKEND)
        fitting = [name for name in known if not capabilities_of(name).rounds_scores]
        raise ValueError(
            f"--attention {backend} rounds scores to bfloat16, too coarse for the ALiBi of {flag} "
            f"{source.name}; choose {', '.join(fitting)}, or --dtype float32"
        )


def check_window(backend: str | None, length: int, flag: str, source: ModelSource) -> None:
    """Raise ValueError if sequences of `length` tokens exceed the model's sliding window and the
    backend does not support windows."""
    window = source.config.sliding_window
    if backend is None or window is None or window >= length:
        return
    if not capabilities_of(backend).keeps_window:
        fitting = ", ".join(list_backends(lambda c: c.keeps_window))
        raise ValueError(
            f"--attention {backend} does not support the sliding window of {window} tokens of "
            f"{flag} {source.name}; choose from auto, {fitting}"
        )


def check_length(asked: str, length: int, flag: str, source: ModelSource) -> None:
    """Raise ValueError if `length` exceeds the model's maximum length. `asked` names the flags and
    values from which the length follows."""
    model = source.config
    if length > model.max_length:
        dynamic = model.positions == "rope" and model.rope.rope_type == "dynamic"
        why = "; dynamic RoPE scaling beyond them would change cached keys" if dynamic else ""
        raise ValueError(
            f"{asked} exceeds the {model.max_length} positions of {flag} {source.name}{why}"
        )
