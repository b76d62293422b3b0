"""The memory plan of a run: the bytes of each rank, from config and shapes, before allocation.

Weights and KV caches are exact (`tests/unit/test_memory.py`); working memory is an estimate from
the largest forward. The plan omits the interpreter, in memory already, and the rare repetition in a
wider dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from magicdec.attention.backend import CallSize, backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.weight_formats import is_native
from magicdec.hardware.costs import DTYPE_BYTES, linear_parameters
from magicdec.hardware.timing import BANDWIDTH_BYTES, GPU_BANDWIDTH_BYTES
from magicdec.model.checkpoint.weight_files import READ_ELEMENTS
from magicdec.model.config import ModelConfig
from magicdec.names import NARROW
from magicdec.setup.model_plan import ModelPlan, max_tokens, rewound_by_pass, rewound_by_step
from magicdec.speculation.copied_kv import COPYING_BYTES, NUMBERS_AT_ONCE
from magicdec.speculation.observation import heads_at_once
from magicdec.speculation.policies.policy import load_policy, make_policy

ROUTE_BYTES = 20  # of an expert of a token in a layer: its number, its weight and its row
LIBRARY_BYTES = 64 << 20  # that kernels, threads and libraries take on a CPU at their first use


def working_bytes(plan: ModelPlan, is_timed: bool = True, loads: bool = True) -> int:
    """The largest of a prompt chunk, a verification, a policy's first choice, loading a matrix if
    it `loads` any beside the cache and, where times are measured, the bandwidth buffer; plus rotary
    table and libraries."""
    config = plan.config
    room = plan.config.capacity
    longest = max_tokens(plan.config)
    chunk = min(config.attention.prefill_chunk, room.prompt_len)
    T = 1 + longest - room.max_len
    observes = config.decoding.drafts_itself and load_policy(config.kv.policy).needs_weights
    buffer = BANDWIDTH_BYTES // plan.shard.size
    needs = (
        forward_bytes(plan, (1, chunk, longest)),
        forward_bytes(plan, (room.rows, T, longest), observes) + logits_bytes(plan, room.rows * T),
        first_choice_bytes(plan),
        loads * _loading_bytes(plan),
        is_timed * (buffer if config.parallel.device == "cpu" else GPU_BANDWIDTH_BYTES),
    )
    libraries = LIBRARY_BYTES if config.parallel.device == "cpu" else 0
    return max(needs) + longest * plan.model.head_dim * 4 + libraries


def first_choice_bytes(plan: ModelPlan) -> int:
    """The bytes of a policy's choice after prefill, which runs the newest prompt tokens again,
    scores the keys of a layer by kept queries, or copies all of them."""
    config = plan.config
    policy = make_policy(plan.config.kv)
    room = plan.config.capacity
    if not config.decoding.drafts_itself:
        return 0
    B = room.rows
    S = room.prompt_len
    T = policy.rerun_tokens(room.prompt_len)
    forward = forward_bytes(plan, (B, T, S), policy.needs_weights)
    rerun = B * T * plan.bytes_per_token + forward if T else 0
    if policy.coded_copy is not None:
        num_layers = len(plan.part_model.attention_kinds)
        heads = _call_size(plan, (B, 1, S))
        return COPYING_BYTES * max(
            NUMBERS_AT_ONCE, B * num_layers * heads.num_kv_heads * heads.head_dim
        )
    call = _call_size(plan, (B, min(policy.observed_tokens, S), S))
    if not call.T:
        return rerun
    num_layers = plan.part_model.num_layers
    queries = num_layers * B * call.T * call.num_heads * call.head_dim * call.dtype_bytes
    choosing = queries + call.kv_bytes  # K of a layer, twice
    if not policy.is_copied:
        choosing += 4 * B * S * call.num_kv_heads * call.head_dim  # and in float32
    else:
        per_head = call.num_heads // call.num_kv_heads * call.T * S
        num_heads = min(heads_at_once(config.parallel.device, per_head), B * call.num_kv_heads)
        # Scores, their softmax in float32, and its sums before and after pooling.
        choosing += num_heads * per_head * (call.dtype_bytes + 4) + 8 * B * call.num_kv_heads * S
    return max(rerun, choosing)


def forward_bytes(plan: ModelPlan, shape: tuple[int, int, int], observes: bool = False) -> int:
    """Bytes of one layer of a forward of shape (B rows, T new tokens per row, S cached tokens per
    row).

    They are the residual stream twice and normed; the larger of attention's and the MLP's tensors,
    or both in a native call, with a matrix's float32 inputs; and the tensors of the backend, with
    attention weights if the forward `observes` them.
    """
    model = plan.model
    backend = backend_class(plan.config.attention.backend)
    call = _call_size(plan, shape)
    units = max(_share(plan, width) for width in model.mlp_widths)
    heads = call.num_heads + call.num_kv_heads
    attention_size = 3 * heads * model.head_dim
    mlp_size = 4 * units
    experts = model.experts
    if experts is not None:  # the sum in float32, an expert's tokens and what it adds
        mlp_size += 6 * model.hidden_size
        if plan.kinds.native_steps == "on":  # those of all experts of a token, and every route
            per_expert = 2 * model.hidden_size + 3 * _share(plan, experts.width)
            per_expert += ROUTE_BYTES * plan.part_model.num_layers // call.dtype_bytes
            mlp_size += experts.num_used * per_expert + experts.num_experts
    layer = 3 * model.hidden_size + max(attention_size, mlp_size)
    if plan.kinds.native_steps == "on":
        widest = max(model.hidden_size, call.num_heads * model.head_dim, units)
        layer += min(attention_size, mlp_size) + 4 * widest // call.dtype_bytes
    layer *= call.B * call.T * call.dtype_bytes
    return layer + backend.working_bytes(call) + observes * backend.weights_bytes(call)


def _share(plan: ModelPlan, width: int) -> int:
    """This rank's units of an MLP."""
    first, last = plan.shard.mlp_units(width)
    return last - first


