"""Prepares a run: everything that can be refused is refused here, before any process group starts.

Owns the order of the checks. Every rank prepares on its own, and all ranks reach the same result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from magicdec.attention.backend import backend_class
from magicdec.config.capabilities import capabilities_of, list_backends
from magicdec.config.options import flag_of
from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.cost_model.step_estimate import StepEstimate
from magicdec.distributed.groups import Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.executor.requirements import layer_obstacle
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import check_memory, check_together, planned
from magicdec.memory.free_memory import free_device_memory
from magicdec.memory.plan import MemoryPlan, Models
from magicdec.memory.working_memory import max_tokens
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.model.checkpoint.weight_map import weight_map
from magicdec.model.tokenizer import Tokenizer, load_tokenizer
from magicdec.names import AUTO_BACKENDS, REFERENCE_BACKEND
from magicdec.records.workload import ModelRecord, WorkloadRecord
from magicdec.setup.draft_checks import check_choice, check_draft
from magicdec.setup.step_estimate import estimate_steps
from magicdec.workload.workload import Workload, build_workload


@dataclass(frozen=True)
class Prepared:
    """A run after all checks: everything that a user can cause has been refused by now."""

    config: ResolvedConfig
    launch: Launch
    source: ModelSource
    tokenizer: Tokenizer
    tokenizer_name: str
    workload: Workload
    draft_source: ModelSource | None = None
    memory: str = ""  # the memory plan as one line of text
    plan: MemoryPlan = MemoryPlan(0, 0)  # the plan of all ranks together
    free: int | None = None  # bytes of free memory that this rank read
    step_estimate: StepEstimate | None = None  # the first step times of `--gamma auto`

    @property
    def is_random(self) -> bool:
        """Whether the target or its standalone draft has random weights, which make acceptance
        meaningless."""
        return self.source.is_random or bool(self.draft_source and self.draft_source.is_random)

    def describe_workload(self) -> WorkloadRecord:
        """The record's `workload`: the prompts, the models and the tokenizer."""
        model, w = describe_model(self.source), self.workload
        return WorkloadRecord(
            model=model.model,
            random_weights=model.random_weights,
            model_sha256=model.model_sha256,
            draft=None if self.draft_source is None else describe_model(self.draft_source),
            tokenizer=self.tokenizer_name,
            dataset=w.dataset,
            num_prompts=len(w.prompts),
            prefix_len=len(w.prompts[0]),
            num_available=w.num_available,
            skip_tokens=w.skip_tokens,
            seed=w.seed,
            sources=None if w.sources is None else [list(source) for source in w.sources],
            sha256=w.sha256,
        )


def describe_model(source: ModelSource) -> ModelRecord:
    return ModelRecord(
        model=source.name, random_weights=source.is_random, model_sha256=fingerprint(source)
    )


def fingerprint(source: ModelSource) -> str:
    """A hash that differs between two models of the same shape with different weights. It is cheap:
    besides names and shapes, only the one-dimensional tensors are read."""
    digest = hashlib.sha256(repr(sorted(source.weights.shapes().items())).encode())
    config = source.config
    for pieces in weight_map(config, Shard(), range(config.num_layers)).values():
        for piece in pieces:
            if len(piece.full_shape) == 1:
                digest.update(source.weights.read(piece).float().numpy().tobytes())
    return digest.hexdigest()


def prepare(asked: RunConfig, launch: Launch) -> Prepared:
    """Resolve the config and check everything. Raises ValueError, one line naming the flag, for
    errors that a user can correct."""
    asked.check(launch.world_size)
    flag = flag_of(asked.model, "model")
    source = find_model(flag, asked.model.model)
    draft = None
    if asked.draft is not None:
        draft = find_model(flag_of(asked.draft, "model"), asked.draft.model)
    config = resolve(
        as_stored(asked, source, draft),
        probe_machine(launch),
        source.config.cached_head_dim,
        (source if draft is None else draft).config.cached_head_dim,
        (layer_obstacle(source.config), None if draft is None else layer_obstacle(draft.config)),
    )
    check_interpreter(config)
    check_fits(config, source, launch.world_size)
    if draft is not None:
        check_draft(config, source, draft)
        assert config.draft is not None, "a draft was found for it"
        draft_flag = flag_of(asked.draft, "model")
        backend = config.draft.backend_choice.settled
        check_scores(backend, config.model.dtype, draft_flag, draft)
        check_window(backend, max_tokens(config), draft_flag, draft)
    # Random weights have no tokenizer, so the demo's is used. Its ids are valid in any vocabulary
    # that is at least as large.
    described = find_model("--model", "demo") if source.tokenizer_directory is None else source
    directory = described.tokenizer_directory
    assert directory is not None
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise ValueError(
            f"{flag} {config.model.model}: its tokenizer has {tokenizer.vocab_size} ids, "
            f"its embedding {source.config.vocab_size}"
        )
    bos = source.config.bos_token_id
    check_bos(f"{flag} {config.model.model}", source, tokenizer)
    w = config.workload
    workload = build_workload(
        w.dataset, tokenizer, bos, w.prefix_len, w.num_prompts, w.seed, gen_len=w.num_new_tokens
    )
    models = Models(source.config, None if draft is None else draft.config)
    free = free_device_memory(config.parallel.device, launch.local_rank)
    memory = check_together(launch, lambda: check_memory(config, models, launch, free))
    plan, found = planned(config, models), (tokenizer, described.name, workload, draft)
    estimate = estimate_steps(config, models.target, models.draft, launch)
    return Prepared(config, launch, source, *found, memory, plan, free, estimate)


def as_stored(
    config: RunConfig, source: ModelSource, draft: ModelSource | None = None
) -> RunConfig:
    """`config` with int8 as the weight dtype of each model that is stored in int8. Raises
    ValueError if another dtype was requested, because the original weights are not stored."""
    model, section = config.model, config.draft
    if source.is_int8:
        named = f"{flag_of(model, 'model')} {model.model}"
        check_int8("--target_dtype", model.target_dtype, named)
        model = replace(model, target_dtype="int8")
    if draft is not None and draft.is_int8:
        assert section is not None, "a draft was found for it"
        named = f"{flag_of(section, 'model')} {section.model}"
        check_int8("--draft_dtype", section.draft_dtype, named)
        section = replace(section, draft_dtype="int8")
    return replace(config, model=model, draft=section)


def check_int8(flag: str, asked: str, named: str) -> None:
    """Raise ValueError if a model that is stored in int8 should have another weight dtype."""
    if asked not in ("auto", "int8"):
        raise ValueError(f"{flag} {asked}: {named} holds int8 weights; choose from auto, int8")


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
