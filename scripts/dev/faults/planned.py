"""Of models that only the plan knows: what a forward of them reads and computes."""

from __future__ import annotations

from faults.fault import Fault, Property

TESTS = "test_planned_models.py::"
COSTS = "hardware/costs.py"
MIXERS = "model/mixers.py"

PROPERTIES = (
    Property(
        "Models that only the plan knows have the parameters of transformers.",
        f"{TESTS}test_transformers_counts_the_same_parameters",
        (
            Fault(
                "a gate of the queries that is not counted",
                COSTS,
                "gates = q * config.gated_attention",
                "gates = 0",
            ),
            Fault(
                "a value projection where keys are values",
                MIXERS,
                "kv * (2 if self.projects_values else 1)",
                "2 * kv",
            ),
            Fault(
                "a shared expert that is not counted",
                COSTS,
                "shapes += shared_expert(config, shard) if has_experts else []",
                "pass",
            ),
        ),
    ),
    Property(
        "Models with state spaces have the parameters and states of transformers.",
        f"{TESTS}test_published_state_spaces_are_counted[nemotron-h-8b-billions0-used0-4]",
        (
            Fault(
                "a mixer without an MLP has its norm",
                "model/config.py",
                "in_layers -= self.num_mixers_alone * per_norm",
                "in_layers -= 0",
            ),
            Fault(
                "what reads a state has no convolution",
                MIXERS,
                "return num_heads * self.head_dim + 2 * num_groups * self.state_dim",
                "return num_heads * self.head_dim + num_groups * self.state_dim",
            ),
            Fault(
                "an MLP without a gate has one",
                "model/config.py",
                "return 2 if self.gated_mlp else 1",
                "return 2",
            ),
        ),
    ),
    Property(
        "Linear layers read and write their state once, and what each token writes that may be "
        "forgotten.",
        f"{TESTS}test_a_forward_of_linear_layers_reads_and_writes_their_states_once",
        (
            Fault(
                "what drafts write is not counted",
                COSTS,
                "num_open = T if num_logits is None else 0",
                "num_open = 0",
            ),
            Fault(
                "all tokens of a part of a prompt may be forgotten",
                COSTS,
                "num_open = T if num_logits is None else 0",
                "num_open = T",
            ),
            Fault(
                "a state is only read",
                COSTS,
                "mixer_bytes += n * 2 * kept  # read, and written",
                "mixer_bytes += n * kept",
            ),
            Fault(
                "a state that is not divided among ranks",
                MIXERS,
                "state = self._heads(shard)[0] * self.key_dim",
                "state = self.num_value_heads * self.key_dim",
            ),
        ),
    ),
    Property(
        "Kimi Delta Attention is counted as published.",
        f"{TESTS}test_the_published_fields_of_kimi_linear_are_read",
        (
            Fault(
                "layers are numbered from 0",
                "model/families/planned.py",
                "return {number - 1 for number in full or ()}",
                "return {number % num_layers for number in full or ()}",
            ),
            Fault(
                "one decay for each head",
                MIXERS,
                "return 3 * self._num_heads(shard) * self.head_dim * STATE_BYTES",
                "return self._num_heads(shard) * (2 * self.head_dim + 1) * STATE_BYTES",
            ),
            Fault(
                "the gate of the output has no matrix of low rank",
                MIXERS,
                "[(3 * width + heads, hidden), *low_rank, *low_rank, (hidden, width)]",
                "[(3 * width + heads, hidden), *low_rank, (hidden, width)]",
            ),
        ),
    ),
    Property(
        "Every rank reads the latents, once for all of its heads.",
        f"{TESTS}test_latents_are_read_once_for_all_heads",
        (
            Fault(
                "latents that ranks share",
                MIXERS,
                "return (self.kv_rank + self.rope_dim) * dtype_bytes",
                "return (self.kv_rank + self.rope_dim) * dtype_bytes / shard.size",
            ),
            Fault(
                "heads that every rank computes",
                MIXERS,
                "return self._num_heads(shard) * per_key * visible(T, S)",
                "return self.num_heads * per_key * visible(T, S)",
            ),
        ),
    ),
    Property(
        "Compressed caches are read by window, choice and rate.",
        f"{TESTS}test_compressed_caches_are_read_by_window_choice_and_rate",
        (
            Fault(
                "an index that is not read",
                MIXERS,
                "numbers += seen * self.index_dim * (self.num_chosen > 0)",
                "pass",
            ),
            Fault(
                "one choice for all tokens of a row",
                MIXERS,
                "min(seen, T * self.num_chosen)",
                "min(seen, self.num_chosen)",
            ),
        ),
    ),
    Property(
        "Experts are stored in a format of their own.",
        f"{TESTS}test_stored_experts_have_bytes_of_their_own",
        (
            Fault(
                "experts as wide as other layers",
                COSTS,
                "round(number * (average if own is None else own))",
                "round(number * average)",
            ),
        ),
    ),
    Property(
        "What computes refuses a model that only the plan knows.",
        f"{TESTS}test_what_computes_refuses_a_model_that_only_the_plan_knows",
        (
            Fault(
                "a model that is taken for one that runs",
                "model/families/family.py",
                "if config.planned_only:",
                "if False:",
            ),
        ),
    ),
)