def _call_size(plan: ModelPlan, shape: tuple[int, int, int]) -> CallSize:
    model = plan.model
    queries, keys = plan.shard.heads(model.num_heads, model.num_kv_heads)
    num_heads = queries[1] - queries[0]
    num_kv_heads = keys[1] - keys[0]
    dtype_bytes = DTYPE_BYTES[plan.config.model.dtype]
    size = model.cached_head_dim
    return CallSize(*shape, num_heads, num_kv_heads, size, dtype_bytes, plan.coded_kv is not None)


def logits_bytes(plan: ModelPlan, num_tokens: int) -> int:
    """This rank's logits; to sample, all logits in float32 and three times in float64."""
    config = plan.config
    vocab_size = plan.model.vocab_size
    first, last = plan.shard.split(vocab_size)
    sampled = 0 if config.sampling.temperature == 0 else vocab_size * (4 + 3 * 8)
    return num_tokens * ((last - first) * DTYPE_BYTES[config.model.dtype] + sampled)


def _loading_bytes(plan: ModelPlan) -> int:
    """The largest matrix twice, while it is packed or quantised, with the float32 part being read.
    A low-bit copy has a byte per number until packed."""
    model = plan.model
    shard = plan.shard
    vocab = shard.split(model.vocab_size)
    units = max(_share(plan, width) for width in model.mlp_widths)
    largest = max(vocab[1] - vocab[0], 2 * units) * model.hidden_size
    size = DTYPE_BYTES[plan.kinds.dtype]
    part = min(READ_ELEMENTS, largest)
    if not is_native(plan.kinds.weights):
        # The matrices that it is made of, with the part being rounded.
        return linear_parameters(plan.part_model, shard) * size + part * 16
    if plan.kinds.weights in NARROW:
        return largest + part * (4 + 4 + 1)
    copying = 0 if plan.copy_kinds is None else largest + part * 16
    return largest * size + max(part * 4, copying)


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of one rank or of several. `working` is needed for a short time, the rest for the
    whole run."""

    weights: int
    kv: int
    draft_weights: int = 0  # of a standalone draft, or of self-speculation's low-bit copy
    draft_kv: int = 0  # a standalone draft's cache, or what self-speculation keeps of its own
    working: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def describe(self) -> str:
        names = ("weights", "KV", "draft weights", "draft KV", "working")
        parts = zip(names, astuple(self), strict=True)
        listing = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts if size)
        return f"{self.total / 1e9:.2f} GB" + f" ({listing})" * bool(listing)


@dataclass(frozen=True)
class Models:
    target: ModelConfig
    draft: ModelConfig | None = None


def model_plans_of(config: ResolvedConfig, models: Models, rank: int) -> list[ModelPlan]:
    """The plans of a run, whose passes go back to the prompts, and whose draft model prefills
    them anew for each."""
    draft = config.draft
    rewound = rewound_by_pass(config, max_tokens(config))
    plans = [ModelPlan(config, models.target, config.parallel.rank_group, rank, rewound=rewound)]
    if draft is not None and models.draft is not None and rank in draft.rank_group:
        draft_plan = ModelPlan(
            config,
            models.draft,
            draft.rank_group,
            rank,
            is_draft=True,
            rewound=rewound_by_step(config),
        )
        plans.append(draft_plan)
    return plans


def plan_of(plans: Sequence[ModelPlan], keeps_queries: bool = True) -> MemoryPlan:
    """The plan of one rank. `keeps_queries`: prefill keeps the queries that the KV policy asks
    for."""
    targets = [plan for plan in plans if not plan.is_draft]
    drafts = [plan for plan in plans if plan.is_draft]
    kept = sum(
        plan.policy_bytes + plan.state_bytes + keeps_queries * plan.query_bytes for plan in plans
    )
    return MemoryPlan(
        sum(target.weight_bytes for target in targets),
        sum(target.kv_bytes + target.host_bytes for target in targets),
        sum(draft.weight_bytes for draft in drafts) + sum(target.copy_bytes for target in targets),
        sum(draft.kv_bytes + draft.host_bytes for draft in drafts) + kept,
        max(map(working_bytes, targets or drafts), default=0),
    )


def plan_rank(
    config: ResolvedConfig, models: Models, rank: int, keeps_queries: bool = True
) -> MemoryPlan:
    return plan_of(model_plans_of(config, models, rank), keeps_queries)
